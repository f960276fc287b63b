"""Pen: writes the lines of records, of statistics without a word of Python in between.

What a pen declines (a tensor that lies otherwise than the last one, that is not plain memory, a firing that is not the
first of its step) the taker takes, and so it does where there is no C++ library; the lines are the same. A hook asks
its fast path (:meth:`Pen.fast_path`) before anything else: what a pen can write then never comes as far as here.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tapscope.core.formatting import plural
from tapscope.dumper.records import snapshot
from tapscope.dumper.records.record_lines import Lines, Payload
from tapscope.dumper.steps.autograd_passes import graph_task
from tapscope.dumper.steps.tag_context import NO_TAGS, TAGS
from tapscope.kernels.native import library

if TYPE_CHECKING:
    import torch

    from tapscope.dumper.pipeline.send_queue import Backlog
    from tapscope.dumper.records.dedup_cache import Memo
    from tapscope.dumper.records.firing import Stamp
    from tapscope.dumper.records.site_port import Layout, Port
    from tapscope.dumper.records.snapshot import Taken
    from tapscope.dumper.retention.step_counters import Account


class Pen:
    """Between :meth:`begin` and :meth:`end` it writes, and queues its lines by the dozen."""

    def __init__(
        self,
        backlog: "Backlog",
        account: "Account",
        memo: "Memo",
        send: Callable[["Port", "Stamp", "Layout", "Taken | None"], None],
    ) -> None:
        """``send`` queues the record of a value that was taken, or counts it where it was not, without a pen."""
        self._backlog = backlog
        self._account = account
        self._memo = memo
        self._send = send
        functions = library.functions()
        plain = (snapshot.PLAIN_TYPES, snapshot.EXCHANGE, snapshot.keys_of, snapshot.HOST_KEYS)
        self.native: Any = None if functions is None else functions.pen(*plain, graph_task, TAGS, NO_TAGS)
        self.lock = threading.RLock()
        """Held while records are queued, so that they come in their order."""
        self.stamp: Stamp | None = None
        """Of the firings whose values it takes; None while it takes none."""

    @property
    def waiting(self) -> int:
        """Lines that are not queued yet."""
        return self.native.waiting if self.stamp is not None else 0

    def fast_path(self) -> Any:
        """What one hook asks first, see kernels/native/hook_fastpath.cpp; None where there is no C++ library."""
        functions = library.functions()
        return functions.fast_path(self.native) if functions is not None and self.native is not None else None

    def begin(self, stamp: "Stamp", numbers: Iterator[int]) -> None:
        """A step begins, and ``stamp`` is that of the firings which come first at their sites, without tags.

        Its records are numbered by ``numbers``.
        """
        if self.native is not None:
            step = stamp.step
            calls = self._account.announce, numbers, self.pass_on, self._send_at
            self.native.begin(step, str(step.info.step), step.serial, *calls, self._memo.payloads)
            self.stamp = stamp

    def take(self, port: "Port", tensor: "torch.Tensor") -> bool:
        """Record a plain tensor that lies as the last one at this port did; False for any other, and nothing is."""
        layout = port.latest
        if layout.stencil is None or self.stamp is None or layout.rows != port.rows_in(self.stamp.step):
            return False
        if port.keep == "stats":
            is_written: bool = self.native.write(layout.stencil, tensor)
            return is_written
        address: int = self.native.find(layout.stencil, tensor)
        if address and not self.native.repeat(layout.stencil, address):
            self._send_at((port, layout), address)
        return address > 0

    def _send_at(self, where: tuple["Port", "Layout"], address: int) -> None:
        """Record the whole tensor at ``address``, which lies as the layout says; never raises."""
        port, layout = where
        stamp, memo = self.stamp, self._memo
        if stamp is None:
            return
        try:
            if not self._backlog.has_room(layout.nbytes):
                self.pass_on()  # what waits here may be what fills it
            taken = snapshot.take_by(self.native, address, layout, memo, self._backlog)
            if taken is None or self.stamp is not stamp:  # another thread has ended the step meanwhile
                self._send(port, stamp, layout, taken)
                return
            text, digest, number, slot = taken
            self.native.keep(layout.stencil, text, number, None if slot is None else Payload(port, layout, slot))
            if slot is not None and number is not None:
                memo.sent(digest, slot.nbytes, number)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(stamp.step, port.site, error)

    def show(self) -> None:
        """As :meth:`pass_on`, where that need not wait, neither for another thread nor for room; from any thread."""
        if self.lock.acquire(blocking=False):
            try:
                with self._backlog.lock:
                    if self._backlog.has_room_for(self.waiting):
                        self.pass_on()
            finally:
                self.lock.release()

    def pass_on(self) -> None:
        """Queue what waits; never raises."""
        with self.lock:
            if self.stamp is not None:
                self._pass_on(self.stamp)

    def _pass_on(self, stamp: "Stamp") -> None:
        waiting = self.native.waiting
        try:
            text, number, payloads, shared = self.native.drain()
            lines = Lines(text, number, stamp.step, self._memo.generation, payloads, shared)
            if number and not self._backlog.put_lines(lines):
                self._account.count(stamp.step, dropped=number)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(stamp.step, plural(waiting, "record") + " on the way", error, number=waiting)

    def end(self) -> None:
        """The step ends."""
        if self.stamp is not None:
            self.native.end()
            self.pass_on()
            self.stamp = None
