"""PendingCollectives: values that a collective was still computing when their tap fired.

The dumper never waits for a collective. The model does, before it uses the value: after that the value is recorded,
with the record number that was reserved for it. A value that was written to in the meantime, or that the model never
waited for, counts as failed, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import UnsupportedTensor
from tapscope.dumper.retention.step_counters import StepCounters


class CollectivePending(UnsupportedTensor):
    """The model has not yet waited for the collective that computes ``value``, an AsyncCollectiveTensor."""

    def __init__(self, value: Any) -> None:
        super().__init__("the collective that computes it has not completed, and the model does not wait for it")
        self.value = value


@dataclass(frozen=True, slots=True)
class _Held:
    port: SitePort
    leaf: Any
    firing: Firing
    reason: CollectivePending
    number: int
    version: int | None


class PendingCollectives:
    """Values that one capturer records later."""

    def __init__(self, counters: StepCounters) -> None:
        self._counters = counters
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, port: SitePort, leaf: Any, firing: Firing, reason: CollectivePending, number: int) -> None:
        """Keep ``leaf``; ``number`` is reserved for its record."""
        self._held.append(_Held(port, leaf, firing, reason, number, _version(reason.value)))

    def settle(self, capture: Callable[[SitePort, Any, Firing, int], None], *, last: bool) -> None:
        """``capture`` the values that have completed; with ``last`` the others count as failed."""
        held, self._held = self._held, []
        for each in held:
            step = each.firing.step
            if not each.reason.value.completed:
                if last:
                    self._counters.fail(step, each.port.site, each.reason)
                else:
                    self._held.append(each)
            elif each.version is None or _version(each.reason.value) != each.version:
                reason = UnsupportedTensor("it may have been written to since the collective that computed it")
                self._counters.fail(step, each.port.site, reason)
            else:
                capture(each.port, each.leaf, each.firing, each.number)


def _version(value: Any) -> int | None:
    """How often the memory was written to, under either name; None where torch does not count (inference tensors)."""
    if value.is_inference() or value.elem.is_inference():
        return None
    return int(value._version) + int(value.elem._version)
