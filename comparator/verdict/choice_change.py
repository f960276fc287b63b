"""ChoiceChange: why the integers of a site may differ: tokens that were sampled, or experts that a router chose."""

from msgspec import Struct


class ChoiceChange(Struct, frozen=True):
    """Why the unequal integers of a site are not the target's fault."""

    sentence: str
    scores: str = ""
    """Site whose errors explain them, if that one is within its floor; empty where the requests fork."""
    rerouted: frozenset[int] = frozenset()
    """Row pairs that went to other experts; a change of their order alone reroutes none."""
    changed: frozenset[int] = frozenset()
    """Row pairs whose choices are not the same in the same order."""
    num_choices: int = 0
    """Choices a row."""
    block: str = ""
    """Module in which rerouted rows are excluded; empty for the one around the module of the choice."""
    is_unexplained: bool = False
    """Whether it excuses nothing, and only says why a near tie could not be shown."""
