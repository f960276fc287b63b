"""StateTable: the recurrent state of one request."""

from dataclasses import dataclass, field
from typing import Any

SLOTS_PER_REQUEST = 2
"""Slots that a running request holds at most: its own, and the checkpoint that it reads."""


@dataclass(slots=True, eq=False)
class StateTable:
    """Slots of a request in a :class:`~tapscope.engine.scheduling.state_group.StateGroup`, which sets all fields."""

    slot: int = -1
    """Its own slot, which its next step writes; -1 for none."""
    draft_slots: list[int] = field(default_factory=list)
    """Slots of the states after each draft token that its step verifies; freed when the step is committed. Of a request
    of a draft model: after each draft token that its last steps computed."""
    is_drafting: bool = False
    """Whether its next step computes a draft token of a draft model, before which all states are kept."""
    checkpoint: Any = None
    """The :class:`.RadixNode` of the checkpoint that its next step reads instead of its own slot."""

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return self.slot < 0 and self.checkpoint is None and not self.draft_slots
