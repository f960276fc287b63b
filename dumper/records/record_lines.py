"""RecordLines: batches of formatted records with their payloads."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.transport.packed_rows import PackedRows
from tapscope.run_format.ledger import encode_line, event_line

_SKETCH = re.compile(rb',"sketch":\{[^}]*\}')


class LinePayload(NamedTuple):
    """Payload of one of several formatted records."""

    port: SitePort
    layout: RecordLayout
    slot: PayloadSlot


class RecordLines(NamedTuple):
    """Formatted records and their payloads."""

    text: bytes | PackedRows
    """Lines without the final newline, or packed rows, from which the recorder formats the lines."""
    num_lines: int
    step: OpenStep
    generation: int = 0
    """Number of the scope within which payloads are shared."""
    payloads: Sequence[tuple[int, int, LinePayload]] = ()
    """(index of the line, payload number, payload)"""
    shared: Sequence[tuple[int, int]] = ()
    """(index of the line, number of an earlier payload with equal bytes)"""
    block: PayloadSlot | None = None
    """Memory block of packed rows."""

    @property
    def nbytes(self) -> int:
        """Total size of ``payloads`` in bytes."""
        return sum(payload.slot.nbytes for _, _, payload in self.payloads)

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """Drop the records: call ``free`` on their slots."""
        for _, _, payload in self.payloads:
            free(payload.slot)


class LinesCopy(Protocol):
    """Interface of the copy for :class:`PendingLines` (:class:`tapscope.dumper.device.async_copy.AsyncCopy`)."""

    @property
    def is_ready(self) -> bool:
        """Whether the copy has completed or failed."""
        ...

    def finish(self, record: Any) -> None:
        """Set ``record.content`` and ``record.payloads``; raises if the copy failed."""
        ...

    def discard_slots(self, free: Callable[[PayloadSlot], None]) -> None:
        """Call ``free`` on the slots that the copy fills, once it no longer writes to them."""
        ...


class PendingLines:
    """Records of one CUDA graph replay or of rows of statistics that a device computes.

    They are formatted once the statistics have been copied from the device.
    """

    __slots__ = (
        "_amend",
        "_copy",
        "_sites",
        "block",
        "content",
        "generation",
        "nbytes",
        "num_lines",
        "payloads",
        "shared",
        "slot",
        "step",
    )

    def __init__(
        self,
        step: OpenStep,
        sites: Sequence[str | bytes],
        copy: LinesCopy,
        generation: int,
        payloads: Sequence[tuple[int, int, LinePayload]] = (),
        amend: Callable[["PendingLines"], None] | None = None,
        block: PayloadSlot | None = None,
    ) -> None:
        """Create records that wait for ``copy``.

        ``sites`` are the sites of the records in order, or the ``site`` parts of their lines. ``payloads`` and
        ``block`` are as in :class:`RecordLines`. ``amend`` is called once the records are complete and the token rows
        of the step are known.
        """
        self.payloads, self.block = payloads, block
        self.shared: Sequence[tuple[int, int]] = ()
        """(line, payload number) of payloads whose bytes were sent before; set by the copy."""
        self.nbytes = sum(payload.slot.nbytes for _, _, payload in payloads) + (block.nbytes if block else 0)
        self.step = step
        self.num_lines = len(sites)
        self.generation = generation
        self.content: bytes | PackedRows = b""
        """Lines or packed rows, set by the copy."""
        self.slot = None
        self._sites = sites
        self._copy, self._amend = copy, amend

    @property
    def is_ready(self) -> bool:
        """Whether the records can be sent."""
        return self._copy.is_ready

    def finish(self) -> RecordLines:
        """Return the formatted records; if the copy failed, return a ``failed`` event for each record."""
        try:
            self._copy.finish(self)
            if self._amend is not None:
                self._amend(self)
            text = self.content
        except Exception as error:  # noqa: BLE001 - a failed copy must not end the capture
            self.payloads, self.block = (), None
            reason, number = f"{type(error).__name__}: {error}", self.step.info.step
            sites = (site if isinstance(site, str) else _site_in(site) for site in self._sites)
            events = (event_line("failed", late=True, step=number, where=site, reason=reason) for site in sites)
            text = b"\n".join(encode_line(event) for event in events)
        return RecordLines(text, self.num_lines, self.step, self.generation, self.payloads, self.shared, self.block)

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """Drop the records: call ``free`` on their slots once the copy no longer writes to them."""
        self._copy.discard_slots(free)


def leave_out_sketches(sketched: Collection[int], free: Callable[[PayloadSlot], None], lines: PendingLines) -> None:
    """Remove the sketches from ``lines`` if their step turned out to have other rows than those that were sketched.

    ``sketched`` are the indices of lines with a sketch; ``free`` is called on the slots of removed sketches.
    """
    if not lines.step.has_other_rows:
        return
    if isinstance(lines.content, PackedRows):
        lines.content.has_sketches = False
        return
    kept = enumerate(lines.content.split(b"\n"))
    lines.content = b"\n".join([_SKETCH.sub(b"", line) if number in sketched else line for number, line in kept])
    for line, _, payload in lines.payloads:
        if line in sketched:
            free(payload.slot)
    lines.payloads = [each for each in lines.payloads if each[0] not in sketched]
    lines.shared = [each for each in lines.shared if each[0] not in sketched]


def _site_in(head: bytes) -> str:
    """Parse the site in a line fragment ``,"site":"...","step":``."""
    return str(json.loads(b"{" + head[1:] + b"0}")["site"])
