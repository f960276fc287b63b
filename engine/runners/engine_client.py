"""EngineClient: asyncio client of an engine or its DP replicas, in this process or another one. Torch-free."""

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
from tapscope.engine.requests.prompts import Prompt
from tapscope.engine.runners.latency_metrics import LatencyMetrics, RequestTimer
from tapscope.engine.runners.prefix_index import Block, blocks_of
from tapscope.engine.runners.replica_client import Replica
from tapscope.engine.runners.replica_router import choose
from tapscope.engine.text.tokenizer import Tokenizer

T = TypeVar("T")

_LONG_TEXT = 10_000  # characters; longer strings are tokenized in a thread
_LARGE_OUTPUT = 2_000  # values; responses to larger outputs are built in a thread
_THREADS = 2  # per pool; one pool parses requests, the other builds responses


class EngineClient:
    """Client for one event loop. Requests of all clients of an engine share its steps."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        addresses: Sequence[str],
        tokenizer: Tokenizer | None,
        latency_metrics: LatencyMetrics | None = None,
        *,
        prefix_affinity: bool = True,
    ) -> None:
        """Connect to the ROUTER socket of each replica, which may be bound later. Nothing is sent yet.

        ``prefix_affinity``: route a request to the replica that has cached its prefix.
        """
        self._has_affinity = prefix_affinity and len(addresses) > 1
        self.tokenizer = tokenizer
        self.latency_metrics = latency_metrics or LatencyMetrics()
        self.weights_conflict: str | None = None
        """Error message if the live replicas have different weights and must not be used; None otherwise."""
        self.replicas = [Replica(context, address, number, len(addresses)) for number, address in enumerate(addresses)]
        self._names = count()
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tapscope-requests")
        self._builders = ThreadPoolExecutor(_THREADS, thread_name_prefix="tapscope-answers")
        self._live: dict[str, Replica] = {}

    @property
    def failure(self) -> str | None:
        """Reason why the engine or one of its replicas failed; None while all of them work."""
        return next((replica.failure for replica in self.replicas if replica.failure is not None), None)

    @property
    def num_live(self) -> int:
        """Number of unfinished requests of this client."""
        return len(self._live)

    def require_usable(self) -> None:
        """Raise RankLostError or LiveError, with the reason, if a replica does not accept requests."""
        if (failure := self.failure) is not None:
            raise RankLostError(failure)
        if self.weights_conflict is not None:
            raise LiveError(self.weights_conflict)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
    ) -> AsyncGenerator[Output]:
        """Complete ``prompt``; yield outputs with text as they arrive, merging those that a slow consumer has not read.

        ``options`` are further fields of the engine's Request, for example ``priority``; ``dp_rank`` pins the replica.
        Closing the iterator early aborts the request. Raises UsageError if the request can never run, OverloadedError,
        LiveError.
        """
        self.require_usable()
        params = params or SamplingParams()
        if params.stops_on_text and self.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json; stop strings need one")
        timer = RequestTimer(params=params, adapter=str((options or {}).get("adapter", "")))
        prompt_ids = await self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        salt = _salt(options or {})
        blocks = self._blocks(prompt_ids, params, options, salt)
        name, (replica, timer.routed_by) = self._name(request_id), choose(self.replicas, dp_rank, blocks)
        timer.dp_rank = replica.dp_rank
        replica.prefixes.note(blocks)
        queue = replica.open(name)
        self._live[name] = replica
        replica.num_tokens += len(prompt_ids)
        assembler = OutputAssembler(name, prompt_ids, self.tokenizer, params)
        self.latency_metrics.started()
        try:
            fields = {"request": name, "number": queue.number, "prompt_ids": prompt_ids, "params": params.plain()}
            replica.send(Message("submit", fields | {"options": dict(options or {})}))
            while True:
                output = assembler.add(await queue.next())
                timer.note(output)
                replica.num_tokens += len(output.token_ids)
                self.latency_metrics.on_output(timer, output)
                yield output
                if output.finish_reason is not None:
                    return
        except TapscopeError as error:
            timer.error, timer.error_type = str(error), type(error).__name__
            raise
        finally:
            del self._live[name]
            replica.close_queue(queue)
            replica.num_tokens -= len(prompt_ids) + timer.num_tokens
            if blocks:  # the next turn of the conversation has this answer in its prefix
                replica.prefixes.note(blocks_of(prompt_ids + assembler.token_ids, salt))
            self.latency_metrics.ended(name, len(prompt_ids), timer)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
    ) -> Output:
        """Complete ``prompt`` like :meth:`stream`, but return all outputs merged into one.

        Cancelling aborts the request.
        """
        whole: Output | None = None
        streamed = self.stream(prompt, params, request_id=request_id, options=options, dp_rank=dp_rank)
        async with aclosing(streamed) as outputs:
            async for output in outputs:
                whole = output if whole is None else whole.followed_by(output)
        assert whole is not None, "a request ends with an output or an error"
        return whole

    def abort(self, request_id: str | None) -> None:
        """Abort the live request with this id, of any client, or all requests (None).

        Aborted requests finish with reason ``abort``.
        """
        holder = None if request_id is None else self._live.get(request_id)
        for replica in self.replicas if holder is None else (holder,):
            replica.send(Message("abort", {"request": request_id}))

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call an engine method (see METHODS) on the first replica, between two steps; raise the method's error."""
        return await self.replicas[0].call(method, **arguments)

    async def call_all(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method on every replica and return the results; raise the first error, prefixed with its replica."""
        answers = await self.ask_all(method, **arguments)
        self._raise_first(_errors(answers))
        return [answer for answer in answers if not isinstance(answer, TapscopeError)]

    async def ask_all(self, method: str, **arguments: Any) -> list[dict[str, Any] | TapscopeError]:
        """Call a method on every replica; return the result or error of each, in order."""
        calls = [asyncio.ensure_future(replica.call(method, **arguments)) for replica in self.replicas]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        results: list[dict[str, Any] | TapscopeError] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, TapscopeError):
                raise answer
            results.append(answer)
        return results

    async def update_received_weights(self, **received: Any) -> dict[str, Any]:
        """Receive a trainer's tensors on every replica, then load them on all replicas, see :meth:`update_weights`."""
        answers = await self.ask_all("receive_weights", **received)
        refused = _errors(answers)
        if refused and len(refused) < len(answers):
            await self.ask_all("forget_received_weights")
        self._raise_first(refused)
        return await self.update_weights(None, partial=True)

    async def update_weights(self, folder: str | None, *, partial: bool) -> dict[str, Any]:
        """Check ``folder`` on every replica, then load it on all replicas and return the merged results.

        ``folder`` of None loads the tensors that every replica has received and checked.

        Raises a replica's error before any weights have changed. If a replica fails to load weights that passed the
        check, the replicas' weights differ: LiveError is raised, and requests are refused until a full checkpoint is
        loaded on all.
        """
        if len(self.replicas) > 1 and folder is not None:
            await self.call_all("check_weights", folder=folder, partial=partial)
        self.forget_prefixes()
        answers = await self.ask_all("update_weights", folder=folder, partial=partial)
        refused = _errors(answers)
        first = next(iter(refused.values()), None)
        if first is not None and len(refused) < len(answers) and not isinstance(first, RankLostError):
            self.weights_conflict = (
                f"the DP replicas have different weights: {', '.join(map(str, refused))} kept the old ones ({first}), "
                "the others have new ones; send a whole checkpoint to /update_weights_from_disk, or restart the server"
            )
            raise LiveError(self.weights_conflict)
        self._raise_first(refused)
        self.weights_conflict = self.weights_conflict if partial else None
        return {"num_live": sum(answer["num_live"] for answer in answers if not isinstance(answer, TapscopeError))}

    async def release_memory(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """Release memory on every replica.

        If a replica fails, memory is resumed on all replicas and the error is raised.
        """
        self.forget_prefixes()
        answers = await self.ask_all("release_memory", tags=tags)
        refused = _errors(answers)
        if refused and len(refused) < len(answers):
            await self.ask_all("resume_memory", tags=tags)
        self._raise_first(refused)
        (first, *_) = answers
        assert not isinstance(first, TapscopeError), "no replica has refused"
        return first

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter on every replica.

        If a replica fails, the adapter is unloaded from the others and the error raised.
        """
        answers = await self.ask_all("load_adapter", name=name, folder=folder)
        refused = _errors(answers)
        if refused:
            for number, replica in enumerate(self.replicas):
                if number not in refused:
                    await replica.call("unload_adapter", name=name)
        self._raise_first(refused)

    async def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter from every replica; return the number of live requests that still use it."""
        return sum(answer["num_live"] for answer in await self.call_all("unload_adapter", name=name))

    def _raise_first(self, refused: Mapping[int, TapscopeError]) -> None:
        """Raise the first error of ``refused``, a result of :func:`_errors`, prefixed with its replica."""
        for number, error in refused.items():
            raise self.replicas[number].named_error(error)

    def fail(self, reason: str) -> None:
        """Fail all live requests and calls with ``reason``, because the engine was lost."""
        for replica in self.replicas:
            replica.fail(reason)

    def close(self) -> None:
        """Disconnect; live requests fail. Idempotent."""
        for replica in self.replicas:
            replica.disconnect()
        for threads in (self._readers, self._builders):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_background(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work(*arguments)``, the parsing or tokenization of a long request, in a small thread pool."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    async def build(self, num_values: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work(*arguments)``, which builds a response of ``num_values`` numbers; in a thread if it is large."""
        if num_values <= _LARGE_OUTPUT:
            return work(*arguments)

        def without_pauses() -> T:
            with gc_paused():
                return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._builders, without_pauses)

    def forget_prefixes(self) -> None:
        """Clear the prefix indices, because the prefix caches of the replicas were emptied."""
        for replica in self.replicas:
            replica.prefixes.clear()

    def _blocks(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, options: Mapping[str, Any] | None, salt: str
    ) -> list[Block]:
        """Return the prompt's blocks for the prefix index.

        Empty without prefix affinity or if all rows must be computed.
        """
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


def _errors(answers: Sequence[dict[str, Any] | TapscopeError]) -> dict[int, TapscopeError]:
    """Map the index of each replica that failed to its error, in order."""
    return {number: answer for number, answer in enumerate(answers) if isinstance(answer, TapscopeError)}


def _salt(options: Mapping[str, Any]) -> str:
    """Return the cache salt combined with the adapter: requests share prefixes only if both are equal."""
    salt, adapter = str(options.get("cache_salt", "")), str(options.get("adapter", ""))
    return f"{salt}\0{adapter}" if adapter else salt
