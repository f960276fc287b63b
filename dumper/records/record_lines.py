"""RecordLines: records already formatted as text, and the payloads that travel with them."""

from collections.abc import Sequence
from typing import NamedTuple

from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.open_step import OpenStep


class LinePayload(NamedTuple):
    """The bytes of a record."""

    port: SitePort
    layout: RecordLayout
    slot: PayloadSlot


class RecordLines(NamedTuple):
    """Formatted records and their payloads."""

    text: bytes
    """Without the last newline."""
    num_lines: int
    step: OpenStep
    generation: int = 0
    """Payloads are shared within one generation."""
    payloads: Sequence[tuple[int, int, LinePayload]] = ()
    """(line, number of the payload, the payload)"""
    shared: Sequence[tuple[int, int]] = ()
    """(line, number of the payload that holds the same bytes)"""

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads that travel with it."""
        return sum(payload.slot.nbytes for _, _, payload in self.payloads)
