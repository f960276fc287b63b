"""RecordLines: records already formatted as text, and the payloads that travel with them."""

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
    """The bytes of a record."""

    port: SitePort
    layout: RecordLayout
    slot: PayloadSlot


class RecordLines(NamedTuple):
    """Formatted records and their payloads."""

    text: bytes | PackedRows
    """Without the last newline; or what the recorder makes them of."""
    num_lines: int
    step: OpenStep
    generation: int = 0
    """Payloads are shared within one generation."""
    payloads: Sequence[tuple[int, int, LinePayload]] = ()
    """(line, number of the payload, the payload)"""
    shared: Sequence[tuple[int, int]] = ()
    """(line, number of the payload that holds the same bytes)"""
    block: PayloadSlot | None = None
    """What packed rows are made of."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads that travel with it."""
        return sum(payload.slot.nbytes for _, _, payload in self.payloads)

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """They are not sent: ``free`` their slots."""
        for _, _, payload in self.payloads:
            free(payload.slot)


class LinesCopy(Protocol):
    """The copy that :class:`PendingLines` wait for (:class:`tapscope.dumper.device.async_copy.AsyncCopy`)."""

    @property
    def is_ready(self) -> bool:
        """Whether it has arrived or never will."""
        ...

    def finish(self, record: Any) -> None:
        """Set ``record.content`` and ``record.payloads``; raises when it did not arrive."""
        ...

    def discard_slots(self, free: Callable[[PayloadSlot], None]) -> None:
        """``free`` the slots that it fills, once nothing writes to them any more."""
        ...


class PendingLines:
    """Records of one replay of a graph, which are formatted when their statistics have arrived from the device."""

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
        """``sites`` are those of the records, in order, or the parts of their lines that name them; ``payloads`` and
        ``block`` as in :class:`RecordLines`. ``amend`` is called when they are complete, after the step has got its
        rows."""
        self.payloads, self.block = payloads, block
        self.shared: Sequence[tuple[int, int]] = ()
        """Set by the copy, for payloads whose bytes were sent before."""
        self.nbytes = sum(payload.slot.nbytes for _, _, payload in payloads) + (block.nbytes if block else 0)
        self.step = step
        self.num_lines = len(sites)
        self.generation = generation
        self.content: bytes | PackedRows = b""
        """The lines, set by the copy."""
        self.slot = None
        self._sites = sites
        self._copy, self._amend = copy, amend

    @property
    def is_ready(self) -> bool:
        """Whether they can be sent."""
        return self._copy.is_ready

    def finish(self) -> RecordLines:
        """The formatted lines; where the device has failed, one event for each record."""
        try:
            self._copy.finish(self)
            if self._amend is not None:
                self._amend(self)
            text = self.content
        except Exception as error:  # noqa: BLE001 - what did not arrive must not end the capture
            self.payloads, self.block = (), None
            reason, number = f"{type(error).__name__}: {error}", self.step.info.step
            sites = (site if isinstance(site, str) else _site_in(site) for site in self._sites)
            events = (event_line("failed", late=True, step=number, where=site, reason=reason) for site in sites)
            text = b"\n".join(encode_line(event) for event in events)
        return RecordLines(text, self.num_lines, self.step, self.generation, self.payloads, self.shared, self.block)

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """They are not sent: ``free`` their slots once nothing writes to them any more."""
        self._copy.discard_slots(free)


def leave_out_sketches(sketched: Collection[int], free: Callable[[PayloadSlot], None], lines: PendingLines) -> None:
    """Leave the sketches of these lines out if their step has other rows than were sketched: ``free`` their slots."""
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
    """The site in ``,"site":"...","step":``."""
    return str(json.loads(b"{" + head[1:] + b"0}")["site"])
