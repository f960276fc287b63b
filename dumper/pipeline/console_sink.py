"""ConsoleSink: print one line per captured record to stderr."""

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from tapscope.core.formatting import printable
from tapscope.dumper.records.inflight_record import InflightRecord, Sink
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.steps.deferred_line import DeferredLine

if TYPE_CHECKING:
    from tapscope.dumper.records.inflight_record import InflightRecord

_MAX_VALUE = 60


class ConsoleSink:
    """A sink that forwards records to another sink and prints each of them to stderr::

    [tapscope rank 0 step 3] layers.3:tap[q] float32 [17, 512] mean 0.012 absmax 3.4 nan 0
    """

    def __init__(self, sink: Sink, rank: int) -> None:
        self.sink = sink
        self._rank = rank

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Delegate to the wrapped sink."""
        return self.sink.reserve(nbytes)

    def cancel(self, slot: PayloadSlot) -> None:
        """Delegate to the wrapped sink."""
        self.sink.cancel(slot)

    def put(self, record: InflightRecord) -> bool:
        """Forward the record to the wrapped sink, then print it."""
        accepted = self.sink.put(record)
        self._print(record, "" if accepted else " dropped")
        return accepted

    def append(self, line: DeferredLine | bytes) -> None:
        """Delegate to the wrapped sink."""
        self.sink.append(line)

    def _print(self, record: InflightRecord, ending: str) -> None:
        with contextlib.suppress(Exception):  # an error of the terminal must not reach the model
            text = describe(record)
            print(printable(f"[tapscope rank {self._rank} {text}{ending}"), file=sys.stderr, flush=True)


def describe(record: InflightRecord) -> str:
    """Format a record as ``step 3] SITE DTYPE SHAPE mean .. absmax .. nan ..``, omitting default values."""
    firing, layout = record.firing, record.layout
    where = f"step {firing.step.info.step}"
    if firing.micro:
        where += f" micro {firing.micro}"
    if firing.pass_ != "forward":
        where += f" {firing.pass_}"
    site = record.port.site + (f"#{firing.occurrence}" if firing.occurrence else "")
    members: dict[str, Any] = json.loads(b"{%b}" % record.content.strip(b",")) if record.content else {}
    if "value" in members:
        return f"{where}] {site} {_value(members['value'])}"
    return f"{where}] {site} {layout.dtype} {list(layout.shape)}{_stats(members.get('stats'))}"


def _value(value: dict[str, Any]) -> str:
    text = json.dumps(value.get("value", value.get("class")), ensure_ascii=False)
    return f"{value.get('type')} {text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + '...'}"


def _stats(stats: dict[str, Any] | None) -> str:
    if not stats:
        return ""
    finite = stats["count"] - stats["nan"] - stats["posinf"] - stats["neginf"]
    parts = []
    if finite and stats["sum"] is not None:
        parts.append(f"mean {stats['sum'] / finite:.4g}")
    if stats["absmax"] is not None:
        parts.append(f"absmax {stats['absmax']:.4g}")
    parts.append(f"nan {stats['nan']}")
    if infinite := stats["posinf"] + stats["neginf"]:
        parts.append(f"inf {infinite}")
    return " " + " ".join(parts)
