"""RuleContext: what the conditions of rules and triggers may read of one firing."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_NO_TAGS: Mapping[str, Any] = {}


class RuleContext(NamedTuple):
    """One firing, as conditions see it."""

    step: int = 0
    phase: str = "forward"
    micro: int = 0
    pass_: str = "forward"
    occurrence: int = 0
    age: int = 0
    """Steps since the configuration took effect."""
    dtype: str | None = None
    """None for a value that is not a tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    tags: Mapping[str, Any] = _NO_TAGS
    requests: frozenset[str] = frozenset()
    """Ids of the requests in this step."""
