"""LLM: the public API of the engine, for blocking calls, the caller's own steps and asyncio."""

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
"""Name of a LoRA adapter for all prompts, one per prompt, or None for the model alone."""

_DEPRECATED_ARGUMENTS = {"forced": "forced_token_ids"}


class LLM:
    """A model, loaded and ready; one thread at a time may use it. Close it, or use it as a context manager.

    ::

        with LLM("path/to/model", dtype="float32") as llm:
            outputs = llm.generate(["def main():", [5, 6, 7]], SamplingParams(max_new_tokens=8))
            print(outputs[0].text, outputs[1].token_ids)

    Prompts are strings or lists of token ids. There are three ways to use it: calls that return when their requests
    finish (:meth:`generate`, :meth:`chat`, :meth:`stream`), the caller's own steps (:meth:`submit`, :meth:`step`,
    :meth:`advance`, :meth:`abort`), and asyncio (:meth:`agenerate`, :meth:`astream`). While requests of one way are
    live, the others raise UsageError.

    With ``dp`` above 1 there are that many replicas, the first in this process, and requests are routed to them as by
    a server. The caller cannot step such a model.
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, observer: ObserverFactory | None = None, **settings: Any
    ) -> None:
        """Load ``model`` with settings of :class:`EngineConfig`; ``observer`` is called once on every rank.

        Raises ConfigError, UsageError (a tp above the number of heads), CheckpointError, RankLostError.
        """
        config = EngineConfig.build(model, settings)
        self.tokenizer = Tokenizer.find(Path(config.model))
        self._async_runner = _load_replicas(config, observer, self.tokenizer) if config.dp > 1 else None
        """Created here with replicas, which then serve all calls, else by the first async call."""
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
        """Complete every prompt, greedily unless ``params`` says otherwise; returns the results in the order of
        prompts.

        ``params`` apply to all prompts, or there is one per prompt; ``max_new_tokens`` and ``ignore_eos`` are shorthand
        for parameters that set only these. With ``n`` above 1 a prompt has n adjacent results with ids "id-0", "id-1",
        ... ``forced_token_ids[i]`` are tokens that request i takes in place of its first sampled ones. ``adapter``
        names a loaded LoRA adapter for all prompts, or there is one per prompt (None: the model alone). Raises
        UsageError when a request can never run (with one replica before anything is computed), RankLostError, and
        OutOfMemoryError, after which an engine of one rank stays usable.
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
        """Complete one prompt or several together and yield every :class:`Output` as it is computed.

        ``options`` are ``forced_token_ids``, ``priority``, ``capture``, ``cache_salt`` and ``adapter`` of
        :meth:`submit`, for all prompts. Raises as :meth:`generate` does, on the first iteration; leaving the loop early
        aborts the unfinished requests.
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
        """Complete every conversation, a list of ``{"role": ..., "content": ...}``; otherwise as :meth:`generate`.

        ``tools`` are functions as OpenAI's API describes them, ``template`` variables of the checkpoint's chat
        template, such as ``enable_thinking``. Raises as :meth:`chat_prompt` and :meth:`generate` do.
        """
        if conversations and isinstance(conversations[0], Mapping):
            raise UsageError("conversations is a single conversation; pass a list of conversations")
        prompts = [self.chat_prompt(messages, tools=tools, **(template or {})) for messages in conversations]
        return self.generate(prompts, params, **options)

    def chat_prompt(self, messages: Messages, **template: Any) -> list[int]:
        """Token ids of a conversation rendered by the checkpoint's chat template, ready for generation.

        Raises UsageError when the checkpoint has no template or no tokenizer, or the template rejects the messages.
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
        """As :meth:`generate`, for asyncio: overlapping calls share steps, and a cancelled call is aborted.

        The first such call starts a thread that runs the engine; blocking calls work again once no request is live.
        Raises as :meth:`generate` does.
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
        """As :meth:`stream` of one prompt, for asyncio; close it (`contextlib.aclosing`) to leave it early.

        Raises as :meth:`generate` does, on the first iteration.
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
        """Queue one request for the coming steps and return its id; raises UsageError when it can never run.

        A request of higher ``priority`` is served first and preempted last. With ``capture="stats"`` or ``"full"`` the
        observer captures the request's own rows, whatever else it captures; all of them are then computed, none is
        taken from the prefix cache. A request with a ``cache_salt`` shares prefixes only with requests of that salt.
        ``experts`` replaces the routers' choices at the first positions: those that a generation with
        ``routed_experts=True`` returned. Their weights are those of the current router logits.
        ``adapter`` names the loaded LoRA adapter to compute it with; only requests of that adapter share its prefixes.

        Without ``request_id`` the ids are "0", "1", ... in order. An id can be reused once its request is done, but
        observers then see the same (request, position) twice.
        """
        params = resolve_params(params, max_new_tokens, ignore_eos)
        runner = self._stepped_runner("submit")
        options: Any = {"priority": priority, "capture": capture, "cache_salt": cache_salt, "adapter": adapter}
        options["experts"] = "" if experts is None else experts.text
        return runner.submit(prompt, params, request_id, forced_token_ids=forced_token_ids, **options)

    def step(self) -> list[Generation]:
        """Compute one step over all running requests; returns the finished ones.

        Raises RankLostError when another rank has ended or hangs, and OutOfMemoryError. The next call then tries the
        step again; requests whose tokens it had sampled already have ended without a result.
        """
        return self._stepped_runner("step").step()

    def advance(self) -> list[Output]:
        """As :meth:`step`, but returns the new output of each request including its text; raises as it does."""
        return self._stepped_runner("advance").advance()

    def abort(self, request_id: str) -> Generation | None:
        """Abort a live request between two steps; returns what it generated, or None when no such request is live."""
        return self._stepped_runner("abort").abort(request_id)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format on every rank and replica, between two steps.

        Needs ``enable_lora`` or ``lora_paths``. Raises UsageError for a name that is taken, CheckpointError for an
        adapter that is missing, malformed, of too large a rank, or of modules that cannot be adapted.
        """
        if self._async_runner is not None:
            self._async_runner.call_blocking("load_adapter", name, str(path))
        else:
            self.engine.load_adapter(name, Path(path))

    def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter: no new request can name it; live ones finish with it, and their number is returned.

        Raises UsageError when no adapter of this name is loaded.
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
        """The settings."""
        return self.engine.config

    @property
    def model(self) -> CausalLM:
        """Rank 0's model: a plain nn.Module to put hooks on."""
        return self.engine.runner.model

    @property
    def observer(self) -> StepObserver | None:
        """Rank 0's observer."""
        return self.engine.runner.observer

    def close(self) -> None:
        """Close the observers and end the other ranks; live async calls fail. Safe to call twice."""
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
        """The runner of all calls with ``dp`` above 1; None for a single engine."""
        return self._async_runner if self.config.dp > 1 else None

    def _stepped_runner(self, method: str) -> SyncRunner:
        """For the caller's own steps; raises UsageError with replicas, and while async calls are live."""
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
        """For calls that return when their requests are done; raises UsageError while submitted requests are live."""
        runner = self._stepped_runner(method)
        if runner.has_work:
            raise UsageError(f"{method} cannot run while submitted requests are live; step() until they are done")
        return runner

    def _overlapping_runner(self) -> "AsyncRunner":
        """For async calls; raises UsageError while submitted requests are live."""
        if self._async_runner is None:
            from tapscope.engine.runners.async_runner import AsyncRunner  # with what servers need

            if self._sync_runner.has_work:
                raise UsageError(
                    "async calls cannot start while submitted requests are live; step() until they are done"
                )
            self._async_runner = AsyncRunner(self.engine, self.tokenizer)
        return self._async_runner


def _load_replicas(
    config: EngineConfig, observer: ObserverFactory | None, tokenizer: Tokenizer | None
) -> "AsyncRunner":
    from tapscope.engine.runners.async_runner import AsyncRunner  # with what servers need

    return AsyncRunner.load(config, observer, tokenizer)
