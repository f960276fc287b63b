"""Routers: which integer sites may hold expert indices, judging by the position of expert modules.

In a dense model, integers (positions, ids, lengths) are recorded next to floats, just as expert indices are next to
scores. Expert indices are produced by a router, which is named so or is a sibling of experts, and consumed by experts.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from tapscope.comparator.runs.modules import parent

ROUTERS = frozenset({"router", "gate"})
"""Last path components of modules that score experts."""
_EXPERTS = re.compile(r"(?i)experts?(?![a-z])|moe(?![a-z])")


def is_of_experts(path: str) -> bool:
    """Return whether the last path component names a module that holds experts or routes to them."""
    return _is_expert_name(path.rpartition(".")[2])


@lru_cache(maxsize=4096)  # a model has few distinct last names
def _is_expert_name(name: str) -> bool:
    return name in ROUTERS or "router" in name.lower() or _EXPERTS.search(name) is not None


class ExpertChoosers:
    """The modules of a comparison that may produce or consume expert indices."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Collect the parents of experts and routers; ``paths`` are the modules recorded in either run."""
        self._parents: set[str] = set()
        """Paths of the parents of experts or routers."""
        for path in set(paths):
            holder = path
            while holder:
                above = parent(holder)
                if is_of_experts(holder):
                    self._parents.add(above)
                holder = above

    def may_choose(self, site: str) -> bool:
        """Return whether the integers of a site may be expert indices: an output near a router, or an input of
        experts."""
        path, _, port = site.rpartition(":")
        if not self._parents or port.endswith(".grad"):
            return False
        if port.startswith("in["):
            return is_of_experts(path) and path.rpartition(".")[2] not in ROUTERS
        return is_of_experts(path) or path in self._parents or parent(path) in self._parents
