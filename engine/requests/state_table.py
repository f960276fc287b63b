"""StateTable: the recurrent state slots of one request."""

from dataclasses import dataclass, field
from typing import Any

SLOTS_PER_REQUEST = 2
"""Maximum number of slots that a running request holds: its own slot, and the checkpoint that it reads."""


@dataclass(slots=True, eq=False)
class StateTable:
    """Slots of one request in a :class:`~tapscope.engine.scheduling.state_group.StateGroup`, which sets all fields."""

    slot: int = -1
    """The request's own slot, which the next step writes; -1: none."""
    draft_slots: list[int] = field(default_factory=list)
    """Slots of the states after each draft token that the current step verifies; freed when the step is committed.

    For a request of a draft model: slots of the states after each draft token that the last steps computed.
    """
    is_drafting: bool = False
    """Whether the request's next step computes a draft token of a draft model; all earlier states are then kept."""
    checkpoint: Any = None
    """The :class:`.RadixNode` of the checkpoint that the next step reads instead of the request's own slot."""

    @property
    def is_empty(self) -> bool:
        """Whether the request holds no slots and no checkpoint."""
        return self.slot < 0 and self.checkpoint is None and not self.draft_slots
