"""Sender: send the queue to the recorder, in a thread that never blocks the model."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from tapscope.core import wire
from tapscope.core.errors import RecorderError, TapscopeError, UnreachableError
from tapscope.core.wire import Message
from tapscope.dumper.job.processes import exit_reason, is_alive
from tapscope.dumper.pipeline.outbox import Item
from tapscope.dumper.pipeline.record_batch import RecordBatch
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.record_lines import PendingLines, RecordLines
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.dumper.transport.network import Endpoint
from tapscope.dumper.transport.packed_rows import SentTables
from tapscope.dumper.transport.reliable_channel import ReceivedMessages, SentMessages
from tapscope.dumper.transport.shm_ring import ShmRing
from tapscope.run_format.ledger import encode_line

_log = logging.getLogger("tapscope")
_PAUSE_S = 0.002  # polling interval for acknowledgments while closing
_SLEEP_S = 0.5  # maximum sleep, for events that do not wake the sender
_SILENCE_S = 10.0  # a recorder that sends no message for this long is given up, even if its process is alive
_PING_S = 1.0  # silence after which a rank on another host checks the connection
_LAST_MESSAGE_MS = 100  # maximum delivery time of the last messages of a recorder that has exited
_CAN_RECEIVE = int(zmq.POLLIN)
_FLUSH_PATIENCE_S = 5.0  # close() gives up after this long without an acknowledgment


class Wakeup:
    """An eventfd that is polled together with one socket; any thread may signal it."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._fd, zmq.POLLIN)

    def notify(self) -> None:
        """Wake the thread in :meth:`wait`, or its next call; safe in signal handlers and after :meth:`close`."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or a wakeup; return False on timeout."""
        events = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._fd in events:
            os.eventfd_read(self._fd)
        return bool(events)

    def close(self) -> None:
        """Close the eventfd."""
        os.close(self._fd)


class RetryJoin(RecorderError):
    """The recorder is busy with a change or about to exit; the join should be retried."""


class Sender:
    """Connection of one rank to its recorder.

    A thread sends the queue, receives messages and passes them to ``on_message``. After a connection to another host
    breaks, both sides resend the messages that the other has not received.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        recorder_pid: int | None,
        queue: SendQueue,
        on_message: Callable[[Message], Message | None],
        log: Path,
    ) -> None:
        """Connect to ``endpoint``.

        ``recorder_pid`` is None if the recorder runs on another host; ``log`` is the recorder's log file.
        """
        self._endpoint = endpoint
        self._recorder_pid = recorder_pid
        self._recorder = "the recorder" + (f" (pid {recorder_pid})" if recorder_pid else f" at {endpoint.address}")
        self._on_message = on_message
        self._log = log
        self.queue = queue
        self.step = -1
        """Current step of the rank, sent with every batch."""
        self.capture_steps_left: int | None = None
        """Remaining steps of a running capture, sent with every batch; None without one."""
        self.on_tick: Callable[[], None] = lambda: None
        """Callback, called in the sender's thread at least twice per second."""
        self.on_idle: Callable[[], None] = lambda: None
        """Callback, called in the sender's thread after half a second without activity."""
        self.rank_counters: Callable[[], dict[str, int]] = dict
        """Callback that returns additional counters of this rank for the recorder's state."""
        self._num_batches = 0
        self._sent = SentMessages[tuple[list[Any], RecordBatch | None]]()  # (frames, batch they contain)
        self._received = ReceivedMessages()
        self._tables = SentTables()
        self._generation = -1
        self._closing = False
        self._closed = False
        self._last_received = self._last_ping = time.monotonic()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit: the queue bounds bytes, and a full socket would block
        endpoint.connect(self._socket)
        self._wakeup = Wakeup(self._socket)
        self._thread = threading.Thread(target=self._run, name="tapscope-pipeline", daemon=True)

    def join(self, join_request: Message, ring: ShmRing | None = None, timeout_s: float = 10.0) -> Message:
        """Join the recorder and start the thread; return the recorder's reply.

        Payloads use ``ring`` if the recorder could map it. Raises RecorderError if the recorder refuses or does not
        answer, and RetryJoin if a later attempt may succeed.
        """
        if ring is not None:
            join_request = Message(
                join_request.kind, join_request.fields | {"ring": {"path": str(ring.path), "nbytes": ring.nbytes}}
            )
        try:
            answer = self._first_answer(join_request, timeout_s)
        except RecorderError:
            self._disconnect()
            raise
        if ring is not None:
            ring.unlink()
            if answer.fields.get("ring"):
                self.queue.use_ring(ring)
        self.queue.takes_blocks = bool(answer.fields.get("blocks"))
        self._last_received = time.monotonic()
        self._thread.start()
        return answer

    def _first_answer(self, join_request: Message, timeout_s: float) -> Message:
        self._socket.send_multipart(wire.encode(join_request))
        try:
            if not self._endpoint.wait(self._socket, timeout_s):
                raise RecorderError(f"{self._recorder} did not answer within {timeout_s:g} s")
        except UnreachableError as error:
            raise (RetryJoin if self._endpoint.has_ended else RecorderError)(str(error)) from None
        answer = wire.decode(self._socket.recv_multipart())
        if answer.kind == "joined":
            return answer
        reason = str(answer.fields.get("reason", f"the recorder answered {answer.kind!r}"))
        raise RetryJoin(reason) if answer.fields.get("retry") else RecorderError(reason)

    @property
    def dead(self) -> str | None:
        """Why items can no longer be sent; None while they can."""
        return self.queue.dead

    def load(self) -> dict[str, int]:
        """Return the bytes in flight, the size and usage of the ring, and the counters of ``rank_counters``."""
        ring = self.queue.ring
        shared = {"shm_bytes": ring.nbytes, "shm_bytes_used": ring.used} if ring is not None else {}
        return {"queue_bytes": self.queue.in_flight_bytes, **shared, **self.rank_counters()}

    def put_line(self, line: dict[str, Any]) -> None:
        """Queue a line that is not a record."""
        self.queue.append(encode_line(line))

    def put_message(self, message: Message) -> None:
        """Queue a message behind all items queued before."""
        self.queue.append(message)

    def close(self, close_message: Message) -> str | None:
        """Send all queued items, then ``close_message``; return None, or the reason why some were not acknowledged."""
        self.put_message(close_message)
        self._closing = True
        self.queue.flush()
        self._thread.join()
        return self.dead

    def _run(self) -> None:
        self.queue.nudge = self._wakeup.notify
        last_progress = time.monotonic()
        try:
            while True:
                if items := self._take():
                    self.queue.sent(self._send(items))
                if self._receive() or not self._closing or self.queue.is_awaiting_device:
                    last_progress = time.monotonic()
                self._check_recorder()
                self.on_tick()
                if self._closing and (self.dead or self._closed):
                    return
                if self._closing and time.monotonic() - last_progress > _FLUSH_PATIENCE_S:
                    self._fail("it stopped acknowledging")
                    return
        except Exception as error:  # noqa: BLE001 - no error of this thread may reach the model
            self._fail(f"the pipeline failed: {type(error).__name__}: {error}")
        finally:
            self._disconnect()

    def _take(self) -> list[Item]:
        """Return the next batch of items; if none is ready, sleep until one is, a message arrives, or a timeout."""
        if self._closing or not (most_s := self.queue.sleep(_SLEEP_S)):
            return self.queue.take(_PAUSE_S)
        is_quiet = not self._wakeup.wait(most_s) and most_s == _SLEEP_S
        self.queue.awake()
        if is_quiet:
            self.on_idle()
        return self.queue.take(0)

    def _disconnect(self) -> None:
        self.queue.nudge = lambda: None
        self.queue.awake()
        self._wakeup.close()
        self._socket.close()

    def _send(self, items: list[Item]) -> int:
        """Send items in order; return the number of batches, each of which will be acknowledged."""
        before, batch = self._num_batches, RecordBatch()
        for item in items:
            if isinstance(item, Message):
                batch = self._send_batch(batch)
                self._post(item)
            elif isinstance(item, (bytes, DeferredLine)):
                batch.add_line(item)
            else:
                if item.generation != self._generation:
                    batch = self._send_batch(batch) if batch.may_share else batch
                    self._generation = item.generation
                if isinstance(item, PendingLines):
                    item = item.finish()
                batch.add_lines(item) if isinstance(item, RecordLines) else batch.add(item)
        self._send_batch(batch)
        return self._num_batches - before

    def _send_batch(self, batch: RecordBatch) -> RecordBatch:
        """Send ``batch`` unless it is empty; return a new, empty batch."""
        if batch.num_lines:
            self._num_batches += 1
            position = {"current_step": self.step, "capture_steps_left": self.capture_steps_left}
            self._post(batch.message(self._generation, self._tables, **position), batch)
        return RecordBatch()

    def _post(self, message: Message, batch: RecordBatch | None = None) -> None:
        """Send a numbered message, and keep it for retransmission until it is acknowledged."""
        frames = wire.encode(Message(message.kind, message.fields | {"n": self._sent.count}, message.frames))
        self._sent.keep((frames, batch))
        # copy=False is safe because slots do not change until the recorder acknowledges the batch.
        self._socket.send_multipart(frames, copy=False)

    def _receive(self) -> bool:
        progress = False
        while int(self._socket.get(zmq.EVENTS)) & _CAN_RECEIVE:
            self._last_received = time.monotonic()
            try:
                message = wire.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except TapscopeError:
                continue
            if "n" not in message.fields or self._received.accept(message["n"]):
                progress = self._dispatch(message) or progress
        return progress

    def _dispatch(self, message: Message) -> bool:
        if message.kind == "ack":
            return self._acknowledged(message["received"])
        if message.kind in ("fatal", "refused"):
            self._fail(str(message.fields.get("reason")))
        elif message.kind == "closed":
            self._closed = True
        elif message.kind == "heartbeat":
            self._send_position(has_gap=self._received.is_missing(message["sent"], again=True))
            return self._acknowledged(message["received"])
        elif message.kind == "resend":
            for frames, _ in self._sent.since(message["received"]):
                self._socket.send_multipart(frames, copy=False)
        else:
            answer = self._on_message(message)
            if answer is not None:
                self._post(answer)
        return False

    def _acknowledged(self, num: int) -> bool:
        """Free the batches among the first ``num`` messages, now acknowledged; return whether any was new."""
        acknowledged = self._sent.acknowledge(num)
        for _, batch in acknowledged:
            if batch is not None:
                self.queue.acknowledged(batch)
        return bool(acknowledged)

    def _send_position(self, *, has_gap: bool = False) -> None:
        fields = {"current_step": self.step, "load": self.load()}
        fields |= {"sent": self._sent.count, "received": self._received.count}
        self._socket.send_multipart(wire.encode(Message("position", fields | {"has_gap": has_gap})))

    def _check_recorder(self) -> None:
        now = time.monotonic()
        silence = now - self._last_received
        if self.dead or self._closed or silence < _PING_S:
            return
        if self._recorder_pid is None and now - self._last_ping > _PING_S:
            self._last_ping = now
            self._send_position()
        if self._recorder_pid is not None and not is_alive(self._recorder_pid):
            if self._socket.poll(_LAST_MESSAGE_MS):  # a last message may confirm the close or state why it exited
                return
            self._fail(f"{self._recorder} {exit_reason(self._recorder_pid, self._log)}")
        elif silence > _SILENCE_S:
            self._fail(f"{self._recorder} has sent nothing for {silence:.0f} s")

    def _fail(self, reason: str) -> None:
        if self.queue.abandon(reason):
            self._sent.forget()
            text = (
                "tapscope stops recording from step %d on: %s; the model continues, and reset() continues in a new run"
            )
            _log.warning(text, self.step, reason)
