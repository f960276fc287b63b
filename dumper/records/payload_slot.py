"""PayloadSlot: memory of a payload until the recorder acknowledges it."""

from typing import Any, NamedTuple, Protocol

import numpy as np


class SlotOwner(Protocol):
    """Owner of slots whose memory does not belong to the send queue."""

    def free(self, slot: "PayloadSlot") -> None:
        """Free a slot, whose bytes the recorder has acknowledged."""
        ...


class PayloadSlot(NamedTuple):
    """Memory for one payload."""

    address: int
    """Host address of the first byte in this process."""
    nbytes: int
    offset: int
    """Offset in the shared-memory ring; -1 for a slot outside the ring."""
    buffer: np.ndarray[Any, np.dtype[np.uint8]] | None
    """Pool buffer, used if the ring is full or missing; None for a slot in the ring."""
    owner: SlotOwner | None = None
    """Owner of the memory; None if it belongs to the send queue."""


class SlotSource(Protocol):
    """Allocator of payload memory."""

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Reserve memory for a payload; return None if there is none, so that the payload must be dropped."""
        ...

    def cancel(self, slot: PayloadSlot) -> None:
        """Free a reserved slot that is not used."""
        ...
