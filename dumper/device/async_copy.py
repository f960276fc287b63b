"""Copy: one value on its way from a device, as the rest of its record."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tapscope.dumper.device.device import Ticket
from tapscope.dumper.records.payload_slot import Slot

if TYPE_CHECKING:
    from tapscope.dumper.device.d2h_worker import Drain
    from tapscope.dumper.records.inflight_record import Pending
    from tapscope.dumper.records.site_port import Layout


class NotArrived(Exception):
    """A value did not come from the device; the text says why. Never leaves the dumper."""


class Sharing:
    """Payloads of one generation that came from a device: only here is known which are equal. One thread uses it."""

    def __init__(self) -> None:
        self._generation = -1
        self._payloads: dict[tuple[bytes, int], int] = {}

    def payload_of(self, pending: "Pending", digest: bytes) -> int:
        """Number of the payload that holds the record's bytes: its own, if they are new."""
        if pending.generation != self._generation:
            self._generation = pending.generation
            self._payloads.clear()
        assert pending.payload is not None
        return self._payloads.setdefault((digest, pending.nbytes), pending.payload)


class Copy:
    """One value on its way; the arrival of its record (:class:`tapscope.dumper.records.inflight_record.Arrival`)."""

    __slots__ = (
        "_drain",
        "ask",
        "digest",
        "free",
        "is_done",
        "is_given_up",
        "is_wanted",
        "layout",
        "problem",
        "slot",
        "text",
        "ticket",
    )

    def __init__(
        self,
        drain: "Drain",
        layout: "Layout",
        slot: Slot | None,
        free: Callable[[Slot], None] | None,
        ask: Callable[[bytes], bool] | None,
    ) -> None:
        self._drain = drain
        self.layout = layout
        self.slot = slot
        """Where the bytes go; None for a row, of which the device has computed the statistics."""
        self.free = free
        """Who gets the slot back when it is done; None while a record holds it."""
        self.ask = ask
        """Asked in the drain's thread with the text: whether the bytes are wanted after all."""
        self.is_wanted = slot is not None and free is None and ask is None
        """Whether the bytes are kept, not only their statistics."""
        self.is_given_up = False
        self.ticket: Ticket | None = None
        self.text = b""
        self.digest = b""
        self.problem: str | None = None
        """Why it did not come."""
        self.is_done = False

    @property
    def nbytes(self) -> int:
        """Bytes that come from the device, but for rows."""
        return 0 if self.slot is None else self.slot.nbytes

    @property
    def is_here(self) -> bool:
        """Whether :meth:`finish` need not wait."""
        return self.is_done or self._drain.is_overdue

    def finish(self, pending: "Pending") -> None:
        """Fill the record in; raises NotArrived. In the pipeline's thread, in the order of the records."""
        self._drain.finish(self, pending)

    def give_up(self, slot: Slot, free: Callable[[Slot], None]) -> None:
        """The record will not be sent: ``free`` the slot as soon as nothing writes there any more."""
        with self._drain.lock:
            if not self.is_done:
                self.is_given_up, self.free = True, free
                return
        free(slot)
