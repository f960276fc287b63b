"""Lines: records on their way as text, and the payloads that travel with it."""

from collections.abc import Sequence
from typing import NamedTuple

from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.site_port import RecordLayout, SitePort
from tapscope.dumper.steps.open_step import OpenStep


class LinePayload(NamedTuple):
    """The bytes of a record."""

    port: SitePort
    layout: RecordLayout
    slot: PayloadSlot


class RecordLines(NamedTuple):
    """Records on their way, as the text that will lie on disk, and their payloads."""

    text: bytes
    """Without the last newline."""
    num_lines: int
    step: OpenStep
    generation: int = 0
    """Payloads are shared within one."""
    payloads: Sequence[tuple[int, int, LinePayload]] = ()
    """(line, number of the payload, the payload)"""
    shared: Sequence[tuple[int, int]] = ()
    """(line, number of the payload that holds the same bytes)"""

    @property
    def nbytes(self) -> int:
        """Of the payloads that travel with it."""
        return sum(payload.slot.nbytes for _, _, payload in self.payloads)
