"""Slot: memory of ours that holds a payload until the recorder has it, and the sinks that give it out."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tapscope.dumper.records.inflight_record import InflightRecord
    from tapscope.dumper.steps.deferred_line import DeferredLine


class SlotOwner(Protocol):
    """Whose memory a slot is, where it is not the backlog's."""

    def free(self, slot: "PayloadSlot") -> None:
        """The recorder has the bytes."""
        ...


class PayloadSlot(NamedTuple):
    """A place for one payload."""

    address: int
    nbytes: int
    offset: int
    """Place in the ring, or -1."""
    buffer: np.ndarray[Any, np.dtype[np.uint8]] | None
    """From the pool, where the ring has no room; None for a place in the ring."""
    owner: SlotOwner | None = None
    """None for the backlog's own."""


class Sink(Protocol):
    """Where records go: the backlog of the pipeline, or something that holds them first."""

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Memory for a payload; None when it had to be given up."""
        ...

    def cancel(self, slot: PayloadSlot) -> None:
        """The payload is not needed after all."""
        ...

    def put(self, record: "InflightRecord") -> bool:
        """Queue a record and count it as sent in its step; False when it had to be dropped, its slot too."""
        ...

    def append(self, line: "DeferredLine | bytes") -> None:
        """Queue a line that is no record."""
        ...
