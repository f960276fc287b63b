"""OpenAI's routes: /v1/chat/completions, /v1/responses, /v1/completions, /v1/embeddings, /v1/models."""

from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response

from tapscope.engine.api.answer_schemas import ChatAnswer, CompletionAnswer, EmbeddingAnswer, ResponsesAnswer
from tapscope.engine.api.chat_request import ChatBody, ChatRequest
from tapscope.engine.api.chat_response import ChatResponse
from tapscope.engine.api.completions import CompletionBody, CompletionRequest, CompletionResponse
from tapscope.engine.api.embeddings import PARAMS, EmbeddingBody, EmbeddingRequest, EmbeddingResponse
from tapscope.engine.api.errors import error_responses
from tapscope.engine.api.generation_job import GenerationJob, make_jobs
from tapscope.engine.api.request_model import openapi_body
from tapscope.engine.api.responses_request import ResponsesBody, ResponsesRequest
from tapscope.engine.api.responses_response import ResponsesResponse
from tapscope.engine.api.served_model import model_card, model_list
from tapscope.engine.api.usage import Usage, sse_event
from tapscope.engine.requests.output import Output
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.request_body import json_response
from tapscope.engine.server.route_common import BodyReader, generate_all, respond, with_error_event, with_prompt
from tapscope.engine.server.stream_responses import event_stream, unless_gone

ModelName = Annotated[str, Path(description="The model, MODEL:ADAPTER, or ADAPTER.")]
_CHAT = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 16}
_ITEMS = {"input": "What is 2 + 2?", "max_output_tokens": 16}
_PROMPT = {"prompt": "def main():", "max_tokens": 16}
_INPUT = {"input": ["a sentence", "another"]}

Outputs = AsyncGenerator[tuple[int, Output]]


def make_router(state: AppState, reader: BodyReader) -> APIRouter:
    """Create the routes; ``state.client`` is available once the app runs."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=error_responses("/v1/"))
    _add_chat(router, state, reader)
    _add_responses(router, state, reader)
    _add_completions(router, state, reader)
    _add_embeddings(router, state, reader)
    _add_models(router, reader)
    return router


def _add_chat(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post("/chat/completions", openapi_extra=openapi_body(ChatBody, _CHAT, ChatAnswer), response_model=None)
    async def chat_completions(request: Request) -> Any:
        """Generate the next message of a conversation; with `stream`, respond with server-sent events."""
        model, (parsed, prompt) = await reader.read(request, with_prompt(ChatRequest.parse))
        response = ChatResponse(model, parsed, prompt)
        name, prompts = parsed.request_id or response.id, [(prompt.token_ids, prompt.params)]
        jobs = make_jobs(prompts, name, model, parsed.priority, parsed.cache_salt, prompt.constraint_field)
        return await _reply(state, request, generate_all(state, jobs, request), response, parsed)


def _add_responses(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post("/responses", openapi_extra=openapi_body(ResponsesBody, _ITEMS, ResponsesAnswer), response_model=None)
    async def responses(request: Request) -> Any:
        """Generate a response (reasoning, text, function calls), which is not stored; `stream`: server-sent events."""
        model, (parsed, prompt) = await reader.read(request, with_prompt(ResponsesRequest.parse))
        fields, prompts = parsed.fields, [(prompt.token_ids, prompt.params)]
        response = ResponsesResponse(model, fields, prompt)
        jobs = make_jobs(prompts, response.id, model, fields.priority, fields.cache_salt, prompt.constraint_field)
        return await respond(request, generate_all(state, jobs, request), response, stream=fields.stream)


def _add_completions(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post(
        "/completions", openapi_extra=openapi_body(CompletionBody, _PROMPT, CompletionAnswer), response_model=None
    )
    async def completions(request: Request) -> Any:
        """Complete one or several prompts; with `stream`, respond with server-sent events."""
        model, parsed = await reader.read(request, CompletionRequest.parse)
        response = CompletionResponse(model, parsed)
        prompts = list(zip(parsed.prompts, parsed.params, strict=True))
        name = parsed.request_id or response.id
        jobs = make_jobs(prompts, name, model, parsed.priority, parsed.cache_salt, parsed.constraint_field)
        return await _reply(state, request, generate_all(state, jobs, request), response, parsed)


def _add_embeddings(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post("/embeddings", openapi_extra=openapi_body(EmbeddingBody, _INPUT, EmbeddingAnswer))
    async def embeddings(request: Request) -> Response:
        """Embed prompts as unit vectors: the final hidden state of the last token, or the mean over all tokens."""
        model, parsed = await reader.read(request, EmbeddingRequest.parse)
        jobs = [
            GenerationJob(prompt=ids, params=PARAMS, pooling=parsed.pooling, adapter=model.adapter)
            for ids in parsed.prompts
        ]
        response = EmbeddingResponse(model, parsed)
        await unless_gone(request, _collect(state, generate_all(state, jobs, request), response))
        return json_response(response.answer())


def _add_models(router: APIRouter, reader: BodyReader) -> None:
    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        """List the served model and its LoRA adapters."""
        return JSONResponse(model_list(await reader.model(), for_anthropic="anthropic-version" in request.headers))

    @router.get("/models/{name:path}")
    async def one_model(name: ModelName, request: Request) -> JSONResponse:
        """Describe the model with this name."""
        model = (await reader.model()).selected(name)
        model.check_name(name)
        return JSONResponse(model_card(model, for_anthropic="anthropic-version" in request.headers))


async def _reply(
    state: AppState,
    request: Request,
    outputs: Outputs,
    response: ChatResponse | CompletionResponse,
    parsed: ChatRequest | CompletionRequest,
) -> Any:
    if parsed.stream:
        events = _events(state, outputs, response, parsed)
        return await event_stream(with_error_event(request.url.path, events))
    num_values = await unless_gone(request, _collect(state, outputs, response))
    return await state.client.build(num_values, lambda: json_response(response.answer()))


async def _collect(
    state: AppState, outputs: Outputs, response: ChatResponse | CompletionResponse | EmbeddingResponse
) -> int:
    """Add all outputs to ``response`` and return their total number of values."""
    num_values = 0
    try:
        async for index, output in outputs:
            await state.client.build(output.num_values, response.take, index, output)
            num_values += output.num_values
    finally:
        await outputs.aclose()
    return num_values


async def _events(
    state: AppState,
    outputs: Outputs,
    response: ChatResponse | CompletionResponse,
    parsed: ChatRequest | CompletionRequest,
) -> AsyncGenerator[str]:
    usages: defaultdict[int, Usage] = defaultdict(Usage)

    def written(index: int, output: Output) -> str | None:
        chunk = response.chunk(index, output)
        usages[index].add(output)
        if chunk is not None and parsed.include_usage:
            chunk["usage"] = usages[index].openai() if parsed.continuous_usage else None
        return None if chunk is None else sse_event(chunk)

    try:
        async for index, output in outputs:
            text = await state.client.build(output.num_values, written, index, output)
            if text is not None:
                yield text
        if parsed.include_usage:
            yield sse_event(response.usage_chunk())
        yield sse_event("[DONE]")
    finally:
        await outputs.aclose()
