"""Concurrent: generate and stream for asyncio programs; calls that overlap share the engine's steps."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count

from tapscope.engine.engine import Engine
from tapscope.engine.output import Output
from tapscope.engine.prompts import Prompt, children, one_each, token_ids
from tapscope.engine.request import Generation
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.server.bridge import EngineBridge
from tapscope.engine.tokenizer import Tokenizer
from tapscope.errors import UsageError


class Concurrent:
    """Lives from an LLM's first async call until something else needs the engine; any event loop may use it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bridge = EngineBridge(engine, tokenizer)
        self._numbers = count()

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return self._bridge.num_live

    async def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_ids: Sequence[str] | None
    ) -> list[Generation]:
        """Complete every prompt; when one fails, or this is cancelled, the others are aborted."""
        names = one_each("request_ids", request_ids, len(prompts))
        tasks = [
            asyncio.ensure_future(self._collect(token_ids(prompt, self._tokenizer), child, name))
            for prompt, one, given in zip(prompts, params, names, strict=True)
            for child, name in children(one, given if given is not None else self._name())
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> AsyncGenerator[Output]:
        """Complete one prompt; closing the generator early aborts it."""
        if params.n > 1:
            raise UsageError(f"n={params.n}: a stream is of one generation; start several")
        ids = token_ids(prompt, self._tokenizer)
        name = self._name() if request_id is None else request_id
        async with aclosing(self._bridge.client().stream(ids, params, request_id=name)) as outputs:
            async for output in outputs:
                yield output

    def close(self) -> None:
        """End the thread; what is live fails."""
        self._bridge.close()

    async def _collect(self, ids: tuple[int, ...], params: SamplingParams, name: str) -> Generation:
        whole = await self._bridge.client().generate(ids, params, request_id=name)
        return Generation(
            request=name,
            prompt_ids=ids,
            token_ids=whole.token_ids,
            text=None if self._tokenizer is None else whole.text,
            finish_reason=whole.finish_reason or "abort",
            matched=whole.matched,
            reason=whole.reason,
            logprobs=whole.logprobs,
            prompt_logprobs=whole.prompt_logprobs,
            cached_tokens=whole.cached_tokens,
            routed_experts=whole.routed_experts,
        )

    def _name(self) -> str:
        return f"async-{next(self._numbers)}"
