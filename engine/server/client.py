"""EngineClient: the engine as an asyncio program sees it, in this process or another. Torch-free."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import zmq

from tapscope import errors
from tapscope.engine.output import Assembly, Output
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.server.meters import Meters, Stopwatch
from tapscope.engine.tokenizer import Tokenizer
from tapscope.errors import LiveError, RankLostError, TapscopeError, UsageError
from tapscope.wire import Message, decode, encode

Prompt = str | Sequence[int]
"""Text, or token ids."""

_LONG_TEXT = 10_000  # characters; a longer text is tokenised beside the event loop
_log = logging.getLogger(__name__)


class EngineClient:
    """Belongs to one event loop. Requests of all clients of an engine share its steps."""

    def __init__(
        self, context: "zmq.Context[Any]", address: str, tokenizer: Tokenizer | None, meters: Meters | None = None
    ) -> None:
        """Connect to the ROUTER at ``address``, which may be bound later; nothing is sent yet."""
        self.tokenizer = tokenizer
        self.meters = meters or Meters()
        self.failure: str | None = None
        """Why the engine can compute no more; None while it can."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._read)
        self._numbers = count()
        self._names = count()
        self._live: dict[str, _Mailbox] = {}
        self._mailboxes: dict[int, _Mailbox] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Output]:
        """Complete ``prompt``; yields outputs with text as they arise, several steps as one where the reader is slow.

        ``options`` are further fields of the engine's Request, such as ``priority``. Closing the iterator early
        aborts the request. Raises UsageError when it can never run, OverloadedError, LiveError.
        """
        if self.failure is not None:
            raise RankLostError(self.failure)
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json; stop strings need one")
        watch = Stopwatch()
        prompt_ids = await self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        box = _Mailbox(next(self._numbers), self._name(request_id))
        self._live[box.name] = self._mailboxes[box.number] = box
        assembly = Assembly(box.name, prompt_ids, self.tokenizer, params)
        self.meters.started()
        try:
            fields = {"request": box.name, "number": box.number, "prompt_ids": prompt_ids, "params": params.plain()}
            self._send(Message("submit", fields | {"options": dict(options or {})}))
            while True:
                output = assembly.add(await box.next())
                watch.note(output)
                self.meters.gave(watch, output)
                yield output
                if output.finish_reason is not None:
                    return
        except TapscopeError as error:
            watch.error = str(error)
            raise
        finally:
            del self._live[box.name], self._mailboxes[box.number]
            if not box.is_over:
                self._send(Message("drop", {"number": box.number}))
            self.meters.ended(box.name, len(prompt_ids), watch)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Output:
        """As :meth:`stream`, but the sum of all outputs; cancelling aborts the request."""
        whole: Output | None = None
        async with aclosing(self.stream(prompt, params, request_id=request_id, options=options)) as outputs:
            async for output in outputs:
                whole = output if whole is None else whole.followed_by(output)
        assert whole is not None  # the last output of a request always comes, or an error
        return whole

    def abort(self, request_id: str | None) -> None:
        """End the live request of this id, of any client, or all (None); they finish with reason ``abort``."""
        self._send(Message("abort", {"request": request_id}))

    async def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What the engine answers between two steps; raises what it raised there."""
        if self.failure is not None:
            raise RankLostError(self.failure)
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        try:
            self._send(Message("call", {"number": number, "verb": verb, "arguments": arguments}))
            result: dict[str, Any] = await answer
            return result
        finally:
            del self._answers[number]

    def fail(self, reason: str) -> None:
        """The engine is gone: answer everything that waits with ``reason``."""
        self.failure = self.failure or reason
        for box in self._mailboxes.values():
            box.refuse(RankLostError(self.failure))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RankLostError(self.failure))

    def close(self) -> None:
        """Disconnect; requests under way fail. Safe to call twice."""
        if not self._socket.closed:
            self.fail("the client has been closed")
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=1000)

    async def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json; give prompts as token ids")
        if len(text) > _LONG_TEXT:
            return tuple(await asyncio.to_thread(self.tokenizer.encode, text))
        return tuple(self.tokenizer.encode(text))

    def _name(self, given: str | None) -> str:
        if given is None:
            return next(name for name in map(str, self._names) if name not in self._live)
        if given in self._live:
            raise UsageError(f"request id {given!r} is in use by a live request; choose another or wait for it")
        return given

    def _send(self, message: Message) -> None:
        if self._socket.closed or self._loop.is_closed():
            return
        self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # the descriptor reports edges, and sending may swallow one

    def _read(self) -> None:
        while not self._socket.closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._handle(decode(self._socket.recv_multipart(zmq.NOBLOCK)))

    def _handle(self, message: Message) -> None:
        if message.kind == "outputs":
            for number, values in message["outputs"]:
                if box := self._mailboxes.get(number):
                    box.put(Output.build(values))
        elif message.kind == "refused":
            if box := self._mailboxes.get(message["number"]):
                box.refuse(error_of(message.fields))
        elif message.kind == "answer":
            answer = self._answers.get(message["number"])
            if answer is not None and not answer.done():
                if "error" in message.fields:
                    answer.set_exception(error_of(message.fields))
                else:
                    answer.set_result(message["result"])
        elif message.kind == "failed":
            self.fail(message["reason"])


class _Mailbox:
    """What has arrived of one request and was not read yet: at most one output, however slow the reader is."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.is_over = False
        """Whether the engine has ended the request."""
        self._pending: Output | None = None
        self._error: TapscopeError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        self._pending = output if self._pending is None else self._pending.followed_by(output)
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    def refuse(self, error: TapscopeError) -> None:
        if not self.is_over:
            self._error, self.is_over = error, True
            self._arrived.set()

    async def next(self) -> Output:
        await self._arrived.wait()
        self._arrived.clear()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is not None:
            self._arrived.set()
        return output


def error_of(fields: Mapping[str, Any]) -> TapscopeError:
    """The error that another process described."""
    kind = getattr(errors, fields["error"], LiveError)
    return kind(fields["text"]) if issubclass(kind, TapscopeError) else LiveError(fields["text"])
