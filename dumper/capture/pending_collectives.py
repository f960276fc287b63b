"""Underway: values that a collective was still computing when their tap fired.

Nobody here waits for a collective. The model does, before it uses the value: from then on the value is taken, with the
number among the records that it had. What is written to meanwhile, or never waited for, is a failure with its reason.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import UnsupportedTensor
from tapscope.dumper.retention.step_counters import StepCounters


class CollectivePending(UnsupportedTensor):
    """The model has not waited for the collective yet that computes ``value``, an AsyncCollectiveTensor."""

    def __init__(self, value: Any) -> None:
        super().__init__("the collective that computes it is still under way, and is not waited for")
        self.value = value


class _Held(NamedTuple):
    port: SitePort
    leaf: Any
    firing: Firing
    reason: CollectivePending
    number: int
    version: int | None


class PendingCollectives:
    """What one taker will take later."""

    def __init__(self, counters: StepCounters) -> None:
        self._account = counters
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, port: SitePort, leaf: Any, firing: Firing, reason: CollectivePending, number: int) -> None:
        """Keep ``leaf``, whose record will be the one of that number."""
        self._held.append(_Held(port, leaf, firing, reason, number, _version(reason.value)))

    def settle(self, take: Callable[[SitePort, Any, Firing, Iterator[int]], None], *, last: bool) -> None:
        """``take`` what has come by now; with ``last`` the rest has failed. Raises nothing that ``take`` does not."""
        held, self._held = self._held, []
        for each in held:
            step = each.firing.step
            if not each.reason.value.completed:
                if last:
                    self._account.fail(step, each.port.site, each.reason)
                else:
                    self._held.append(each)
            elif each.version is None or _version(each.reason.value) != each.version:
                reason = UnsupportedTensor("it may have been written to since the collective that computed it")
                self._account.fail(step, each.port.site, reason)
            else:
                take(each.port, each.leaf, each.firing, itertools.repeat(each.number, 1))


def _version(value: Any) -> int | None:
    """How often the memory was written to, by either name; None where torch does not count (inference tensors)."""
    if value.is_inference() or value.elem.is_inference():
        return None
    return int(value._version) + int(value.elem._version)
