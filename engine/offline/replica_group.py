"""Fleet: the DP replicas of one LLM, and the loop by which callers that are not async reach them."""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from tapscope.core.observe import ObserverFactory
from tapscope.engine.engine import Engine
from tapscope.engine.offline.async_runner import Concurrent
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.prompts import Prompt
from tapscope.engine.requests.request import Generation
from tapscope.engine.server.replica_processes import Replicas
from tapscope.engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class Fleet:
    """Replica 0 is this process, the others are spawned; requests go where the server would send them."""

    def __init__(self, config: EngineConfig, observer: ObserverFactory | None, tokenizer: Tokenizer | None) -> None:
        """Load all of them at once; raises what loading raises on any."""
        self._replicas = Replicas(config, observer, None)
        try:
            self._replicas.spawn()
            self.engine = Engine(config, observer)
            self._replicas.await_all("ready")
        except BaseException:
            if hasattr(self, "engine"):
                self.engine.close()
            self._replicas.abandon()
            self._replicas.close()
            raise
        self.concurrent = Concurrent(self.engine, tokenizer, self._replicas)
        self._loop = LoopThread()
        self._numbers = count()
        # Before multiprocessing's own, which joins replicas that nobody has told to end.
        atexit.register(self.close)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None],
        forced: Sequence[Sequence[int] | None],
    ) -> list[Generation]:
        """Complete every prompt; when one cannot run the others are aborted."""
        names = [str(next(self._numbers)) if name is None else name for name in request_ids]
        return self._loop.wait(self.concurrent.generate(prompts, params, names, forced))

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_ids: Sequence[str | None], **options: Any
    ) -> Iterator[Output]:
        """Every output of all prompts as it arises; closing it aborts what is left."""
        names = [str(next(self._numbers)) if name is None else name for name in request_ids]
        yield from self._loop.iterate(self.concurrent.streams(prompts, params, names, **options))

    def close(self) -> None:
        """End the replicas, whose observers close at the same time, and the engine; safe to call twice."""
        atexit.unregister(self.close)
        self._loop.close()
        self.concurrent.close()
        self._replicas.dismiss()
        self.engine.close()
        self._replicas.close()


class LoopThread:
    """An event loop in a thread of its own: what is async for callers that are not, whether a loop runs in theirs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tapscope-loop", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        """``items`` as they come; closes them however it ends."""
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
        """End the loop; safe to call twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self) -> None:
        self._loop.run_forever()


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)
