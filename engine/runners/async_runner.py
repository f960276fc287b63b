"""AsyncRunner: serve asyncio programs of this process from an engine or its DP replicas; calls share steps.

A thread runs the engine's service loop. Clients talk to it over ZMQ, exactly as to an engine in another process.
"""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

import zmq

from tapscope.core.errors import UsageError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message, encode
from tapscope.engine.engine import Engine
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.prompts import Prompt, expand_generations, one_per_prompt, token_ids
from tapscope.engine.requests.request import Generation
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.runners.engine_service import EngineService
from tapscope.engine.runners.latency_metrics import LatencyMetrics
from tapscope.engine.runners.merge_streams import merged
from tapscope.engine.runners.replica_processes import ReplicaLostError, Replicas
from tapscope.engine.text.tokenizer import Tokenizer

T = TypeVar("T")

_ADDRESS = "inproc://engine"


class AsyncRunner:
    """Runs an engine in a background thread for any number of event loops.

    The engine must not be used otherwise until the runner is closed.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        replicas: Replicas | None = None,
        latency_metrics: LatencyMetrics | None = None,
        max_waiting: int | None = None,
    ) -> None:
        """Start the service thread.

        Closing the runner leaves ``engine`` open, except with ``replicas``: then the engine is replica 0 of a loaded
        group, and both are closed. ``max_waiting`` limits the waiting requests; further ones raise OverloadedError.
        """
        self.engine = engine
        self._tokenizer = tokenizer
        self._replicas = replicas
        self._latency_metrics = latency_metrics or LatencyMetrics()
        self._lost: ReplicaLostError | None = None
        self._async_ids, self._blocking_ids = count(), count()
        self._blocking_loop: LoopThread | None = None
        self._clients: dict[asyncio.AbstractEventLoop, EngineClient] = {}
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.bind(_ADDRESS)
        self._addresses = [_ADDRESS]
        service = EngineService(engine, socket, max_waiting=max_waiting)
        if replicas is not None:
            self._addresses += replicas.addresses[1:]
            for source in replicas.sources:
                service.watch(source, partial(self._check_replicas, replicas, service))
            atexit.register(self.close)  # runs before multiprocessing's handler, which joins running replicas
        self._thread = threading.Thread(target=_serve, args=(service, socket), name="tapscope-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, config: EngineConfig, observer: ObserverFactory | None, tokenizer: Tokenizer | None) -> "AsyncRunner":
        """Load ``config.dp`` replicas in parallel: replica 0 in this process, every other one in a process of its own.

        Raises the error of a replica that fails to load.
        """
        replicas = Replicas(config, observer, None)
        engine: Engine | None = None
        try:
            replicas.spawn()
            engine = Engine(config, observer)
            replicas.wait_for_all("ready")
        except BaseException:
            if engine is not None:
                engine.close()
            replicas.abandon()
            replicas.close()
            raise
        return cls(engine, tokenizer, replicas=replicas)

    @property
    def num_live(self) -> int:
        """Number of in-flight requests of all clients."""
        return self._latency_metrics.num_live

    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None,
        forced_token_ids: Sequence[Sequence[int] | None] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Complete every prompt. If one fails or this call is cancelled, the others are aborted."""
        names = one_per_prompt("request_ids", request_ids, len(prompts))
        each = one_per_prompt("forced_token_ids", forced_token_ids, len(prompts))
        of_prompts = one_per_prompt("adapter", adapters, len(prompts))
        tasks = [
            asyncio.ensure_future(
                self._complete(token_ids(prompt, self._tokenizer), child, name, tokens or (), adapter or "")
            )
            for prompt, one, given, tokens, adapter in zip(prompts, params, names, each, of_prompts, strict=True)
            for child, name in expand_generations(one, given if given is not None else f"async-{next(self._async_ids)}")
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, **options: Any
    ) -> AsyncGenerator[Output]:
        """Complete one prompt; closing the generator early aborts the request.

        ``options`` are further fields of Request. Raises UsageError.
        """
        if params.n > 1:
            raise UsageError(f"n={params.n}: a stream yields one generation; start several streams instead")
        ids = token_ids(prompt, self._tokenizer)
        name = f"async-{next(self._async_ids)}" if request_id is None else request_id
        async with aclosing(self.client().stream(ids, params, request_id=name, options=options)) as outputs:
            async for output in outputs:
                yield output

    def generate_blocking(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None],
        forced_token_ids: Sequence[Sequence[int] | None],
        adapters: Sequence[str],
    ) -> list[Generation]:
        """Blocking version of :meth:`generate`, for callers outside asyncio."""
        names = [str(next(self._blocking_ids)) if name is None else name for name in request_ids]
        return self._loop_thread().wait(self.generate(prompts, params, names, forced_token_ids, adapters))

    def stream_blocking(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_ids: Sequence[str | None], **options: Any
    ) -> Iterator[Output]:
        """Blocking version of :meth:`stream` for several prompts, for callers outside asyncio."""
        names = [str(next(self._blocking_ids)) if name is None else name for name in request_ids]
        each = [self.stream(prompt, params, name, **options) for prompt, name in zip(prompts, names, strict=True)]
        for _, output in self._loop_thread().iterate(merged(each)):
            yield output

    def call_blocking(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`EngineClient` and return its result, for callers outside asyncio."""

        async def call() -> Any:
            return await getattr(self.client(), method)(*arguments)

        return self._loop_thread().wait(call())

    def client(self) -> EngineClient:
        """Return the client of the running event loop. Clients of closed loops are closed."""
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            self._clients.pop(loop).close()
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = self._clients[loop] = EngineClient(
                self._context,
                self._addresses,
                self._tokenizer,
                self._latency_metrics,
                prefix_affinity=self.engine.config.has_affinity,
            )
            if self._lost is not None:
                client.replicas[self._lost.dp_rank].fail(str(self._lost))
        return self._clients[loop]

    def stop(self) -> None:
        """Stop the thread after the current step; live requests fail. Idempotent."""
        if not self._thread.is_alive():
            return
        with self._context.socket(zmq.DEALER) as last:
            last.connect(_ADDRESS)
            last.send_multipart(encode(Message("stop")))
            self._thread.join()

    def close(self) -> None:
        """Stop the thread and disconnect the clients, then close the replicas and their engine, if any. Idempotent.

        Each client is closed in its loop's thread, or after the loop has ended.
        """
        atexit.unregister(self.close)
        if self._blocking_loop is not None:
            self._blocking_loop.close()
        self.stop()
        while self._clients:
            self._clients.popitem()[1].close()
        if not self._context.closed:
            self._context.term()
        if self._replicas is not None:
            # Observers of all replicas close at the same time: they may share a recorder.
            self._replicas.request_close()
            self.engine.close()
            self._replicas.close()

    async def _complete(
        self, ids: tuple[int, ...], params: SamplingParams, name: str, forced_token_ids: Sequence[int], adapter: str
    ) -> Generation:
        options: dict[str, Any] = {"forced_token_ids": tuple(forced_token_ids)} if forced_token_ids else {}
        options |= {"adapter": adapter} if adapter else {}
        output = await self.client().generate(ids, params, request_id=name, options=options)
        return output.generation(ids, has_text=self._tokenizer is not None)

    def _loop_thread(self) -> "LoopThread":
        if self._blocking_loop is None:
            self._blocking_loop = LoopThread()
        return self._blocking_loop

    def _check_replicas(self, replicas: Replicas, service: EngineService) -> None:
        """Fail all clients if a replica was lost. Called in the engine's thread when a replica has ended."""
        try:
            replicas.check()
        except ReplicaLostError as error:
            self._lost = error
            for source in replicas.sources:
                service.unwatch(source)
            for loop, client in list(self._clients.items()):
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(client.replicas[error.dp_rank].fail, str(error))


class LoopThread:
    """An event loop in a dedicated thread, for callers outside asyncio or inside another loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tapscope-loop", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and return its result; cancel it if the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        """Yield ``items`` as they arrive and close the generator, even if the iteration ends early."""
        try:
            while True:
                try:
                    item = self.wait(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.wait(items.aclose())

    def close(self) -> None:
        """Stop the loop and join its thread. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)


def _serve(service: EngineService, socket: "zmq.Socket[bytes]") -> None:
    try:
        service.run()
    finally:
        socket.close(linger=1000)
