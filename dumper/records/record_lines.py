"""Lines: records on their way as text, and the payloads that travel with it."""

from collections.abc import Sequence
from typing import NamedTuple

from tapscope.dumper.records.payload_slot import Slot
from tapscope.dumper.records.site_port import Layout, Port
from tapscope.dumper.steps.open_step import OpenStep


class Payload(NamedTuple):
    """The bytes of a record."""

    port: Port
    layout: Layout
    slot: Slot


class Lines(NamedTuple):
    """Records on their way, as the text that will lie on disk, and their payloads."""

    text: bytes
    """Without the last newline."""
    number: int
    step: OpenStep
    generation: int = 0
    """Payloads are shared within one."""
    payloads: Sequence[tuple[int, int, Payload]] = ()
    """(line, number of the payload, the payload)"""
    shared: Sequence[tuple[int, int]] = ()
    """(line, number of the payload that holds the same bytes)"""

    @property
    def nbytes(self) -> int:
        """Of the payloads that travel with it."""
        return sum(payload.slot.nbytes for _, _, payload in self.payloads)
