"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from tapscope.engine.api.errors import error_responses
from tapscope.engine.api.messages_request import CountBody, MessagesBody, MessagesRequest, parse_count
from tapscope.engine.api.messages_response import MessagesResponse
from tapscope.engine.api.prompting import Prompt, encode_conversation, make_prompt
from tapscope.engine.api.request_model import openapi_body
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.route_common import (
    BodyReader,
    each_event,
    generate_all,
    make_jobs,
    sum_outputs,
    with_error_event,
)
from tapscope.engine.server.stream_responses import sse, unless_gone

_COUNTED = {"model": "NAME", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
_EXAMPLE = _COUNTED | {"max_tokens": 16}


def make_router(state: AppState, reader: BodyReader) -> APIRouter:
    """The routes; ``state.client`` exists once the app runs."""
    router = APIRouter(prefix="/v1/messages", tags=["anthropic"], responses=error_responses("/v1/messages"))

    @router.post("", openapi_extra=openapi_body(MessagesBody, _EXAMPLE), response_model=None)
    async def messages(request: Request) -> Any:
        """Generate the next message of a conversation; with `stream`, as Anthropic's events."""
        model, (parsed, prompt) = await reader.read(request, _read_messages)
        answer = MessagesResponse(model, prompt.form, len(prompt.token_ids))
        work = make_jobs([(prompt.token_ids, prompt.params)], answer.id, model)
        outputs = generate_all(state, work, request)
        if parsed.stream:
            return await sse(with_error_event(request.url.path, each_event(outputs, answer.events), name="error"))
        return JSONResponse(answer.answer(await unless_gone(request, sum_outputs(outputs))))

    @router.post("/count_tokens", openapi_extra=openapi_body(CountBody, _COUNTED))
    async def count_tokens(request: Request) -> JSONResponse:
        """Count the prompt tokens of a /v1/messages request."""
        _, num_tokens = await reader.read(request, _count)
        return JSONResponse({"input_tokens": num_tokens})

    return router


def _read_messages(body: Any, model: ServedModel) -> tuple[MessagesRequest, Prompt]:
    parsed = MessagesRequest.parse(body, model)
    return parsed, make_prompt(model, parsed.conversation)


def _count(body: Any, model: ServedModel) -> int:
    return len(encode_conversation(model, parse_count(body, model))[1])
