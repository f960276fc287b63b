"""Concurrent: generate and stream for asyncio programs; calls that overlap share the engine's steps."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.engine import Engine
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.prompts import Prompt, children, one_each, token_ids
from tapscope.engine.requests.request import Generation
from tapscope.engine.server.in_process_client import EngineBridge
from tapscope.engine.server.merge_streams import merged
from tapscope.engine.server.replica_processes import Replicas
from tapscope.engine.text.tokenizer import Tokenizer


class Concurrent:
    """Lives from an LLM's first async call until something else needs the engine; any event loop may use it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, replicas: Replicas | None = None) -> None:
        """``replicas`` are those beside ``engine``, which is replica 0 then."""
        self._tokenizer = tokenizer
        self._bridge = EngineBridge(engine, tokenizer, replicas=replicas)
        self._numbers = count()

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return self._bridge.num_live

    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None,
        forced: Sequence[Sequence[int] | None] | None = None,
    ) -> list[Generation]:
        """Complete every prompt; when one fails, or this is cancelled, the others are aborted."""
        names = one_each("request_ids", request_ids, len(prompts))
        each = one_each("forced", forced, len(prompts))
        tasks = [
            asyncio.ensure_future(self._collect(token_ids(prompt, self._tokenizer), child, name, tokens or ()))
            for prompt, one, given, tokens in zip(prompts, params, names, each, strict=True)
            for child, name in children(one, given if given is not None else self._name())
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def streams(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_ids: Sequence[str], **options: Any
    ) -> AsyncGenerator[Output]:
        """Every output of all prompts as it arises; closing the generator early aborts what is left."""
        each = [self.stream(prompt, params, name, **options) for prompt, name in zip(prompts, request_ids, strict=True)]
        async with aclosing(merged(each)) as outputs:
            async for _, output in outputs:
                yield output

    async def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, **options: Any
    ) -> AsyncGenerator[Output]:
        """Complete one prompt; closing the generator early aborts it. ``options`` are further fields of Request."""
        if params.n > 1:
            raise UsageError(f"n={params.n}: a stream is of one generation; start several")
        ids = token_ids(prompt, self._tokenizer)
        name = self._name() if request_id is None else request_id
        streamed = self._bridge.client().stream(ids, params, request_id=name, options=options)
        async with aclosing(streamed) as outputs:
            async for output in outputs:
                yield output

    def close(self) -> None:
        """End the thread; what is live fails."""
        self._bridge.close()

    async def _collect(
        self, ids: tuple[int, ...], params: SamplingParams, name: str, forced: Sequence[int]
    ) -> Generation:
        options = {"forced": tuple(forced)} if forced else {}
        whole = await self._bridge.client().generate(ids, params, request_id=name, options=options)
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
            hidden_states=whole.hidden_states,
            dp_rank=whole.dp_rank,
        )

    def _name(self) -> str:
        return f"async-{next(self._numbers)}"
