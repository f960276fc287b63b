"""Driver: one engine, stepped in the caller's thread, and its requests with their texts."""

from collections.abc import Iterator, Sequence
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.engine import Engine
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Assembly, Output
from tapscope.engine.requests.prompts import Prompt, children, token_ids
from tapscope.engine.requests.request import Generation, Request
from tapscope.engine.text.tokenizer import Tokenizer


class Driver:
    """Lets requests in, computes steps, puts text to what comes."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._num_named = 0
        self._assemblies: dict[str, Assembly] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return self._engine.scheduler.has_work

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        forced: Sequence[int] = (),
        priority: int = 0,
        capture: str = "",
        cache_salt: str = "",
    ) -> str:
        """Queue one request and return its id; raises UsageError when it can never run."""
        name = self._new_id() if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise UsageError(f"request id {name!r}: it must be a text of at least one character")
        if type(priority) is not int:
            raise UsageError(f"priority={priority!r}: it must be a whole number")
        if not isinstance(cache_salt, str):
            raise UsageError(f"cache_salt={cache_salt!r}: it must be a string")
        request = Request(
            id=name,
            prompt_ids=token_ids(prompt, self._tokenizer),
            params=params,
            forced=tuple(forced),
            priority=priority,
            capture=capture,
            cache_salt=cache_salt,
        )
        if params.stops_on_text and self._tokenizer is None:
            raise UsageError(f"{self._engine.config.model} has no tokenizer.json; stop strings need one")
        self._engine.submit(request)
        self._assemblies[name] = Assembly(name, request.prompt_ids, self._tokenizer, params)
        self._num_named += request_id is None
        return name

    def step(self) -> list[Generation]:
        """Compute one step; returns the requests it finished. Raises RankLostError."""
        return [self._assemblies.pop(o.request).generation() for o in self._advance() if o.finish_reason]

    def advance(self) -> list[Output]:
        """As :meth:`step`, but returns what is new of each request."""
        outputs = self._advance()
        for output in outputs:
            if output.finish_reason:
                del self._assemblies[output.request]
        return outputs

    def abort(self, request_id: str) -> Generation | None:
        """Drop a live request between two steps; returns what it had, or None when no such request is live."""
        output = self._engine.abort(request_id)
        if output is None:
            return None
        assembly = self._assemblies.pop(request_id)
        assembly.add(output)
        return assembly.generation()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None],
        forced: Sequence[Sequence[int] | None],
    ) -> list[Generation]:
        """Complete every prompt; raises UsageError before anything is computed when one can never run."""
        try:
            order = [
                child
                for prompt, one, name, tokens in zip(prompts, params, request_ids, forced, strict=True)
                for child in self._submit_each(prompt, one, name, tokens or ())
            ]
            done: dict[str, Generation] = {}
            while self.has_work:
                done |= {generation.request: generation for generation in self.step()}
        except BaseException:
            for request in list(self._engine.scheduler.live()):
                self.abort(request.id)
            raise
        return [done[name] for name in order]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_ids: Sequence[str | None],
        *,
        forced: Sequence[int] = (),
        priority: int = 0,
        capture: str = "",
        cache_salt: str = "",
    ) -> Iterator[Output]:
        """Every output of all prompts as it arises; closing it aborts what is left."""
        names: list[str] = []
        try:
            options: Any = {"priority": priority, "capture": capture, "cache_salt": cache_salt}
            for prompt, name in zip(prompts, request_ids, strict=True):
                names.append(self.submit(prompt, params, name, forced=forced, **options))
            while self.has_work:
                yield from self.advance()
        finally:
            for name in names:
                self.abort(name)

    def _submit_each(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, forced: Sequence[int]
    ) -> list[str]:
        """Queue the ``n`` generations of one prompt; returns their ids."""
        name = self._new_id() if request_id is None else request_id
        self._num_named += request_id is None
        return [self.submit(prompt, p, child, forced=forced) for p, child in children(params, name)]

    def _new_id(self) -> str:
        """The next number that no live request is called by."""
        while self._engine.scheduler.is_live(str(self._num_named)):
            self._num_named += 1
        return str(self._num_named)

    def _advance(self) -> list[Output]:
        return [self._told(output) for output in self._engine.step()]

    def _told(self, output: Output) -> Output:
        """``output`` with its text; a stop string in it ends the request in the engine too."""
        told = self._assemblies[output.request].add(output)
        if told.finish_reason and not output.finish_reason:
            self._engine.abort(output.request)
        return told
