"""PayloadSlot: memory that holds a payload until the recorder has it."""

from typing import Any, NamedTuple, Protocol

import numpy as np


class SlotOwner(Protocol):
    """Owns the memory of a slot that is not the send queue's."""

    def free(self, slot: "PayloadSlot") -> None:
        """The recorder has the bytes."""
        ...


class PayloadSlot(NamedTuple):
    """Memory for one payload."""

    address: int
    nbytes: int
    offset: int
    """Offset in the shared-memory ring, or -1."""
    buffer: np.ndarray[Any, np.dtype[np.uint8]] | None
    """A buffer from the pool, where the ring has no room; None for a slot in the ring."""
    owner: SlotOwner | None = None
    """None for the send queue's own."""


class SlotSource(Protocol):
    """Gives out memory for payloads."""

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Memory for a payload; None when there is none, and the payload is dropped."""
        ...

    def cancel(self, slot: PayloadSlot) -> None:
        """The payload is not needed."""
        ...
