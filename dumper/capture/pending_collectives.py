"""PendingCollectives: values whose collective was still in progress when their tap fired.

The dumper never waits for a collective. The model waits before it uses the value; afterwards the dumper records the
value under the record number reserved for it. A value that was modified in the meantime, or that the model never waited
for, counts as failed, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import UnsupportedTensor
from tapscope.dumper.retention.step_counters import StepCounters


class CollectivePending(UnsupportedTensor):
    """Raised if the model has not yet waited for the collective that computes ``value``, an AsyncCollectiveTensor."""

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
    """Values that one capturer records once their collectives have completed."""

    def __init__(self, counters: StepCounters) -> None:
        self._counters = counters
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, port: SitePort, leaf: Any, firing: Firing, reason: CollectivePending, number: int) -> None:
        """Hold ``leaf`` until its collective completes; ``number`` is the record number reserved for it."""
        self._held.append(_Held(port, leaf, firing, reason, number, _version(reason.value)))

    def settle(self, capture: Callable[[SitePort, Any, Firing, int], None], *, last: bool) -> None:
        """Call ``capture`` for each value whose collective has completed; with ``last``, the rest count as failed."""
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
    """Return the number of in-place writes to the wrapper and its ``elem``; None for inference tensors (no counter)."""
    if value.is_inference() or value.elem.is_inference():
        return None
    return int(value._version) + int(value.elem._version)
