"""HeldStep: what the flight recorder holds of one step."""

from dataclasses import dataclass, field

from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.steps.deferred_line import DeferredLine

RECORD_COST = 512
"""Bytes that a held record is charged for beside its payload and text, roughly."""
LINE_COST = 64
"""The same for a line that is no record."""


@dataclass(slots=True)
class BufferedStep:
    """What came from the beginning of one step to that of the next."""

    number: int
    items: list[InflightRecord | DeferredLine | bytes] = field(default_factory=list)
    cost: int = 0
    """Bytes it is charged for: payloads, lines and what they weigh as objects."""
    num_values: int = 0
    nbytes: int = 0
    """Of payloads."""
    num_dropped: int = 0
    """Values there was no room for."""
    passes_through: bool = False
    """Whether it was released: it holds nothing, and what still comes goes on at once."""

    def hold(self, item: InflightRecord | DeferredLine | bytes, cost: int) -> None:
        """Keep a record or a line that is charged for ``cost`` bytes, its payload aside."""
        self.items.append(item)
        self.cost += cost
        if isinstance(item, InflightRecord):
            self.cost += item.nbytes
            self.nbytes += item.nbytes
            self.num_values += 1

    def add_counts(self, other: "BufferedStep") -> None:
        """One step more, of which only numbers are kept."""
        self.number += 1
        self.num_values += other.num_values
        self.nbytes += other.nbytes
        self.num_dropped += other.num_dropped

    def release(self) -> list[InflightRecord | DeferredLine | bytes]:
        """Hold nothing any more and let everything flow; gives what was held."""
        items, self.items = self.items, []
        self.cost = self.num_values = self.nbytes = self.num_dropped = 0
        self.passes_through = True
        return items
