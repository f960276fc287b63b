"""BufferedStep: the records and lines that the flight recorder holds of one step."""

from dataclasses import dataclass, field

from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.steps.deferred_line import DeferredLine

RECORD_COST = 512
"""Bytes that a held record is charged for, in addition to its payload and text (approximate)."""
LINE_COST = 64
"""The same for a line that is not a record."""


@dataclass(slots=True)
class BufferedStep:
    """What came between the beginning of one step and that of the next."""

    number: int
    items: list[InflightRecord | DeferredLine | bytes] = field(default_factory=list)
    cost: int = 0
    """Bytes it is charged for: payloads, lines and their object overhead."""
    num_values: int = 0
    nbytes: int = 0
    """Payload bytes."""
    num_dropped: int = 0
    """Values dropped because memory was full."""
    passes_through: bool = False
    """Whether it was released: it holds nothing, and what still comes is sent at once."""

    def hold(self, item: InflightRecord | DeferredLine | bytes, cost: int) -> None:
        """Keep a record or line that is charged for ``cost`` bytes in addition to its payload."""
        self.items.append(item)
        self.cost += cost
        if isinstance(item, InflightRecord):
            self.cost += item.nbytes
            self.nbytes += item.nbytes
            self.num_values += 1

    def add_counts(self, other: "BufferedStep") -> None:
        """Add the counts of a discarded step."""
        self.number += 1
        self.num_values += other.num_values
        self.nbytes += other.nbytes
        self.num_dropped += other.num_dropped

    def release(self) -> list[InflightRecord | DeferredLine | bytes]:
        """Return what was held; send everything that follows at once."""
        items, self.items = self.items, []
        self.cost = self.num_values = self.nbytes = self.num_dropped = 0
        self.passes_through = True
        return items
