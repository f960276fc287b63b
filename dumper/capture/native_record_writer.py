"""NativeRecordWriter: measures, formats and buffers records in C++, without executing Python in between.

The writer accepts a tensor in ordinary memory if its layout is that of the last tensor at its port, and only for the
first firing of a site in the step. The capturer records any other tensor, and all tensors without the C++ library; the
lines are identical. A hook first calls its fast path (:meth:`NativeRecordWriter.fast_path`); a value that the fast path
accepts never reaches Python.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tapscope.core.formatting import plural
from tapscope.dumper.device.device_row_keys import are_preliminary
from tapscope.dumper.device.device_stats import ROW_WORDS, StatsBlock, StatsRow
from tapscope.dumper.device.graph_fetch import fetch_here
from tapscope.dumper.device.private_memory import is_pooled
from tapscope.dumper.records import sketcher, snapshot
from tapscope.dumper.records.record_layout import NO_LAYOUT, RecordLayout
from tapscope.dumper.records.record_lines import LinePayload, PendingLines, RecordLines, leave_out_sketches
from tapscope.dumper.steps.autograd_passes import graph_task
from tapscope.dumper.steps.tag_context import NO_TAGS, TAGS
from tapscope.kernels.native import digest_of, library
from tapscope.run_format.sketch import NBYTES, record_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tapscope.dumper.capture.device_capturer import DeviceCapturer
    from tapscope.dumper.capture.record_queue import RecordQueue
    from tapscope.dumper.pipeline.send_queue import SendQueue
    from tapscope.dumper.records.dedup_cache import DedupCache
    from tapscope.dumper.records.firing import Firing
    from tapscope.dumper.records.payload_slot import PayloadSlot
    from tapscope.dumper.records.site_port import SitePort
    from tapscope.dumper.retention.step_counters import StepCounters

    Diverges = Callable[[SitePort, Firing, int, RecordLayout, bytes | None], bool]


class NativeRecordWriter:
    """Writes records between :meth:`begin` and :meth:`end`, and queues them in batches."""

    def __init__(
        self,
        queue: "SendQueue",
        records: "RecordQueue",
        counters: "StepCounters",
        dedup: "DedupCache",
        device: "DeviceCapturer",
    ) -> None:
        """``records`` provides the record numbers, and queues the records that bypass the native writer."""
        self._device = device
        self._block: StatsBlock | None = None  # device block with the statistics of records not queued yet
        self._queue = queue
        self._records = records
        self._counters = counters
        self._dedup = dedup
        functions = library.functions()
        plain = (snapshot.PLAIN_TYPES, snapshot.EXCHANGE, snapshot.keys_of, snapshot.HOST_KEYS)
        self.native: Any = None if functions is None else functions.record_writer(*plain, graph_task, TAGS, NO_TAGS)
        self.firing: Firing | None = None
        """The firing whose values the writer records; None while the writer is inactive."""
        self.diverges: Diverges | None = None
        """Comparison with a reference; set it before the first step. If set, only sites kept in full are accepted."""
        records.flush_native = self._flush_buffered

    @property
    def num_buffered(self) -> int:
        """Number of records that are not queued yet."""
        return self.native.waiting if self.firing is not None else 0

    def fast_path(self) -> Any:
        """Create a fast path for a hook, see kernels/native/hook_fastpath.cpp; None without the C++ library."""
        functions = library.functions()
        return functions.fast_path(self.native) if functions is not None and self.native is not None else None

    def begin(self, firing: "Firing") -> None:
        """Begin a step; ``firing`` is shared by all untagged sites that fire for the first time in the step."""
        if self.native is not None:
            step = firing.step
            calls = self._counters.announce, self._records.numbers, self.flush, self._record_at
            # With padding, rows must be cut off first, so the writer launches no device kernels.
            room = () if step.info.num_padding else (self._make_room, self._row_keys)
            # An empty dict disables payload reuse, so that each tensor goes through _record_at and is compared.
            payloads = self._dedup.payloads if self.diverges is None else {}
            self.native.begin(step, str(step.info.step), step.serial, *calls, payloads, *room)
            self.firing = firing

    def takes(self, port: "SitePort") -> bool:
        """Return whether the writer may record values of ``port``.

        Its rules must be unconditional. If values are compared with a reference, ``port`` must be kept in full.
        """
        return port.keep is not None if self.diverges is None else port.keep == "full"

    def write(self, port: "SitePort", tensor: torch.Tensor) -> bool:
        """Record a tensor with the same layout as the last one at ``port``; returns False for any other tensor."""
        layout = port.latest
        if layout.template is None or self.firing is None or layout.rows != port.rows_in(self.firing.step):
            return False
        if not self.takes(port):
            return False
        if port.keep == "sketch":
            return False  # only the fast path handles sketches
        if port.keep == "stats":
            is_written: bool = self.native.write(layout.template, tensor)
            return is_written
        address: int = self.native.find(layout.template, tensor)
        if address and not self.native.repeat(layout.template, address):
            self._record_at((port, layout), address)
        return address > 0

    def _record_at(self, where: tuple["SitePort", "RecordLayout"], address: int) -> None:
        """Record the tensor at the host address ``address`` in full; ``where`` is (port, layout). Never raises."""
        port, layout = where
        firing, dedup = self.firing, self._dedup
        if firing is None:
            return
        try:
            if not self._queue.has_room(layout.nbytes):
                self.flush()  # the buffered records themselves may occupy the queue
            if self.diverges is None:
                taken = snapshot.snapshot_at(self.native, address, layout, dedup, self._queue)
            else:
                taken = snapshot.dense_snapshot(address, layout, dedup, self._queue)
                self.diverges(port, firing, address, layout, None if taken is None else taken[1])
            if taken is None or self.firing is not firing:  # another thread ended the step in the meantime
                self._records.put_snapshot(port, firing, layout, taken)
                return
            stats, digest, number, slot = taken
            self.native.keep(layout.template, stats, number, None if slot is None else LinePayload(port, layout, slot))
            if slot is not None and number is not None:
                dedup.add_payload(digest, slot.nbytes, number)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, port.site, error)

    def _make_room(self, index: int, stream: int, sketches: int) -> None:
        """Provide a new block of statistics rows on the device ``index``, for the native writer.

        ``stream`` is the current stream of the device. If ``sketches`` is not 0, the block also has sketch counters.
        """
        with self._records.lock:
            if self.firing is not None:
                self._flush_rows(self.firing)
            self._block = block = self._device.worker().block(index, stream, sketches=bool(sketches))
            self.native.use_rows(index, stream, *block.place)

    def _row_keys(self, index: int, _: int) -> tuple[Any, ...]:
        """Return the row keys of the step on the current stream of the device ``index``, for the native writer.

        The result is (the step's info, grid of its token rows, device address of the row keys, device address of a
        single zero key, and the two tensors that own the memory). An address of 0 means that the writer must not use
        these keys for sketches.
        """
        assert self.firing is not None
        step, device = self.firing.step, torch.device("cuda", index)
        keys = zero = None
        if fetch_here() is None and not is_pooled():
            keys, zero = self._device.row_keys.of(step, device), self._device.row_keys.of(None, device)
        addresses = [0 if each is None or each.data_ptr() % 16 else each.data_ptr() for each in (keys, zero)]
        return step.info, sketcher.grid_of(step.info), *addresses, keys, zero

    def try_flush(self) -> None:
        """Flush unless that would wait for another thread or for room in the queue. Callable from any thread."""
        lock = self._records.lock
        if lock.acquire(blocking=False):
            try:
                with self._queue.lock:
                    if self._queue.has_room_for(self.num_buffered):
                        self.flush()
            finally:
                lock.release()

    def flush(self) -> None:
        """Queue the buffered records; never raises."""
        with self._records.lock:
            if self.firing is not None:
                self._flush(self.firing)

    def _flush_buffered(self) -> None:
        if self.firing is not None and self.native.waiting:
            self._flush(self.firing)

    def _flush(self, firing: "Firing") -> None:
        num_buffered = self.native.waiting
        try:
            text, num_lines, payloads, shared = self.native.drain()
            lines = RecordLines(text, num_lines, firing.step, self._dedup.generation, payloads, shared)
            if num_lines and not self._queue.put_lines(lines):
                self._counters.count(firing.step, dropped=num_lines)
            self._flush_rows(firing)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, f"{plural(num_buffered, 'buffered record')}", error, number=num_buffered)

    def _flush_rows(self, firing: "Firing") -> None:
        """Queue the records whose statistics are computed on a device, as one item that waits for the statistics."""
        block, self._block = self._block, None
        if block is None:
            return
        heads, tails, offsets, number, block.num_rows, sketches = self.native.drain_rows()
        if not heads:
            return
        step = str(firing.step.info.step)
        payloads = [] if sketches is None else self._reserve(sketches)
        if payloads is None:
            self._counters.count(firing.step, dropped=len(heads))
            block.close()  # complete the rows before their memory is reused
            return
        slots, amend = [payload.slot for _, _, payload in payloads], None
        if sketches is not None and are_preliminary(firing.step):
            ahead = [line for line, sketched in enumerate(sketches) if sketched is not None and sketched[1]]
            self._counters.count_sketches_ahead(firing.step, len(ahead))
            amend = partial(leave_out_sketches, frozenset(ahead), self._queue.cancel)
        counters = block.counters_of(0)

        def begin() -> StatsRow:
            block.close()
            return StatsRow(block, 0)

        def read(address: int) -> tuple[bytes, bytes]:
            functions = library.functions()
            assert functions is not None
            if sketches is None:
                return functions.compose_rows(address, heads, tails, offsets, step, number), b""
            ends, digests = _take_sketches(sketches, offsets, counters, slots)
            return functions.compose_rows(address, heads, tails, offsets, step, number, ends), digests

        try:
            copy = self._device.worker().start_lines(NO_LAYOUT, begin, slots, read)
        except BaseException:
            for slot in slots:
                self._queue.cancel(slot)
            raise
        lines = PendingLines(firing.step, heads, copy, self._dedup.generation, payloads, amend)
        if not self._queue.put_lines(lines):
            self._counters.count(firing.step, dropped=len(heads))

    def _reserve(self, sketches: "Sequence[tuple[SitePort, bool] | None]") -> list[tuple[int, int, LinePayload]] | None:
        """Reserve payload slots for the lines with sketches; None if the queue has no room."""
        payloads: list[tuple[int, int, LinePayload]] = []
        for line, sketched in enumerate(sketches):
            if sketched is None:
                continue
            slot = self._queue.reserve(NBYTES)
            if slot is None:
                for _, _, payload in payloads:
                    self._queue.cancel(payload.slot)
                return None
            payloads.append((line, self._dedup.next_number(), LinePayload(sketched[0], sketcher.SKETCH_LAYOUT, slot)))
        return payloads

    def end(self) -> None:
        """End the step: queue the buffered records and become inactive."""
        if self.firing is not None:
            self.native.end()
            self.flush()
            self.firing = None


def _take_sketches(
    sketches: "Sequence[tuple[SitePort, bool] | None]", offsets: bytes, counters: int, slots: "Sequence[PayloadSlot]"
) -> tuple[tuple[bytes, ...], bytes]:
    """Copy the sketch counters at the host address ``counters`` to ``slots``.

    Returns (end of each line: its sketch member or empty, concatenated digests of the counters).
    """
    ends, digests, free = [], [], iter(slots)
    for sketched, offset in zip(sketches, memoryview(offsets).cast("q"), strict=True):
        if sketched is None:
            ends.append(b"")
            continue
        sketch = sketcher.counters_at(counters + offset // (8 * ROW_WORDS) * NBYTES)
        slot = next(free)
        sketcher.write(sketch, slot)
        ends.append(record_member(sketched[1], sketch))
        digests.append(digest_of(slot.address, NBYTES))
    return tuple(ends), b"".join(digests)
