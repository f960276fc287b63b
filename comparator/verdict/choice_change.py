"""Choice change: why the integers of a site may differ: sampled tokens, or experts chosen by a router."""

from msgspec import Struct


class ChoiceChange(Struct, frozen=True):
    """Why the unequal integers of a site are not an error of the target."""

    sentence: str
    scores: str = ""
    """Site whose errors explain them, if it is within its floor; empty if the requests fork."""
    rerouted: frozenset[int] = frozenset()
    """Row pairs routed to different experts; a different order alone reroutes none."""
    changed: frozenset[int] = frozenset()
    """Row pairs whose choices differ, or differ in order."""
    num_choices: int = 0
    """Choices per row."""
    num_rows: int = 0
    """Rows of the choice where it has no token rows: then :attr:`rerouted` and :attr:`changed` are row numbers, see
    :func:`..alignment.row_join.row_numbers`. 0 where these are row pairs."""
    block: str = ""
    """Module in which rerouted rows are excluded; empty for the parent of the choosing module."""
    is_unexplained: bool = False
    """Whether it excuses nothing, and only says why a near tie could not be shown."""
