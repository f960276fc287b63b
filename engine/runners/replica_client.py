"""Replica: asyncio client of one DP replica's engine, with its live requests, method calls and failure state."""

import asyncio
from collections.abc import Mapping
from itertools import count
from time import monotonic
from typing import Any

import msgspec
import zmq

from tapscope.core import errors
from tapscope.core.errors import LiveError, RankLostError, TapscopeError
from tapscope.core.gc_control import gc_paused
from tapscope.core.wire import Message, decode, encode
from tapscope.engine.requests.output import Output, OutputValues
from tapscope.engine.runners.prefix_index import PrefixIndex

_TURN_S = 0.005  # maximum time spent reading before yielding to the event loop
_OUTPUTS = msgspec.msgpack.Decoder(list[tuple[int, OutputValues]])


class OutputQueue:
    """Queue of one request's outputs with at most one entry: unread outputs are merged."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.is_over = False
        """Whether the engine has finished or refused the request."""
        self._pending: Output | None = None
        self._error: TapscopeError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add an output, merging it into an unread one."""
        self._pending = output if self._pending is None else self._pending.followed_by(output)
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    def refuse(self, error: TapscopeError) -> None:
        """End the queue with ``error``."""
        if not self.is_over:
            self._error, self.is_over = error, True
            self._arrived.set()

    async def next(self) -> Output:
        """Wait for and return the merged outputs since the last call; raise the error if the request was refused."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is not None:
            self._arrived.set()
        return output


class Replica:
    """Client of one engine for one event loop: a DEALER socket connected to the engine's ROUTER."""

    def __init__(self, context: "zmq.Context[Any]", address: str, dp_rank: int, dp: int) -> None:
        """Connect to ``address``, which may be bound later. Nothing is sent yet."""
        self.dp_rank = dp_rank
        self.failure: str | None = None
        """Reason why the engine was lost; None while it works."""
        self.num_tokens = 0
        """Number of tokens of the live requests: prompts and received tokens."""
        self.prefixes = PrefixIndex()
        """Prefixes that the replica has probably cached."""
        self._dp = dp
        self._queues: dict[int, OutputQueue] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._read)

    @property
    def num_requests(self) -> int:
        """Number of live requests."""
        return len(self._queues)

    def open(self, name: str) -> OutputQueue:
        """Return a new queue for the outputs of a request; submit the request under the queue's number."""
        queue = OutputQueue(next(self._numbers), name)
        self._queues[queue.number] = queue
        return queue

    def close_queue(self, queue: OutputQueue) -> None:
        """Close a queue and abort its request if it is still live."""
        del self._queues[queue.number]
        if not queue.is_over:
            self.send(Message("drop", {"number": queue.number, "request": queue.name}))

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the engine between two steps; raise the method's error."""
        if self.failure is not None:
            raise RankLostError(self.failure)
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        try:
            self.send(Message("call", {"number": number, "method": method, "arguments": arguments}))
            result: dict[str, Any] = await answer
            return result
        finally:
            del self._answers[number]

    def fail(self, reason: str) -> None:
        """Fail all live requests and calls with ``reason``, because the engine was lost."""
        self.failure = self.failure or reason
        for queue in self._queues.values():
            queue.refuse(RankLostError(self.failure))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RankLostError(self.failure))

    def send(self, message: Message) -> None:
        """Send ``message`` to the engine. No-op after :meth:`disconnect`."""
        if self._socket.closed or self._loop.is_closed():
            return
        self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # ZMQ's file descriptor is edge-triggered, and sending may consume an edge

    def disconnect(self) -> None:
        """Disconnect; live requests fail. Idempotent."""
        if not self._socket.closed:
            self.fail("the client has been closed")
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=1000)

    def named(self, reason: str) -> str:
        """Return ``reason``, prefixed with the replica's number if there are several replicas."""
        return reason if self._dp == 1 else f"DP replica {self.dp_rank}: {reason}"

    def named_error(self, error: TapscopeError) -> TapscopeError:
        """Return ``error``, raised by this replica, prefixed with its number if there are several replicas.

        A RankLostError is returned unchanged: its message already names the replica.
        """
        return error if self._dp == 1 or isinstance(error, RankLostError) else type(error)(self.named(str(error)))

    def _read(self) -> None:
        until = monotonic() + _TURN_S
        while not self._socket.closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._handle(decode(self._socket.recv_multipart(zmq.NOBLOCK)))
            if monotonic() >= until:
                self._loop.call_soon(self._read)
                return

    def _handle(self, message: Message) -> None:
        if message.kind == "outputs":
            with gc_paused():
                for number, values in _OUTPUTS.decode(message.frames[0]):
                    if queue := self._queues.get(number):
                        queue.put(Output.build(values))
        elif message.kind == "refused":
            if queue := self._queues.get(message["number"]):
                queue.refuse(error_of(message.fields))
        elif message.kind == "answer":
            self._answered(message)
        elif message.kind == "failed":
            self.fail(self.named(message["reason"]))

    def _answered(self, message: Message) -> None:
        answer = self._answers.get(message["number"])
        if answer is None or answer.done():
            return
        if "error" in message.fields:
            answer.set_exception(error_of(message.fields))
        else:
            answer.set_result(message["result"])


def error_of(fields: Mapping[str, Any]) -> TapscopeError:
    """Build the error described by ``error`` (class name) and ``text`` of a message."""
    kind = getattr(errors, fields["error"], LiveError)
    return kind(fields["text"]) if issubclass(kind, TapscopeError) else LiveError(fields["text"])
