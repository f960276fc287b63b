"""LLM: the engine's public Python API, for blocking calls, caller-driven steps and asyncio."""

import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tapscope.core.deprecation import deprecated_arguments
from tapscope.core.errors import UsageError
from tapscope.core.observe import ObserverFactory, StepObserver
from tapscope.engine.engine import Engine
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.per_token_outputs import RoutedExperts
from tapscope.engine.requests.prompts import (
    Messages,
    Params,
    Prompt,
    adapters_each,
    as_prompt_list,
    one_per_prompt,
    require_list,
    resolve_params,
    resolve_params_each,
)
from tapscope.engine.requests.request import Generation
from tapscope.engine.runners.sync_runner import SyncRunner
from tapscope.engine.text.chat_template import ChatTemplate
from tapscope.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tapscope.engine.runners.async_runner import AsyncRunner


Adapter = str | Sequence[str | None] | None
"""A LoRA adapter's name for all prompts, or one name per prompt; None selects the base model."""

_DEPRECATED_ARGUMENTS = {"forced": "forced_token_ids"}


class LLM:
    """A loaded model that generates text; use it as a context manager or call :meth:`close`. Not thread-safe.

    ::

        with LLM("path/to/model", dtype="float32") as llm:
            outputs = llm.generate(["def main():", [5, 6, 7]], SamplingParams(max_new_tokens=8))
            print(outputs[0].text, outputs[1].token_ids)

    Prompts are strings or lists of token ids. The API has three groups of calls: blocking calls that return when their
    requests finish (:meth:`generate`, :meth:`chat`, :meth:`stream`), caller-driven steps (:meth:`submit`, :meth:`step`,
    :meth:`advance`, :meth:`abort`), and asyncio (:meth:`agenerate`, :meth:`astream`). While requests of one group are
    live, calls of the other groups raise UsageError.

    With ``dp`` above 1, requests are routed to ``dp`` replicas as in a server; the first replica runs in this process.
    Caller-driven steps are then not available.
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, observer: ObserverFactory | None = None, **settings: Any
    ) -> None:
        """Load ``model`` with the given settings of :class:`EngineConfig`.

        ``observer`` is a factory that is called once on every rank. Raises ConfigError, UsageError (for example if tp
        exceeds the number of heads), CheckpointError, RankLostError.
        """
        config = EngineConfig.build(model, settings)
        self.tokenizer = Tokenizer.find(Path(config.model))
        self._async_runner = _load_replicas(config, observer, self.tokenizer) if config.dp > 1 else None
        """Runner of all calls if ``dp`` is above 1, created here; otherwise created by the first async call."""
        if self._async_runner is not None:
            weakref.finalize(self, self._async_runner.close)
        self.engine = Engine(config, observer) if self._async_runner is None else self._async_runner.engine
        self._sync_runner = SyncRunner(self.engine, self.tokenizer)
        self._chat_template = ChatTemplate.find(Path(config.model))

    @deprecated_arguments(_DEPRECATED_ARGUMENTS)
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        max_new_tokens: int | None = None,
        request_ids: Sequence[str] | None = None,
        forced_token_ids: Sequence[Sequence[int] | None] | None = None,
        ignore_eos: bool | None = None,
        adapter: Adapter = None,
    ) -> list[Generation]:
        """Complete every prompt and return the results in prompt order; greedy by default.

        ``params`` and ``adapter`` (the name of a loaded LoRA adapter; None: the base model) are each one value for all
        prompts, or a list with one value per prompt. ``max_new_tokens`` and ``ignore_eos`` are shorthand for parameters
        that set only these fields. With ``n`` above 1, a prompt has n adjacent results with ids "id-0", "id-1", ...
        ``forced_token_ids[i]`` replace the first sampled tokens of request i. Raises UsageError if a request can never
        run (with a single replica: before any step), RankLostError, and OutOfMemoryError, after which a single-rank
        engine stays usable.
        """
        require_list(prompts)
        names = one_per_prompt("request_ids", request_ids, len(prompts))
        each = resolve_params_each(params, len(prompts), max_new_tokens, ignore_eos)
        tokens = one_per_prompt("forced_token_ids", forced_token_ids, len(prompts))
        adapters = adapters_each(adapter, len(prompts))
        if self._replicas is not None:
            return self._replicas.generate_blocking(prompts, each, names, tokens, adapters)
        return self._idle_runner("generate").generate(prompts, each, names, tokens, adapters)

    @deprecated_arguments(_DEPRECATED_ARGUMENTS)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_ids: Sequence[str] | None = None,
        ignore_eos: bool | None = None,
        **options: Any,
    ) -> Iterator[Output]:
        """Complete one or several prompts and yield each :class:`Output` as soon as it is computed.

        ``options`` are ``forced_token_ids``, ``priority``, ``capture``, ``cache_salt`` and ``adapter`` of
        :meth:`submit`, applied to all prompts. The first iteration raises the errors of :meth:`generate`. Leaving the
        loop early aborts unfinished requests.
        """
        each = as_prompt_list(prompts)
        names = one_per_prompt("request_ids", request_ids, len(each))
        shared = resolve_params(params, max_new_tokens, ignore_eos)
        if self._replicas is not None:
            yield from self._replicas.stream_blocking(each, shared, names, **options)
        else:
            yield from self._idle_runner("stream").stream(each, shared, names, **options)

    def chat(
        self,
        conversations: Sequence[Messages],
        params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Complete every conversation, each a list of ``{"role": ..., "content": ...}``, like :meth:`generate`.

        ``tools`` are function definitions in OpenAI's format. ``template`` sets variables of the checkpoint's chat
        template, for example ``enable_thinking``. Raises the errors of :meth:`chat_prompt` and :meth:`generate`.
        """
        if conversations and isinstance(conversations[0], Mapping):
            raise UsageError("conversations is a single conversation; pass a list of conversations")
        prompts = [self.chat_prompt(messages, tools=tools, **(template or {})) for messages in conversations]
        return self.generate(prompts, params, **options)

    def chat_prompt(self, messages: Messages, **template: Any) -> list[int]:
        """Render a conversation with the checkpoint's chat template and return its token ids, ready for generation.

        ``template`` sets template variables. Raises UsageError if the checkpoint has no template or no tokenizer, or
        if the template rejects the messages.
        """
        if self._chat_template is None:
            raise UsageError(f"{self.config.model} has no chat template; pass whole prompts to generate")
        if self.tokenizer is None:
            raise UsageError(f"{self.config.model} has no tokenizer.json; pass token ids to generate")
        text = self._chat_template.render(list(map(dict, messages)), **template)
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        max_new_tokens: int | None = None,
        request_ids: Sequence[str] | None = None,
        ignore_eos: bool | None = None,
        adapter: Adapter = None,
    ) -> list[Generation]:
        """Asyncio version of :meth:`generate`: concurrent calls share steps; canceling a call aborts its requests.

        The first async call starts a thread that runs the engine; blocking calls work again once no request is live.
        Raises the errors of :meth:`generate`.
        """
        require_list(prompts)
        each = resolve_params_each(params, len(prompts), max_new_tokens, ignore_eos)
        adapters = adapters_each(adapter, len(prompts))
        return await self._overlapping_runner().generate(prompts, each, request_ids, adapters=adapters)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        ignore_eos: bool | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[Output]:
        """Asyncio version of :meth:`stream` for one prompt; close the generator (`contextlib.aclosing`) to stop early.

        The first iteration raises the errors of :meth:`generate`.
        """
        resolved, options = resolve_params(params, max_new_tokens, ignore_eos), {"adapter": adapter} if adapter else {}
        return self._overlapping_runner().stream(prompt, resolved, request_id, **options)

    @deprecated_arguments(_DEPRECATED_ARGUMENTS)
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        forced_token_ids: Sequence[int] = (),
        ignore_eos: bool | None = None,
        priority: int = 0,
        capture: str = "",
        cache_salt: str = "",
        adapter: str = "",
        experts: RoutedExperts | None = None,
    ) -> str:
        """Queue one request and return its id; raises UsageError if the request can never run.

        Requests of higher ``priority`` are scheduled first and preempted last. With ``capture="stats"`` or ``"full"``,
        the observer captures the rows of this request regardless of its other rules; the request then skips the prefix
        cache, so that all of its rows are computed. A request with a ``cache_salt`` shares cached prefixes only with
        requests of the same salt. ``experts`` are the routed experts returned by a generation with
        ``routed_experts=True``: they override the routers' choices at the first positions, while the expert weights
        still come from the current router logits. ``adapter`` names a loaded LoRA adapter; cached prefixes are shared
        only among requests of the same adapter.

        Without ``request_id`` the ids are "0", "1", ... in order. An id can be reused once its request is done, but
        observers then see the same (request, position) twice.
        """
        params = resolve_params(params, max_new_tokens, ignore_eos)
        runner = self._stepped_runner("submit")
        options: Any = {"priority": priority, "capture": capture, "cache_salt": cache_salt, "adapter": adapter}
        options["experts"] = "" if experts is None else experts.text
        return runner.submit(prompt, params, request_id, forced_token_ids=forced_token_ids, **options)

    def step(self) -> list[Generation]:
        """Compute one step over all running requests and return the generations that finished.

        Raises RankLostError if another rank has exited or hangs, and OutOfMemoryError. After OutOfMemoryError the next
        call retries the step, but requests whose tokens were already sampled have ended without a result.
        """
        return self._stepped_runner("step").step()

    def advance(self) -> list[Output]:
        """Compute one step like :meth:`step`, but return each request's new output, including text; same errors."""
        return self._stepped_runner("advance").advance()

    def abort(self, request_id: str) -> Generation | None:
        """Abort a live request between two steps; return its generation so far, or None if there is none."""
        return self._stepped_runner("abort").abort(request_id)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format on every rank and replica, between two steps.

        Requires ``enable_lora`` or ``lora_paths``. Raises UsageError if ``name`` is taken, CheckpointError if the
        adapter is missing or malformed, its LoRA rank is too large, or it targets unsupported modules.
        """
        if self._async_runner is not None:
            self._async_runner.call_blocking("load_adapter", name, str(path))
        else:
            self.engine.load_adapter(name, Path(path))

    def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter for new requests; return the number of live requests, which finish with the adapter.

        Raises UsageError if no adapter of this name is loaded.
        """
        if self._async_runner is not None:
            return int(self._async_runner.call_blocking("unload_adapter", name))
        return self.engine.unload_adapter(name)

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return self._sync_runner.has_work if self._replicas is None else self._replicas.num_live > 0

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self.engine.config

    @property
    def model(self) -> CausalLM:
        """Rank 0's model: a plain nn.Module, to which hooks can be attached."""
        return self.engine.runner.model

    @property
    def observer(self) -> StepObserver | None:
        """Rank 0's observer; None without one."""
        return self.engine.runner.observer

    def close(self) -> None:
        """Close the observers and stop the other ranks; live async calls fail. Safe to call twice."""
        if self._async_runner is not None:
            self._async_runner.close()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _replicas(self) -> "AsyncRunner | None":
        """Runner of all calls if ``dp`` is above 1; None for a single engine."""
        return self._async_runner if self.config.dp > 1 else None

    def _stepped_runner(self, method: str) -> SyncRunner:
        """Return the runner for caller-driven steps; raises UsageError with replicas or while async calls are live."""
        if self.config.dp > 1:
            raise UsageError(
                f"{method} steps a single engine, but dp={self.config.dp}; use generate, chat, stream, agenerate or "
                "astream"
            )
        if self._async_runner is not None:
            if self._async_runner.num_live:
                raise UsageError(f"{method} cannot run while async calls are live; await them first")
            self._async_runner.close()
            self._async_runner = None
        return self._sync_runner

    def _idle_runner(self, method: str) -> SyncRunner:
        """Return the runner for blocking calls; raises UsageError while submitted requests are live."""
        runner = self._stepped_runner(method)
        if runner.has_work:
            raise UsageError(f"{method} cannot run while submitted requests are live; step() until they are done")
        return runner

    def _overlapping_runner(self) -> "AsyncRunner":
        """Return the runner for async calls; raises UsageError while submitted requests are live."""
        if self._async_runner is None:
            from tapscope.engine.runners.async_runner import AsyncRunner  # imports the server's dependencies

            if self._sync_runner.has_work:
                raise UsageError(
                    "async calls cannot start while submitted requests are live; step() until they are done"
                )
            self._async_runner = AsyncRunner(self.engine, self.tokenizer)
        return self._async_runner


def _load_replicas(
    config: EngineConfig, observer: ObserverFactory | None, tokenizer: Tokenizer | None
) -> "AsyncRunner":
    from tapscope.engine.runners.async_runner import AsyncRunner  # imports the server's dependencies

    return AsyncRunner.load(config, observer, tokenizer)
