"""ReplayPlan: the records of a CUDA graph's replays, whose lines differ only in numbers, step and statistics."""

import struct
from collections.abc import Sequence

from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.kernels.native import library


class ReplayPlan:
    """Learned from the records of one replay; later ones become one item of the send queue."""

    __slots__ = ("_heads", "_offsets", "_tails", "sites")

    def __init__(self, learned: Sequence[tuple[InflightRecord, int]]) -> None:
        """``learned`` are the records in order, each with the offset of its statistics in the graph's memory.

        The offset is -1 where the record says the same at every replay.
        """
        self.sites = tuple(record.port.site for record, _ in learned)
        self._heads = tuple(f',"site":{record.port.site_text},"step":'.encode() for record, _ in learned)
        self._tails = tuple(_tail(record, offset) for record, offset in learned)
        self._offsets = struct.pack(f"{len(learned)}q", *(offset for _, offset in learned))

    def lines(self, step: str, number: int, address: int) -> bytes:
        """The record lines of a replay whose memory was copied to ``address``; ``number`` is the first one's."""
        functions = library.functions()
        assert functions is not None
        assert functions.compose_rows is not None
        return functions.compose_rows(address, self._heads, self._tails, self._offsets, step, number)


def is_available() -> bool:
    """Whether the C++ library that writes the lines is there."""
    functions = library.functions()
    return functions is not None and functions.compose_rows is not None


def _tail(record: InflightRecord, offset: int) -> bytes:
    text = f"{record.port.model_text}{record.layout.members}".encode()
    return text if offset >= 0 else text + b"," + record.content
