"""Pen: writes the lines of records, of statistics without a word of Python in between.

What a pen declines (a tensor that lies otherwise than the last one, that is not plain memory, a firing that is not the
first of its step) the taker takes, and so it does where there is no C++ library; the lines are the same. A hook asks
its fast path (:meth:`NativeRecordWriter.fast_path`) before anything else: what it accepts never reaches Python.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tapscope.core.formatting import plural
from tapscope.dumper.records import snapshot
from tapscope.dumper.records.record_lines import LinePayload, RecordLines
from tapscope.dumper.steps.autograd_passes import graph_task
from tapscope.dumper.steps.tag_context import NO_TAGS, TAGS
from tapscope.kernels.native import library

if TYPE_CHECKING:
    import torch

    from tapscope.dumper.pipeline.send_queue import SendQueue
    from tapscope.dumper.records.dedup_cache import DedupCache
    from tapscope.dumper.records.firing import Firing
    from tapscope.dumper.records.site_port import RecordLayout, SitePort
    from tapscope.dumper.records.snapshot import TensorSnapshot
    from tapscope.dumper.retention.step_counters import StepCounters


class NativeRecordWriter:
    """Between :meth:`begin` and :meth:`end` it writes, and queues its lines by the dozen."""

    def __init__(
        self,
        queue: "SendQueue",
        counters: "StepCounters",
        dedup: "DedupCache",
        send: Callable[["SitePort", "Firing", "RecordLayout", "TensorSnapshot | None"], None],
    ) -> None:
        """``send`` queues the record of a value that was taken, or counts it where it was not, without a pen."""
        self._queue = queue
        self._counters = counters
        self._dedup = dedup
        self._send = send
        functions = library.functions()
        plain = (snapshot.PLAIN_TYPES, snapshot.EXCHANGE, snapshot.keys_of, snapshot.HOST_KEYS)
        self.native: Any = None if functions is None else functions.pen(*plain, graph_task, TAGS, NO_TAGS)
        self.lock = threading.RLock()
        """Held while records are queued, so that they come in their order."""
        self.firing: Firing | None = None
        """Of the firings whose values it takes; None while it takes none."""

    @property
    def num_buffered(self) -> int:
        """Lines that are not queued yet."""
        return self.native.waiting if self.firing is not None else 0

    def fast_path(self) -> Any:
        """What one hook asks first, see kernels/native/hook_fastpath.cpp; None where there is no C++ library."""
        functions = library.functions()
        return functions.fast_path(self.native) if functions is not None and self.native is not None else None

    def begin(self, firing: "Firing", numbers: Iterator[int]) -> None:
        """A step begins, and ``firing`` is that of the firings which come first at their sites, without tags.

        Its records are numbered by ``numbers``.
        """
        if self.native is not None:
            step = firing.step
            calls = self._counters.announce, numbers, self.flush, self._send_at
            self.native.begin(step, str(step.info.step), step.serial, *calls, self._dedup.payloads)
            self.firing = firing

    def write(self, port: "SitePort", tensor: "torch.Tensor") -> bool:
        """Record a plain tensor that lies as the last one at this port did; False for any other, and nothing is."""
        layout = port.latest
        if layout.template is None or self.firing is None or layout.rows != port.rows_in(self.firing.step):
            return False
        if port.keep == "stats":
            is_written: bool = self.native.write(layout.template, tensor)
            return is_written
        address: int = self.native.find(layout.template, tensor)
        if address and not self.native.repeat(layout.template, address):
            self._send_at((port, layout), address)
        return address > 0

    def _send_at(self, where: tuple["SitePort", "RecordLayout"], address: int) -> None:
        """Record the whole tensor at ``address``, which lies as the layout says; never raises."""
        port, layout = where
        firing, dedup = self.firing, self._dedup
        if firing is None:
            return
        try:
            if not self._queue.has_room(layout.nbytes):
                self.flush()  # what waits here may be what fills it
            taken = snapshot.snapshot_at(self.native, address, layout, dedup, self._queue)
            if taken is None or self.firing is not firing:  # another thread has ended the step meanwhile
                self._send(port, firing, layout, taken)
                return
            text, digest, number, slot = taken
            self.native.keep(layout.template, text, number, None if slot is None else LinePayload(port, layout, slot))
            if slot is not None and number is not None:
                dedup.add_payload(digest, slot.nbytes, number)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, port.site, error)

    def try_flush(self) -> None:
        """As :meth:`pass_on`, where that need not wait, neither for another thread nor for room; from any thread."""
        if self.lock.acquire(blocking=False):
            try:
                with self._queue.lock:
                    if self._queue.has_room_for(self.num_buffered):
                        self.flush()
            finally:
                self.lock.release()

    def flush(self) -> None:
        """Queue what waits; never raises."""
        with self.lock:
            if self.firing is not None:
                self._flush(self.firing)

    def _flush(self, firing: "Firing") -> None:
        waiting = self.native.waiting
        try:
            text, number, payloads, shared = self.native.drain()
            lines = RecordLines(text, number, firing.step, self._dedup.generation, payloads, shared)
            if number and not self._queue.put_lines(lines):
                self._counters.count(firing.step, dropped=number)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, plural(waiting, "record") + " on the way", error, number=waiting)

    def end(self) -> None:
        """The step ends."""
        if self.firing is not None:
            self.native.end()
            self.flush()
            self.firing = None
