"""Choice change: the reason why the integers of a site may differ, such as sampled tokens or a router's expert
choices."""

from msgspec import Struct


class ChoiceChange(Struct, frozen=True):
    """Reason why the unequal integers of a site are not an error of the target."""

    sentence: str
    scores: str = ""
    """Site whose errors explain the changed choices if that site is within its floor; empty if the requests fork."""
    rerouted: frozenset[int] = frozenset()
    """Row pairs routed to different sets of experts; a different order alone does not count."""
    changed: frozenset[int] = frozenset()
    """Row pairs whose choices differ, including a different order."""
    num_choices: int = 0
    """Choices per row."""
    num_rows: int = 0
    """Number of rows if the choice has no token rows: :attr:`rerouted` and :attr:`changed` are then row numbers, see
    :func:`..alignment.row_join.row_numbers`. 0 if they are row pairs."""
    block: str = ""
    """Module in which rerouted rows are excluded; empty for the parent of the choosing module."""
    is_unexplained: bool = False
    """Whether the mismatch is still an error; :attr:`sentence` then states why a near tie could not be shown."""
