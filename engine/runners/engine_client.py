"""EngineClient: the engine, or its DP replicas, as an asyncio program sees them, in any process. Torch-free."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import count
from typing import Any, TypeVar

import zmq

from tapscope.core.errors import LiveError, RankLostError, TapscopeError, UsageError
from tapscope.core.gc_control import gc_paused
from tapscope.core.wire import Message
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output, OutputAssembler
from tapscope.engine.runners.latency_metrics import LatencyMetrics, Stopwatch
from tapscope.engine.runners.prefix_index import Block, blocks_of
from tapscope.engine.runners.replica_client import Replica
from tapscope.engine.runners.replica_router import choose
from tapscope.engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

T = TypeVar("T")

_LONG_TEXT = 10_000  # characters; a longer text is tokenized in a thread
_LARGE_OUTPUT = 2_000  # values; an answer of a larger output is built in a thread
_THREADS = 2  # for reading requests, and as many for building answers: neither waits for the other


class EngineClient:
    """Belongs to one event loop. Requests of all clients of an engine share its steps."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        addresses: Sequence[str],
        tokenizer: Tokenizer | None,
        meters: LatencyMetrics | None = None,
        *,
        prefix_affinity: bool = True,
    ) -> None:
        """Connect to the ROUTER of each replica, which may be bound later; nothing is sent yet.

        ``prefix_affinity``: of several replicas prefer the one that has a request's prefix.
        """
        self._has_affinity = prefix_affinity and len(addresses) > 1
        self.tokenizer = tokenizer
        self.meters = meters or LatencyMetrics()
        self.discord: str | None = None
        """Why the replicas cannot be used, all of them alive: their weights differ."""
        self.replicas = [Replica(context, address, number, len(addresses)) for number, address in enumerate(addresses)]
        self._names = count()
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tapscope-requests")
        self._builders = ThreadPoolExecutor(_THREADS, thread_name_prefix="tapscope-answers")
        self._live: dict[str, Replica] = {}

    @property
    def failure(self) -> str | None:
        """Why the engine, or one of its replicas, can compute no more; None while all can."""
        return next((replica.failure for replica in self.replicas if replica.failure is not None), None)

    def require_usable(self) -> None:
        """Raise RankLostError or LiveError, with the reason, unless every replica takes requests."""
        if (failure := self.failure) is not None:
            raise RankLostError(failure)
        if self.discord is not None:
            raise LiveError(self.discord)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
    ) -> AsyncGenerator[Output]:
        """Complete ``prompt``; yields outputs with text as they arise, several steps as one where the reader is slow.

        ``options`` are further fields of the engine's Request, such as ``priority``; ``dp_rank`` is the replica that
        is to compute it. Closing the iterator early aborts the request. Raises UsageError when it can never run,
        OverloadedError, LiveError.
        """
        self.require_usable()
        params = params or SamplingParams()
        if params.stops_on_text and self.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json; stop strings need one")
        watch = Stopwatch()
        prompt_ids = await self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        salt = str((options or {}).get("cache_salt", ""))
        blocks = self._blocks(prompt_ids, params, options, salt)
        name, (replica, watch.routed_by) = self._name(request_id), choose(self.replicas, dp_rank, blocks)
        watch.dp_rank = replica.dp_rank
        replica.prefixes.note(blocks)
        box = replica.open(name)
        self._live[name] = replica
        replica.num_tokens += len(prompt_ids)
        assembler = OutputAssembler(name, prompt_ids, self.tokenizer, params)
        self.meters.started()
        try:
            fields = {"request": name, "number": box.number, "prompt_ids": prompt_ids, "params": params.plain()}
            replica.send(Message("submit", fields | {"options": dict(options or {})}))
            while True:
                output = assembler.add(await box.next())
                watch.note(output)
                replica.num_tokens += len(output.token_ids)
                self.meters.gave(watch, output)
                yield output
                if output.finish_reason is not None:
                    return
        except TapscopeError as error:
            watch.error = str(error)
            raise
        finally:
            del self._live[name]
            replica.close_box(box)
            replica.num_tokens -= len(prompt_ids) + watch.num_tokens
            if blocks:  # a conversation goes on with what was answered
                replica.prefixes.note(blocks_of(prompt_ids + assembler.token_ids, salt))
            self.meters.ended(name, len(prompt_ids), watch)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
    ) -> Output:
        """As :meth:`stream`, but the sum of all outputs; cancelling aborts the request."""
        whole: Output | None = None
        streamed = self.stream(prompt, params, request_id=request_id, options=options, dp_rank=dp_rank)
        async with aclosing(streamed) as outputs:
            async for output in outputs:
                whole = output if whole is None else whole.followed_by(output)
        assert whole is not None  # the last output of a request always comes, or an error
        return whole

    def abort(self, request_id: str | None) -> None:
        """End the live request of this id, of any client, or all (None); they finish with reason ``abort``."""
        holder = None if request_id is None else self._live.get(request_id)
        for replica in self.replicas if holder is None else (holder,):
            replica.send(Message("abort", {"request": request_id}))

    async def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What the first replica answers between two steps; raises what it raised there."""
        return await self.replicas[0].call(verb, **arguments)

    async def call_all(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        """What every replica answers; waits for all, then raises what the first of them raised, saying which."""
        answers = await self.ask_all(verb, **arguments)
        for replica, answer in zip(self.replicas, answers, strict=True):
            if isinstance(answer, TapscopeError):
                raise answer if isinstance(answer, RankLostError) else type(answer)(replica.named(str(answer)))
        return [answer for answer in answers if not isinstance(answer, TapscopeError)]

    async def ask_all(self, verb: str, **arguments: Any) -> list[dict[str, Any] | TapscopeError]:
        """What every replica answers or raises, in order."""
        calls = [asyncio.ensure_future(replica.call(verb, **arguments)) for replica in self.replicas]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: list[dict[str, Any] | TapscopeError] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, TapscopeError):
                raise answer
            found.append(answer)
        return found

    def fail(self, reason: str) -> None:
        """Every replica is gone: answer everything that waits with ``reason``."""
        for replica in self.replicas:
            replica.fail(reason)

    def close(self) -> None:
        """Disconnect; requests under way fail. Safe to call twice."""
        for replica in self.replicas:
            replica.disconnect()
        for threads in (self._readers, self._builders):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_background(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work`` of ``arguments``, which reads or tokenizes a long request, in one of a few threads: it neither
        holds the loop nor takes all cores, and waits for no answer that is being built."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    async def build(self, num_values: int, work: Callable[..., T], *arguments: Any) -> T:
        """``work`` of ``arguments``, which builds an answer of ``num_values`` numbers: in a thread if they are many."""
        if num_values <= _LARGE_OUTPUT:
            return work(*arguments)

        def without_pauses() -> T:
            with gc_paused():
                return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._builders, without_pauses)

    def forget_prefixes(self) -> None:
        """The replicas' prefix caches were emptied."""
        for replica in self.replicas:
            replica.prefixes.clear()

    def _blocks(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, options: Mapping[str, Any] | None, salt: str
    ) -> list[Block]:
        """What of a prompt a prefix cache may have; nothing where all rows are to be computed, or nobody asks."""
        options = options or {}
        computes_all = params.needs_every_row or "capture" in options or options.get("pooling") == "mean"
        return [] if computes_all or not self._has_affinity else blocks_of(prompt_ids, salt)

    async def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json; pass prompts as token ids")
        if len(text) > _LONG_TEXT:
            return tuple(await self.in_background(self.tokenizer.encode, text))
        return tuple(self.tokenizer.encode(text))

    def _name(self, given: str | None) -> str:
        if given is None:
            return next(name for name in map(str, self._names) if name not in self._live)
        if given in self._live:
            raise UsageError(f"request id {given!r} is in use by a live request; choose another or wait for it")
        return given
