"""Functions shared by the routes: read bodies and headers, submit generations, and stream their outputs."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tapscope.core.errors import RequestError, TapscopeError, UsageError
from tapscope.engine.api.errors import error_response_of
from tapscope.engine.api.generation_job import GenerationJob
from tapscope.engine.api.prompting import Conversation, Prompt, make_prompt
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import sse_event
from tapscope.engine.params.sampling_params import constraint_label
from tapscope.engine.requests.output import Output
from tapscope.engine.runners.merge_streams import merged
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.request_body import read_json
from tapscope.engine.server.request_id import request_id
from tapscope.engine.server.stream_responses import event_stream, unless_gone

T = TypeVar("T")

CAPTURE_HEADER = "x-tapscope-capture"
REPLICA_HEADER = "x-data-parallel-rank"  # same name as in vLLM
_LONG_BODY = 20_000  # bytes; longer bodies are parsed and tokenized in a thread


@dataclass(slots=True, eq=False)
class BodyReader:
    """Reader and parser of request bodies for one app; the served model is read on first use."""

    state: AppState
    _model: ServedModel | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def model(self) -> ServedModel:
        """Return the served model; raises LiveError while the engine does not respond."""
        async with self._lock:
            if self._model is None:
                engine = await self.state.client.call("state")
                self.state.adapters.update((each["name"], each["path"]) for each in engine["adapters"])
                settings = self.state.settings
                model = await asyncio.to_thread(
                    ServedModel.read,
                    Path(self.state.model_path),
                    name=self.state.model_name,
                    max_positions=engine["max_positions"],
                    tool_format=settings.tool_format,
                    reasoning_format=settings.reasoning_format,
                    limits=settings.limits,
                )
                self._model = replace(model, adapters=self.state.adapters)
            return self._model

    async def read(self, request: Request, parse: Callable[[Any, ServedModel], T]) -> tuple[ServedModel, T]:
        """Return (model, ``parse(body, model)``), where model is the model or adapter that the body selects.

        Raises UsageError.
        """
        body, model = await read_json(request), await self.model()
        if isinstance(body, dict) and not isinstance(body.get("lora_path"), list):
            model = model.selected(body.get("model"), body.get("lora_path"))
        if len(await request.body()) > _LONG_BODY:
            return model, await self.state.client.in_background(parse, body, model)
        return model, parse(body, model)


def capture_level(request: Request) -> str:
    """Return the capture level in the header x-tapscope-capture; empty without the header. Raises UsageError."""
    value = request.headers.get(CAPTURE_HEADER, "")
    if value not in ("", "stats", "full"):
        raise UsageError(f"header {CAPTURE_HEADER}: {value[:100]!r} must be 'stats' or 'full'")
    return value


def requested_replica(request: Request) -> int | None:
    """Return the DP replica in the header x-data-parallel-rank; raises UsageError for an invalid number."""
    value = request.headers.get(REPLICA_HEADER)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise UsageError(f"header {REPLICA_HEADER}: {value[:100]!r} must be the number of a DP replica, from 0")
    return int(value)


def generate_all(
    state: AppState,
    jobs: Sequence[GenerationJob],
    request: Request,
    *,
    capture: str | None = None,
    dp_rank: int | None = None,
) -> AsyncGenerator[tuple[int, Output]]:
    """Run all jobs and yield (index of the job, output) as outputs arrive; closing the generator aborts the rest.

    The headers of ``request`` supply ``capture`` and ``dp_rank`` where None; invalid headers raise UsageError. The
    scheduler interleaves the jobs of one HTTP request with those of other requests.
    """
    capture = capture or capture_level(request)
    dp_rank = requested_replica(request) if dp_rank is None else dp_rank
    parent = uuid.uuid4().hex if len(jobs) > 1 else ""
    streams = []
    for job in jobs:
        options = {
            "priority": job.priority,
            "cache_salt": job.cache_salt,
            "adapter": job.adapter,
            "pooling": job.pooling,
            "experts": job.experts,
            "capture": capture,
            "parent": parent,
        }
        given = {name: value for name, value in options.items() if value}
        stream = state.client.stream(job.prompt, job.params, request_id=job.request_id, options=given, dp_rank=dp_rank)
        streams.append(_constraint_errors_named(stream, job) if job.constraint_field else stream)
    return merged(streams)


async def _constraint_errors_named(stream: AsyncGenerator[Output], job: GenerationJob) -> AsyncGenerator[Output]:
    """Yield from ``stream``; errors about the job's constraint name the body's field instead of that of ``params``."""
    label = constraint_label(*job.params.constraint) if job.params.constraint is not None else None
    async with aclosing(stream):
        try:
            async for output in stream:
                yield output
        except UsageError as error:
            text, field = str(error), job.constraint_field
            if label is None or not text.startswith(label):
                raise
            raise RequestError(f"{field}: {text.removeprefix(label)}", param=field) from None


class ConversationRequest(Protocol):
    """A validated body that contains a conversation."""

    @property
    def conversation(self) -> Conversation:
        """The conversation to render as the prompt."""
        ...


R = TypeVar("R", bound=ConversationRequest)


def with_prompt(parse: Callable[[Any, ServedModel], R]) -> Callable[[Any, ServedModel], tuple[R, Prompt]]:
    """Return a parser for :meth:`BodyReader.read` that calls ``parse``, then renders the conversation as a prompt."""

    def parse_and_render(body: Any, model: ServedModel) -> tuple[R, Prompt]:
        parsed = parse(body, model)
        return parsed, make_prompt(model, parsed.conversation)

    return parse_and_render


class SingleResponse(Protocol):
    """Response builder for a request with one generation."""

    def events(self, output: Output) -> str:
        """Return the server-sent events of an output; empty if there are none."""
        ...

    def answer(self, output: Output) -> dict[str, Any]:
        """Return the complete response for the merged outputs."""
        ...


async def respond(
    request: Request, outputs: AsyncGenerator[tuple[int, Output]], response: SingleResponse, *, stream: bool
) -> Response:
    """Create the response to a request with one generation, or its event stream, where an error is the last event."""
    if stream:
        return await event_stream(
            with_error_event(request.url.path, each_event(outputs, response.events), name="error")
        )
    return JSONResponse(response.answer(await unless_gone(request, sum_outputs(outputs))))


async def each_event(
    outputs: AsyncGenerator[tuple[int, Output]], events: Callable[[Output], str]
) -> AsyncGenerator[str]:
    """Convert each output of one generation with ``events`` and yield the non-empty results."""
    try:
        async for _, output in outputs:
            text = events(output)
            if text:
                yield text
    finally:
        await outputs.aclose()


async def sum_outputs(outputs: AsyncGenerator[tuple[int, Output]]) -> Output:
    """Merge all outputs of one generation into one."""
    whole: Output | None = None
    try:
        async for _, output in outputs:
            whole = output if whole is None else whole.followed_by(output)
    finally:
        await outputs.aclose()
    assert whole is not None, "a request ends with an output or an error"
    return whole


async def with_error_event(path: str, events: AsyncGenerator[str], *, name: str | None = None) -> AsyncGenerator[str]:
    """Yield ``events``; an error after the first event becomes the last event, in the format of ``path``.

    An error before the first event is raised, because it can still become a response with its own status.
    """
    has_begun = False
    try:
        async for item in events:
            yield item
            has_begun = True
    except TapscopeError as error:
        if not has_begun:
            raise
        yield sse_event(error_response_of(path, error, request_id.get())[1], event=name)
    finally:
        await events.aclose()
