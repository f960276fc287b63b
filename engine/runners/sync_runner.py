"""SyncRunner: drive one engine in the caller's thread and add text to its outputs."""

from collections.abc import Iterator, Sequence
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.engine import Engine
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output, OutputAssembler
from tapscope.engine.requests.prompts import Prompt, expand_generations, token_ids
from tapscope.engine.requests.request import Generation, Request
from tapscope.engine.text.tokenizer import Tokenizer


class SyncRunner:
    """Submits requests, runs steps and assembles outputs in the calling thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._num_named = 0
        self._assemblers: dict[str, OutputAssembler] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return self._engine.scheduler.has_work

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None],
        forced_token_ids: Sequence[Sequence[int] | None],
        adapters: Sequence[str],
    ) -> list[Generation]:
        """Complete every prompt. Raises UsageError before the first step if any request can never run."""
        try:
            order: list[str] = []
            each = zip(prompts, params, request_ids, forced_token_ids, adapters, strict=True)
            for prompt, one, given, tokens, adapter in each:
                name = self._new_id() if given is None else given
                self._num_named += given is None
                order += [
                    self.submit(prompt, p, child, forced_token_ids=tokens or (), adapter=adapter)
                    for p, child in expand_generations(one, name)
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
        **options: Any,
    ) -> Iterator[Output]:
        """Yield the outputs of all prompts as they are computed; closing the iterator aborts the unfinished requests.

        ``options`` are the options of :meth:`submit`, applied to all prompts.
        """
        names: list[str] = []
        try:
            for prompt, name in zip(prompts, request_ids, strict=True):
                names.append(self.submit(prompt, params, name, **options))
            while self.has_work:
                yield from self.advance()
        finally:
            for name in names:
                self.abort(name)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        forced_token_ids: Sequence[int] = (),
        priority: int = 0,
        capture: str = "",
        cache_salt: str = "",
        adapter: str = "",
        experts: str = "",
    ) -> str:
        """Queue one request and return its id. Raises UsageError if the request can never run."""
        name = self._new_id() if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise UsageError(f"invalid request id {name!r}: expected a string of at least one character")
        if type(priority) is not int:
            raise UsageError(f"invalid priority {priority!r}: expected an integer")
        if not isinstance(cache_salt, str):
            raise UsageError(f"invalid cache_salt {cache_salt!r}: expected a string")
        request = Request(
            id=name,
            prompt_ids=token_ids(prompt, self._tokenizer),
            params=params,
            forced_token_ids=tuple(forced_token_ids),
            priority=priority,
            capture=capture,
            cache_salt=cache_salt,
            adapter=adapter,
            experts=experts,
        )
        if params.stops_on_text and self._tokenizer is None:
            raise UsageError(f"{self._engine.config.model} has no tokenizer.json; stop strings need one")
        self._engine.submit(request)
        self._assemblers[name] = OutputAssembler(name, request.prompt_ids, self._tokenizer, params)
        self._num_named += request_id is None
        return name

    def step(self) -> list[Generation]:
        """Run one step and return the requests that it finished. Raises RankLostError."""
        return [self._assemblers.pop(output.request).generation() for output in self._step() if output.finish_reason]

    def advance(self) -> list[Output]:
        """Run one step and return the new output of each request. Raises RankLostError."""
        outputs = self._step()
        for output in outputs:
            if output.finish_reason:
                del self._assemblers[output.request]
        return outputs

    def abort(self, request_id: str) -> Generation | None:
        """Abort a live request between two steps and return its generation so far; None if no such request is live."""
        output = self._engine.abort(request_id)
        if output is None:
            return None
        assembler = self._assemblers.pop(request_id)
        assembler.add(output)
        return assembler.generation()

    def _step(self) -> list[Output]:
        """Run one step and return its outputs with text.

        A request that ends with a stop string is aborted in the engine.
        """
        try:
            step = self._engine.step()
        except BaseException:
            ended = [name for name in self._assemblers if not self._engine.scheduler.is_live(name)]
            for name in ended:
                del self._assemblers[name]
            raise
        outputs = []
        for computed in step:
            output = self._assemblers[computed.request].add(computed)
            if output.finish_reason and not computed.finish_reason:
                self._engine.abort(output.request)
            outputs.append(output)
        return outputs

    def _new_id(self) -> str:
        """Return the next number that is not the id of a live request."""
        while self._engine.scheduler.is_live(str(self._num_named)):
            self._num_named += 1
        return str(self._num_named)
