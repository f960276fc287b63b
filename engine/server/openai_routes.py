"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tapscope.engine.api.chat_request import ChatBody, ChatRequest
from tapscope.engine.api.chat_response import ChatAnswer
from tapscope.engine.api.completions import CompletionAnswer, CompletionBody, CompletionRequest
from tapscope.engine.api.embeddings import PARAMS, EmbeddingAnswer, EmbeddingBody, EmbeddingRequest
from tapscope.engine.api.errors import error_responses
from tapscope.engine.api.model_list import model_card, model_list
from tapscope.engine.api.prompting import Prompt, make_prompt
from tapscope.engine.api.request_model import openapi_body
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import sse as event
from tapscope.engine.requests.output import Output
from tapscope.engine.server.app_state import FrontState
from tapscope.engine.server.request_body import json_response
from tapscope.engine.server.route_common import Asked, RankGroup, guarded, jobs, outputs_of
from tapscope.engine.server.stream_responses import sse, unless_gone

_CHAT = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 16}
_PROMPT = {"prompt": "def main():", "max_tokens": 16}
_INPUT = {"input": ["a text", "another"]}

Outputs = AsyncGenerator[tuple[int, Output]]


def make_router(state: FrontState, asked: Asked) -> APIRouter:
    """The routes; ``state.client`` exists once the app runs."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=error_responses("/v1/"))
    _add_chat(router, state, asked)
    _add_completions(router, state, asked)
    _add_embeddings(router, state, asked)
    _add_models(router, asked)
    return router


def _add_chat(router: APIRouter, state: FrontState, asked: Asked) -> None:
    @router.post("/chat/completions", openapi_extra=openapi_body(ChatBody, _CHAT), response_model=None)
    async def chat_completions(request: Request) -> Any:
        """Go on with a conversation; with `stream`, as server-sent events."""
        model = await asked.model()
        wanted, prompt = await asked.read(request, _read_chat)
        answer = ChatAnswer(model, prompt.form, n=prompt.params.n, with_logprobs=wanted.with_logprobs)
        name = wanted.request_id or answer.id
        work = jobs([(prompt.token_ids, prompt.params)], name, wanted.priority, wanted.cache_salt)
        return await _reply(state, request, outputs_of(state, work, request), answer, wanted)


def _add_completions(router: APIRouter, state: FrontState, asked: Asked) -> None:
    @router.post("/completions", openapi_extra=openapi_body(CompletionBody, _PROMPT), response_model=None)
    async def completions(request: Request) -> Any:
        """Complete one prompt or several; with `stream`, as server-sent events."""
        model = await asked.model()
        wanted = await asked.read(request, CompletionRequest.parse)
        answer = CompletionAnswer(model, wanted)
        prompts = list(zip(wanted.prompts, wanted.params, strict=True))
        work = jobs(prompts, wanted.request_id or answer.id, wanted.priority, wanted.cache_salt)
        return await _reply(state, request, outputs_of(state, work, request), answer, wanted)


def _add_embeddings(router: APIRouter, state: FrontState, asked: Asked) -> None:
    @router.post("/embeddings", openapi_extra=openapi_body(EmbeddingBody, _INPUT))
    async def embeddings(request: Request) -> Response:
        """The prompts as vectors of length 1: the final hidden state of the last token, or the mean of all."""
        model = await asked.model()
        wanted = await asked.read(request, EmbeddingRequest.parse)
        work = [RankGroup(token_ids=ids, params=PARAMS, pooling=wanted.pooling) for ids in wanted.prompts]
        answer = EmbeddingAnswer(model, wanted)
        await unless_gone(request, _take_all(state, outputs_of(state, work, request), answer))
        return json_response(answer.answer())


def _add_models(router: APIRouter, asked: Asked) -> None:
    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        """The model that is served."""
        return JSONResponse(model_list(await asked.model(), for_anthropic="anthropic-version" in request.headers))

    @router.get("/models/{name:path}")
    async def one_model(name: str, request: Request) -> JSONResponse:
        """The model of this name."""
        model = await asked.model()
        model.check_name(name)
        return JSONResponse(model_card(model, for_anthropic="anthropic-version" in request.headers))


def _read_chat(body: Any, model: ServedModel) -> tuple[ChatRequest, Prompt]:
    wanted = ChatRequest.parse(body, model)
    return wanted, make_prompt(model, wanted.talk)


async def _reply(
    state: FrontState,
    request: Request,
    outputs: Outputs,
    answer: ChatAnswer | CompletionAnswer,
    wanted: ChatRequest | CompletionRequest,
) -> Any:
    if wanted.stream:
        events = _events(state, outputs, answer, include_usage=wanted.include_usage)
        return await sse(guarded(request.url.path, events))
    num_values = await unless_gone(request, _take_all(state, outputs, answer))
    return await state.client.build(num_values, lambda: json_response(answer.answer()))


async def _take_all(
    state: FrontState, outputs: Outputs, answer: ChatAnswer | CompletionAnswer | EmbeddingAnswer
) -> int:
    """Returns how many log-probabilities there were."""
    num_values = 0
    try:
        async for index, output in outputs:
            await state.client.build(output.num_values, answer.take, index, output)
            num_values += output.num_values
    finally:
        await outputs.aclose()
    return num_values


async def _events(
    state: FrontState,
    outputs: Outputs,
    answer: ChatAnswer | CompletionAnswer,
    *,
    include_usage: bool,
) -> AsyncGenerator[str]:
    def written(index: int, output: Output) -> str | None:
        chunk = answer.chunk(index, output)
        return None if chunk is None else event(chunk | ({"usage": None} if include_usage else {}))

    try:
        async for index, output in outputs:
            text = await state.client.build(output.num_values, written, index, output)
            if text is not None:
                yield text
        if include_usage:
            yield event(answer.usage_chunk())
        yield event("[DONE]")
    finally:
        await outputs.aclose()
