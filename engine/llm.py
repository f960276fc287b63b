"""LLM: the engine's public face. Offline by `generate`; a server drives `submit`, `step` and `abort` itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tapscope.engine.config import EngineConfig
from tapscope.engine.engine import Engine
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.output import Assembly, Output
from tapscope.engine.request import Generation, Request
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.tokenizer import Tokenizer
from tapscope.errors import UsageError
from tapscope.observe import ObserverFactory, StepObserver

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A model, loaded and ready; one thread at a time may use it. Close it, or use it as a context manager."""

    def __init__(
        self, model: str | Path | EngineConfig, *, observer: ObserverFactory | None = None, **settings: Any
    ) -> None:
        """Load ``model`` with settings of :class:`EngineConfig`; ``observer`` is called once on every rank.

        Raises ConfigError, UsageError (a tp that does not divide the model), CheckpointError, RankLostError.
        """
        config = EngineConfig.build(model, settings)
        self.tokenizer = Tokenizer.find(Path(config.model))
        self.engine = Engine(config, observer)
        self._num_named = 0
        self._assemblies: dict[str, Assembly] = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
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
        if isinstance(prompts, str):
            raise UsageError("prompts is one text; give a list of prompts")
        if self.has_work:
            raise UsageError("generate cannot run while submitted requests are live; step() until they are done")
        ids_given = _one_each("request_ids", request_ids, len(prompts))
        forced_given = _one_each("forced", forced, len(prompts))
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        each = [_params(one, max_new_tokens, ignore_eos) for one in _one_each("params", each, len(prompts))]
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
        if self.has_work:
            raise UsageError("stream cannot run while submitted requests are live; step() until they are done")
        several = _several(prompts)
        names: list[str] = []
        try:
            for prompt, name in zip(several, _one_each("request_ids", request_ids, len(several)), strict=True):
                names.append(self.submit(prompt, request_id=name, **options))
            while self.has_work:
                yield from self.advance()
        finally:
            for name in names:
                self.abort(name)

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
    ) -> str:
        """Queue one request for the coming steps and return its id; raises UsageError when it can never run.

        A higher ``priority`` is served first, and is the last to give up its pages when there are too few.

        Without ``request_id`` requests are called "0", "1", ... in order. An id may come again once its request
        is done, but observers then see the same (request, position) twice.
        """
        name = self._new_id() if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise UsageError(f"request id {name!r}: it must be a text of at least one character")
        if type(priority) is not int:
            raise UsageError(f"priority={priority!r}: it must be a whole number")
        request = Request(
            id=name,
            prompt_ids=tuple(self._encode(prompt) if isinstance(prompt, str) else prompt),
            params=_params(params, max_new_tokens, ignore_eos),
            forced=tuple(forced),
            priority=priority,
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
        """Close the observers and end the other ranks; safe to call twice."""
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
        if params.n == 1:
            return [self.submit(prompt, params, request_id=request_id, forced=forced)]
        name = self._new_id() if request_id is None else request_id
        self._num_named += request_id is None
        children = (params.child(i) for i in range(params.n))
        return [self.submit(prompt, p, request_id=f"{name}-{i}", forced=forced) for i, p in enumerate(children)]

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

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError(f"{self.config.model} has no tokenizer.json; give prompts as token ids")
        return self.tokenizer.encode(text)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A prompt (a text, or token ids) as a list of one; a list of prompts as it is."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _params(params: SamplingParams | None, max_new_tokens: int | None, ignore_eos: bool | None) -> SamplingParams:
    """``params``, or those that the two short forms stand for."""
    short = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
    given = {name: value for name, value in short.items() if value is not None}
    if params is not None and given:
        raise UsageError(f"{' and '.join(given)} given beside params; set it there instead")
    return SamplingParams.build(given) if params is None else params


def _one_each(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise UsageError(f"{name} has {len(values)} entries for {count} prompts; give one each")
    return values
