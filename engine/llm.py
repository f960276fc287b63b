"""LLM: the engine's public face. Offline by `generate`; a server drives `submit`, `step` and `abort` itself."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tapscope.engine.chat_template import ChatTemplate
from tapscope.engine.config import EngineConfig
from tapscope.engine.engine import Engine
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.output import Assembly, Output
from tapscope.engine.prompts import (
    Messages,
    Params,
    Prompt,
    children,
    one_each,
    params_each,
    params_of,
    require_list,
    several,
    token_ids,
)
from tapscope.engine.request import Generation, Request
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.tokenizer import Tokenizer
from tapscope.errors import UsageError
from tapscope.observe import ObserverFactory, StepObserver

if TYPE_CHECKING:
    from tapscope.engine.concurrent import Concurrent


class LLM:
    """A model, loaded and ready; one thread at a time may use it. Close it, or use it as a context manager."""

    def __init__(
        self, model: str | Path | EngineConfig, *, observer: ObserverFactory | None = None, **settings: Any
    ) -> None:
        """Load ``model`` with settings of :class:`EngineConfig`; ``observer`` is called once on every rank.

        Raises ConfigError, UsageError (a tp above the number of heads), CheckpointError, RankLostError.
        """
        config = EngineConfig.build(model, settings)
        if config.dp > 1:
            raise UsageError(f"dp={config.dp}: an LLM is one engine; `tapscope serve --dp N` serves several replicas")
        self.tokenizer = Tokenizer.find(Path(config.model))
        self.engine = Engine(config, observer)
        self._num_named = 0
        self._assemblies: dict[str, Assembly] = {}
        self._concurrent: Concurrent | None = None
        self._chat_template = ChatTemplate.find(Path(config.model))

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        max_new_tokens: int | None = None,
        request_ids: Sequence[str] | None = None,
        forced: Sequence[Sequence[int] | None] | None = None,
        ignore_eos: bool | None = None,
    ) -> list[Generation]:
        """Complete every prompt, greedily unless ``params`` says otherwise, and return them in the order given.

        ``params`` are for all prompts or one each; ``max_new_tokens`` and ``ignore_eos`` are short for parameters that
        set only these. With ``n`` above 1 a prompt has so many generations next to each other, called "id-0", "id-1",
        ... ``forced[i]`` are tokens that request i takes instead of sampled ones while they last. Raises UsageError,
        before anything is computed, when one of the requests can never run, and RankLostError.
        """
        require_list(prompts)
        self._require_idle("generate")
        ids_given = one_each("request_ids", request_ids, len(prompts))
        forced_given = one_each("forced", forced, len(prompts))
        each = params_each(params, len(prompts), max_new_tokens, ignore_eos)
        try:
            order = [
                child
                for prompt, one, name, tokens in zip(prompts, each, ids_given, forced_given, strict=True)
                for child in self._submit_each(prompt, one, name, tokens or ())
            ]
            done: dict[str, Generation] = {}
            while self.has_work:
                done |= {generation.request: generation for generation in self.step()}
        except BaseException:
            for request in list(self.engine.scheduler.live()):
                self.abort(request.id)
            raise
        return [done[name] for name in order]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], *, request_ids: Sequence[str] | None = None, **options: Any
    ) -> Iterator[Output]:
        """Complete one prompt or several together and yield every :class:`Output` as it arises.

        ``options`` are those of :meth:`submit`, the same for all. Raises as :meth:`generate` does, when first asked
        for an output; leaving the loop early aborts what is left.
        """
        self._require_idle("stream")
        each = several(prompts)
        names: list[str] = []
        try:
            for prompt, name in zip(each, one_each("request_ids", request_ids, len(each)), strict=True):
                names.append(self.submit(prompt, request_id=name, **options))
            while self.has_work:
                yield from self.advance()
        finally:
            for name in names:
                self.abort(name)

    def chat(
        self,
        conversations: Sequence[Messages],
        params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Answer every conversation, a list of ``{"role": ..., "content": ...}``; otherwise as :meth:`generate`.

        ``template`` are variables of the checkpoint's chat template, such as ``enable_thinking``.
        """
        if conversations and isinstance(conversations[0], Mapping):
            raise UsageError("conversations is one conversation; give a list of them")
        prompts = [self.chat_prompt(messages, tools=tools, **(template or {})) for messages in conversations]
        return self.generate(prompts, params, **options)

    def chat_prompt(self, messages: Messages, **template: Any) -> list[int]:
        """Token ids of a conversation by the checkpoint's chat template, ready for an answer.

        Raises UsageError when the checkpoint has no template or no tokenizer, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise UsageError(f"{self.config.model} has no chat template; give generate the whole prompt")
        if self.tokenizer is None:
            raise UsageError(f"{self.config.model} has no tokenizer.json; give generate token ids")
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
    ) -> list[Generation]:
        """As :meth:`generate`, from asyncio: calls that overlap share the steps, a cancelled one is aborted.

        From the first such call on a thread runs the engine; what is not async has it again once nothing is live.
        """
        require_list(prompts)
        each = params_each(params, len(prompts), max_new_tokens, ignore_eos)
        return await self._async().generate(prompts, each, request_ids)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        ignore_eos: bool | None = None,
    ) -> AsyncGenerator[Output]:
        """As :meth:`stream` of one prompt, from asyncio; close it (`contextlib.aclosing`) to leave it early."""
        return self._async().stream(prompt, params_of(params, max_new_tokens, ignore_eos), request_id)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        forced: Sequence[int] = (),
        ignore_eos: bool | None = None,
        priority: int = 0,
        capture: str = "",
    ) -> str:
        """Queue one request for the coming steps and return its id; raises UsageError when it can never run.

        A higher ``priority`` is served first, and is the last to give up its pages when there are too few. With
        ``capture="stats"`` or ``"full"`` the observer keeps the request's own rows, whatever else it keeps;
        all of them are computed then, none comes from the prefix cache.

        Without ``request_id`` requests are called "0", "1", ... in order. An id may come again once its request
        is done, but observers then see the same (request, position) twice.
        """
        self._take_back("submit")
        name = self._new_id() if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise UsageError(f"request id {name!r}: it must be a text of at least one character")
        if type(priority) is not int:
            raise UsageError(f"priority={priority!r}: it must be a whole number")
        request = Request(
            id=name,
            prompt_ids=token_ids(prompt, self.tokenizer),
            params=params_of(params, max_new_tokens, ignore_eos),
            forced=tuple(forced),
            priority=priority,
            capture=capture,
        )
        if request.params.stop and self.tokenizer is None:
            raise UsageError(f"{self.config.model} has no tokenizer.json; stop strings need one")
        self.engine.submit(request)
        self._assemblies[name] = Assembly(name, request.prompt_ids, self.tokenizer, request.params)
        self._num_named += request_id is None
        return name

    def step(self) -> list[Generation]:
        """Compute one step over all running requests; returns the ones it finished. Raises RankLostError."""
        return [self._assemblies.pop(o.request).generation() for o in self._advance() if o.finish_reason]

    def advance(self) -> list[Output]:
        """As :meth:`step`, but returns what is new of each request, text included."""
        outputs = self._advance()
        for output in outputs:
            if output.finish_reason:
                del self._assemblies[output.request]
        return outputs

    def abort(self, request_id: str) -> Generation | None:
        """Drop a live request between two steps; returns what it had, or None when no such request is live."""
        output = self.engine.abort(request_id)
        if output is None:
            return None
        assembly = self._assemblies.pop(request_id)
        assembly.add(output)
        return assembly.generation()

    @property
    def has_work(self) -> bool:
        """Whether a request is live, so that :meth:`step` would compute something."""
        return self.engine.scheduler.has_work

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
        """Close the observers and end the other ranks; safe to call twice. What is live of async calls fails."""
        if self._concurrent is not None:
            self._concurrent.close()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit_each(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, forced: Sequence[int]
    ) -> list[str]:
        """Queue the ``n`` generations of one prompt; returns their ids."""
        name = self._new_id() if request_id is None else request_id
        self._num_named += request_id is None
        return [self.submit(prompt, p, request_id=child, forced=forced) for p, child in children(params, name)]

    def _async(self) -> "Concurrent":
        """What async calls go through; raises UsageError while others are live."""
        from tapscope.engine.concurrent import Concurrent  # imports what only servers need otherwise

        if self._concurrent is None:
            if self.has_work:
                raise UsageError(
                    "async calls cannot start while submitted requests are live; step() until they are done"
                )
            self._concurrent = Concurrent(self.engine, self.tokenizer)
        return self._concurrent

    def _take_back(self, what: str) -> None:
        """Have the engine in the caller's thread; raises UsageError while async calls are live."""
        if self._concurrent is None:
            return
        if self._concurrent.num_live:
            raise UsageError(f"{what} cannot run while async calls are live; await them first")
        self._concurrent.close()
        self._concurrent = None

    def _require_idle(self, what: str) -> None:
        self._take_back(what)
        if self.has_work:
            raise UsageError(f"{what} cannot run while submitted requests are live; step() until they are done")

    def _new_id(self) -> str:
        """The next number that no live request is called by."""
        taken = {request.id for request in self.engine.scheduler.live()}
        while str(self._num_named) in taken:
            self._num_named += 1
        return str(self._num_named)

    def _advance(self) -> list[Output]:
        return [self._told(output) for output in self.engine.step()]

    def _told(self, output: Output) -> Output:
        """``output`` with its text; a stop string in it ends the request in the engine too."""
        told = self._assemblies[output.request].add(output)
        if told.finish_reason and not output.finish_reason:
            self.engine.abort(output.request)
        return told
