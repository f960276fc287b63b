"""InMemorySink: keep records in memory, for tests and interactive use without a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from tapscope.core.site import Glob
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import is_plain
from tapscope.dumper.selection.selection import CaptureSpec
from tapscope.dumper.steps.deferred_line import DeferredLine


@dataclass(frozen=True, slots=True)
class CapturedRecord:
    """A record kept in memory."""

    site: str
    value: Any
    """Copy of the value: a detached tensor on its device, or a NumPy array; other values are not copied."""
    step: int
    occurrence: int
    micro: int
    pass_: str
    model: str
    dims: str | None
    tags: dict[str, Any]


class InMemorySink(Sequence[CapturedRecord]):
    """Sequence of all records captured in a :meth:`Dumper.capture_output` block, in capture order."""

    def __init__(self) -> None:
        self._items: list[CapturedRecord] = []

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> CapturedRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CapturedRecord]: ...
    def __getitem__(self, index: int | slice) -> CapturedRecord | list[CapturedRecord]:
        return self._items[index]

    def __repr__(self) -> str:
        return f"<InMemorySink of {len(self)} records at {len(self.sites)} sites>"

    @property
    def sites(self) -> list[str]:
        """Distinct sites in order of their first record."""
        return list(dict.fromkeys(item.site for item in self._items))

    def select(self, glob: str) -> list[CapturedRecord]:
        """Return the records whose site matches ``glob``, or that were dumped under exactly this name."""
        pattern, name = Glob(glob), f":tap[{glob}]"
        return [item for item in self._items if item.site.endswith(name) or pattern.matches(item.site)]

    def values(self, glob: str) -> list[Any]:
        """Return the values of the records that :meth:`select` returns."""
        return [item.value for item in self.select(glob)]

    def add(self, port: SitePort, leaf: Any, firing: Firing, spec: CaptureSpec) -> None:
        """Append a record with a copy of ``leaf``, sliced as ``spec`` requests; raises like :meth:`SitePort.slice`."""
        if isinstance(leaf, torch.Tensor) and (spec.rows is not None or spec.requests is not None):
            leaf = port.slice(leaf, firing.step, spec).tensor
        self._items.append(
            CapturedRecord(
                port.site,
                _copy(leaf),
                firing.step.info.step,
                firing.occurrence,
                firing.micro,
                firing.pass_,
                port.model,
                port.dims,
                dict(firing.tags or {}),
            )
        )


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        with torch.no_grad():
            return leaf.detach().clone() if is_plain(leaf) or leaf.layout is torch.strided else leaf.detach()
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


class NullSink:
    """Sink of a recording without a run: discards all lines, because values are captured in memory."""

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Return None: there is no memory for payloads."""
        return None

    def cancel(self, slot: PayloadSlot) -> None:
        """Do nothing: no slot is ever reserved."""

    def put(self, record: InflightRecord) -> bool:
        """Return False: records are rejected."""
        return False

    def append(self, line: DeferredLine | bytes) -> None:
        """Discard the line."""

    def flush_soon(self) -> None:
        """Do nothing: there is nothing to flush."""


NULL_SINK = NullSink()
