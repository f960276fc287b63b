"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from tapscope.engine.api.answer_schemas import CountAnswer, MessagesAnswer
from tapscope.engine.api.errors import error_responses
from tapscope.engine.api.generation_job import make_jobs
from tapscope.engine.api.messages_request import CountBody, MessagesBody, MessagesRequest, parse_count
from tapscope.engine.api.messages_response import MessagesResponse
from tapscope.engine.api.prompting import encode_conversation
from tapscope.engine.api.request_model import openapi_body
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.route_common import BodyReader, generate_all, respond, with_prompt

_COUNTED = {"model": "NAME", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
_EXAMPLE = _COUNTED | {"max_tokens": 16}


def make_router(state: AppState, reader: BodyReader) -> APIRouter:
    """Create the routes; ``state.client`` is available once the app runs."""
    router = APIRouter(prefix="/v1/messages", tags=["anthropic"], responses=error_responses("/v1/messages"))

    @router.post("", openapi_extra=openapi_body(MessagesBody, _EXAMPLE, MessagesAnswer), response_model=None)
    async def messages(request: Request) -> Any:
        """Generate the next message of a conversation; with `stream`, respond with Anthropic's event stream."""
        model, (parsed, prompt) = await reader.read(request, with_prompt(MessagesRequest.parse))
        response = MessagesResponse(model, prompt.form, len(prompt.token_ids))
        prompts = [(prompt.token_ids, prompt.params)]
        jobs = make_jobs(prompts, response.id, model, constraint_field=prompt.constraint_field)
        return await respond(request, generate_all(state, jobs, request), response, stream=parsed.stream)

    @router.post("/count_tokens", openapi_extra=openapi_body(CountBody, _COUNTED, CountAnswer))
    async def count_tokens(request: Request) -> JSONResponse:
        """Count the prompt tokens of a /v1/messages request."""
        _, num_tokens = await reader.read(request, _count)
        return JSONResponse({"input_tokens": num_tokens})

    return router


def _count(body: Any, model: ServedModel) -> int:
    return len(encode_conversation(model, parse_count(body, model))[1])
