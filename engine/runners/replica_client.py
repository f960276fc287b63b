"""Replica: one DP replica's engine as an asyncio program sees it: requests under way, questions, and why it is lost."""

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
from tapscope.engine.runners.output_queue import Mailbox
from tapscope.engine.runners.prefix_index import PrefixIndex

_TURN_S = 0.005  # of reading, before the event loop does something else
_OUTPUTS = msgspec.msgpack.Decoder(list[tuple[int, OutputValues]])


class Replica:
    """The other end of one engine's ROUTER; belongs to one event loop."""

    def __init__(self, context: "zmq.Context[Any]", address: str, dp_rank: int, dp: int) -> None:
        """Connect to ``address``, which may be bound later; nothing is sent yet."""
        self.dp_rank = dp_rank
        self.failure: str | None = None
        """Why the engine can compute no more; None while it can."""
        self.num_tokens = 0
        """Tokens of the requests under way: their prompts, and what has come."""
        self.prefixes = PrefixIndex()
        """What its prefix cache should have."""
        self._dp = dp
        self._mailboxes: dict[int, Mailbox] = {}
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
        """Requests under way."""
        return len(self._mailboxes)

    def open(self, name: str) -> Mailbox:
        """For the outputs of a request that is about to be submitted under the mailbox's number."""
        box = Mailbox(next(self._numbers), name)
        self._mailboxes[box.number] = box
        return box

    def close_box(self, box: Mailbox) -> None:
        """Nobody reads it any more: a request that goes on is dropped."""
        del self._mailboxes[box.number]
        if not box.is_over:
            self.send(Message("drop", {"number": box.number, "request": box.name}))

    async def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What the engine answers between two steps; raises what it raised there."""
        if self.failure is not None:
            raise RankLostError(self.failure)
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        try:
            self.send(Message("call", {"number": number, "verb": verb, "arguments": arguments}))
            result: dict[str, Any] = await answer
            return result
        finally:
            del self._answers[number]

    def fail(self, reason: str) -> None:
        """The engine is gone: answer everything that waits for it with ``reason``."""
        self.failure = self.failure or reason
        for box in self._mailboxes.values():
            box.refuse(RankLostError(self.failure))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RankLostError(self.failure))

    def send(self, message: Message) -> None:
        """To the engine; a replica that is disconnected gets nothing."""
        if self._socket.closed or self._loop.is_closed():
            return
        self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # the descriptor reports edges, and sending may swallow one

    def disconnect(self) -> None:
        """Requests under way fail. Safe to call twice."""
        if not self._socket.closed:
            self.fail("the client has been closed")
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=1000)

    def named(self, reason: str) -> str:
        """``reason``, with which replica it is of where there are several."""
        return reason if self._dp == 1 else f"DP replica {self.dp_rank}: {reason}"

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
                    if box := self._mailboxes.get(number):
                        box.put(Output.build(values))
        elif message.kind == "refused":
            if box := self._mailboxes.get(message["number"]):
                box.refuse(error_of(message.fields))
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
    """The error that another process described."""
    kind = getattr(errors, fields["error"], LiveError)
    return kind(fields["text"]) if issubclass(kind, TapscopeError) else LiveError(fields["text"])
