"""Routers: which integers may be a choice of experts, by where the modules of experts are.

Integers in a dense model (positions, ids, lengths) lie beside floats as choices lie beside scores. A choice is made by
a router, which is called so or stands beside experts, and is given to experts; no other module has anything to choose.
"""

import re
from collections.abc import Iterable

from tapscope.comparator.runs.modules import parent

ROUTERS = frozenset({"router", "gate"})
"""Last names of modules that score experts."""
_EXPERTS = re.compile(r"(?i)experts?(?![a-z])|moe(?![a-z])")


def is_of_experts(path: str) -> bool:
    """Whether a module holds experts or routes to them, by its own name."""
    name = path.rpartition(".")[2]
    return name in ROUTERS or "router" in name.lower() or _EXPERTS.search(name) is not None


class ExpertChoosers:
    """The modules of a comparison that may choose experts, or are given a choice of them."""

    def __init__(self, paths: Iterable[str]) -> None:
        """``paths`` of the modules that were recorded in either run."""
        self._beside: set[str] = set()
        """Modules with experts or a router right inside."""
        for path in set(paths):
            holder = path
            while holder:
                above = parent(holder)
                if is_of_experts(holder):
                    self._beside.add(above)
                holder = above

    def may_choose(self, site: str) -> bool:
        """Whether the integers of a site may be a choice of experts: what a router gives out, or experts are given."""
        path, _, port = site.rpartition(":")
        if not self._beside or port.endswith(".grad"):
            return False
        if port.startswith("in["):
            return is_of_experts(path) and path.rpartition(".")[2] not in ROUTERS
        return is_of_experts(path) or path in self._beside or parent(path) in self._beside
