"""Pipeline: from the forward thread to the recorder, bounded in bytes, in a thread that never holds up the model."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from tapscope import wire
from tapscope.dumper.batch import Batch, Pending
from tapscope.dumper.capture import BufferPool
from tapscope.dumper.process import is_alive
from tapscope.errors import RecorderError, TapscopeError
from tapscope.ledger import encode_line
from tapscope.wire import Message

_log = logging.getLogger("tapscope")
_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_RECORDS = 64
_IDLE_S = 0.05  # how long control messages may lie unread while nothing is captured
_SILENCE_S = 10.0  # a local recorder that lives but says nothing for so long is given up
_FLUSH_PATIENCE_S = 5.0  # close waits as long as acknowledgements keep coming, and this long without one


class TryAgain(RecorderError):
    """The recorder is busy with a change, or about to end: join again in a moment."""


class Pipeline:
    """One rank's connection to its recorder.

    ``put`` is called in the forward thread; everything else happens in the pipeline's own thread, which also
    receives what the recorder says and hands it to ``on_message``.
    """

    def __init__(
        self,
        address: str,
        recorder_pid: int,
        *,
        queue_bytes: int,
        block_timeout_s: float | None,
        on_message: Callable[[Message], Message | None],
    ) -> None:
        """``block_timeout_s`` None never waits."""
        self._recorder_pid = recorder_pid
        self._queue_bytes = queue_bytes
        self._block_timeout_s = block_timeout_s
        self._on_message = on_message
        self.pool = BufferPool(queue_bytes)
        self._queue: deque[Pending | bytes | Message] = deque()
        self._changed = threading.Condition()
        self._waiting_records = 0
        self._waiting_bytes = 0
        self._in_flight_bytes = 0
        self._flush = False
        self._sending = False
        self._closing = False
        self._closed = False
        self.dead: str | None = None
        """Why nothing can be sent any more, or None."""
        self.at = -1
        """The step the rank is in, told with every batch."""
        self.capture_left: int | None = None
        self._num_batches = 0
        self._unacknowledged: dict[int, Batch] = {}
        self._sharing_step = -1
        self._stalled = False
        self._heard = time.monotonic()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded in bytes by queue_bytes; a full socket would block the thread
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="tapscope-pipeline", daemon=True)

    def greet(self, hello: Message, timeout_s: float = 10.0) -> Message:
        """Introduce the rank and start the thread; raises RecorderError when refused or unanswered."""
        self._socket.send_multipart(wire.encode(hello))
        if not self._socket.poll(timeout=int(timeout_s * 1000)):
            self._socket.close()
            raise RecorderError(f"the recorder (pid {self._recorder_pid}) did not answer within {timeout_s:g} s")
        answer = wire.decode(self._socket.recv_multipart())
        if answer.kind != "welcome":
            self._socket.close()
            reason = str(answer.fields.get("reason", f"the recorder answered {answer.kind!r}"))
            raise TryAgain(reason) if answer.fields.get("retry") else RecorderError(reason)
        self._heard = time.monotonic()
        self._thread.start()
        return answer

    def put(self, pending: Pending) -> bool:
        """Queue a record; False when it had to be dropped. Waits at most ``block_timeout_s``, once a stall."""
        cost = pending.cost
        with self._changed:
            if self.dead or not (self._has_room(cost) or self._wait_for_room(cost)):
                return False
            self._in_flight_bytes += cost
            self._waiting_bytes += cost
            self._waiting_records += 1
            self._queue.append(pending)
            if self._waiting_records >= _BATCH_RECORDS or self._waiting_bytes >= _BATCH_BYTES:
                self._changed.notify_all()
        return True

    def put_line(self, line: dict[str, Any]) -> None:
        """Queue a line that is no record; small, so never refused while the recorder lives."""
        self._append(encode_line(line))

    def put_message(self, message: Message) -> None:
        """Queue a message behind everything that was put before it."""
        self._append(message)

    def kick(self) -> None:
        """A step ended: send what there is."""
        with self._changed:
            self._flush = True
            self._changed.notify_all()

    def close(self, farewell: Message) -> str | None:
        """Send everything, then ``farewell``; returns None, or why not everything was acknowledged."""
        self.put_message(farewell)
        with self._changed:
            self._closing = self._flush = True
            self._changed.notify_all()
        self._thread.join()
        return self.dead

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is acknowledged; False when that did not happen in time."""
        with self._changed:
            self._flush = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.dead is not None or self._drained(), timeout_s)
            return self.dead is None and self._drained()

    def _drained(self) -> bool:
        return not (self._queue or self._unacknowledged or self._sending)

    def _append(self, item: bytes | Message) -> None:
        with self._changed:
            if not self.dead:
                self._queue.append(item)

    def _has_room(self, cost: int) -> bool:
        return self._in_flight_bytes + cost <= self._queue_bytes or not self._in_flight_bytes

    def _wait_for_room(self, cost: int) -> bool:
        if self._block_timeout_s is None or self._stalled:
            return False
        self._flush = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.dead is not None or self._has_room(cost), self._block_timeout_s)
        # Who has waited in vain waits no more until the recorder moves: one stall costs one timeout, not one a value.
        self._stalled = not self._has_room(cost)
        return self.dead is None and not self._stalled

    def _run(self) -> None:
        last_progress = time.monotonic()
        try:
            while True:
                items = self._take()
                if items:
                    self._send(items)
                    self._sending = False
                if self._receive() or not self._closing:
                    last_progress = time.monotonic()
                self._check_recorder()
                if self._closing and (self.dead or self._closed):
                    return
                if self._closing and time.monotonic() - last_progress > _FLUSH_PATIENCE_S:
                    self._die("it stopped acknowledging")
                    return
        except Exception as error:  # noqa: BLE001 - whatever happens here must not reach the model
            self._die(f"the pipeline failed: {type(error).__name__}: {error}")
        finally:
            self._socket.close()

    def _take(self) -> list[Pending | bytes | Message]:
        """Wait for enough to send, then take at most one batch."""
        with self._changed:
            if not self._ready():
                idle = 0.002 if self._unacknowledged else _IDLE_S
                self._changed.wait_for(self._ready, idle)
            if not self._ready():
                return []
            items: list[Pending | bytes | Message] = []
            cost = 0
            while self._queue and len(items) < _BATCH_RECORDS and cost < _BATCH_BYTES:
                items.append(self._queue.popleft())
                item = items[-1]
                if isinstance(item, Pending):
                    self._waiting_records -= 1
                    cost += item.cost
            self._waiting_bytes -= cost
            self._flush = self._flush and bool(self._queue)
            self._sending = True
            return items

    def _ready(self) -> bool:
        if self.dead:
            return False
        enough = self._waiting_records >= _BATCH_RECORDS or self._waiting_bytes >= _BATCH_BYTES
        return enough or (self._flush and bool(self._queue))

    def _send(self, items: list[Pending | bytes | Message]) -> None:
        batch = Batch()
        for item in items:
            if isinstance(item, Message):
                batch = self._send_batch(batch)
                self._socket.send_multipart(wire.encode(item))
            elif isinstance(item, bytes):
                batch.lines.append(item)
            else:
                if item.record.key.step != self._sharing_step:
                    batch = self._send_batch(batch)
                    self._sharing_step = item.record.key.step
                batch.add(item)
        self._send_batch(batch)

    def _send_batch(self, batch: Batch) -> Batch:
        """Send it unless it is empty; returns a new one."""
        if batch.lines:
            number, self._num_batches = self._num_batches, self._num_batches + 1
            self._unacknowledged[number] = batch
            message = batch.message(number, self._sharing_step, at=self.at, capture_left=self.capture_left)
            # copy=False: the buffers stay untouched until the recorder acknowledges the batch.
            self._socket.send_multipart(wire.encode(message), copy=False)
        return Batch()

    def _receive(self) -> bool:
        progress = False
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return progress
            self._heard = time.monotonic()
            try:
                message = wire.decode(frames)
            except TapscopeError:
                continue
            progress = self._dispatch(message) or progress

    def _dispatch(self, message: Message) -> bool:
        if message.kind == "ack":
            self._acknowledge(message["n"])
            return True
        if message.kind in ("failing", "refused"):
            self._die(str(message.fields.get("reason")))
        elif message.kind == "closed":
            self._closed = True
        elif message.kind == "alive":
            self._socket.send_multipart(wire.encode(Message("at", {"at": self.at})))
        else:
            answer = self._on_message(message)
            if answer is not None:
                self._socket.send_multipart(wire.encode(answer))
        return False

    def _acknowledge(self, number: int) -> None:
        batch = self._unacknowledged.pop(number, None)
        if batch is None:
            return
        for buffer in batch.buffers:
            self.pool.give_back(buffer)
        with self._changed:
            self._in_flight_bytes -= batch.cost
            self._stalled = False
            self._changed.notify_all()

    def _check_recorder(self) -> None:
        silence = time.monotonic() - self._heard
        if self.dead or silence < 1.0:
            return
        if not is_alive(self._recorder_pid):
            self._die(f"the recorder (pid {self._recorder_pid}) died")
        elif silence > _SILENCE_S:
            self._die(f"the recorder (pid {self._recorder_pid}) has said nothing for {silence:.0f} s")

    def _die(self, reason: str) -> None:
        with self._changed:
            if self.dead:
                return
            self.dead = reason
            self._queue.clear()
            self._unacknowledged.clear()
            self._waiting_records = self._waiting_bytes = 0
            self._changed.notify_all()
        _log.warning("tapscope stops recording from step %d on: %s; the model goes on", self.at, reason)
