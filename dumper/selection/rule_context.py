"""RuleContext: the properties of one firing that conditions of rules and triggers can read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_NO_TAGS: Mapping[str, Any] = {}


class RuleContext(NamedTuple):
    """Properties of one firing, as read by conditions."""

    step: int = 0
    phase: str = "forward"
    micro: int = 0
    pass_: str = "forward"
    occurrence: int = 0
    age: int = 0
    """Number of steps since the configuration took effect."""
    dtype: str | None = None
    """Dtype without ``torch.``; None for a value that is not a tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    tags: Mapping[str, Any] = _NO_TAGS
    requests: frozenset[str] = frozenset()
    """Ids of the requests in the step."""
