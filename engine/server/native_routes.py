"""SGLang's native routes: /generate, status, abort, cache, adapters and profiles; vLLM's /tokenize, /version, /ping."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tapscope._version import __version__
from tapscope.core.errors import LiveError, TapscopeError
from tapscope.engine.api.answer_schemas import AdaptersAnswer, DetokenizeAnswer, GenerateAnswer, TokenizeAnswer
from tapscope.engine.api.errors import error_responses, status_of
from tapscope.engine.api.native_request import (
    AbortBody,
    GenerateBody,
    LoadAdapterBody,
    NativeGeneration,
    ProfileBody,
    UnloadAdapterBody,
    is_batch,
    read_generations,
)
from tapscope.engine.api.native_response import ResponseStyle, answer
from tapscope.engine.api.request_model import openapi_body
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.tokenize_request import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tapscope.engine.api.usage import sse_event
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.metrics import info_of
from tapscope.engine.server.request_body import json_response, read_json
from tapscope.engine.server.route_common import BodyReader, generate_all
from tapscope.engine.server.stream_responses import event_stream, unless_gone

T = TypeVar("T")

_ADAPTER = {"lora_name": "sql", "lora_path": "/adapters/sql"}
_UNLOADED = {"lora_name": "sql"}
_EXAMPLE = {"text": "def main():", "sampling_params": {"max_new_tokens": 16}}


def make_router(state: AppState, reader: BodyReader) -> APIRouter:
    """Create the routes; ``state.client`` is available once the app runs."""
    router = APIRouter(tags=["native"], responses=error_responses("/generate"))
    _add_generate(router, state, reader)
    _add_tokenizer_routes(router, reader)
    _add_info_routes(router, state)
    _add_abort_route(router, state)
    _add_cache_route(router, state)
    _add_adapter_routes(router, state, reader)
    _add_profile_routes(router, state)
    return router


def _add_generate(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post(
        "/generate",
        openapi_extra=openapi_body(GenerateBody, _EXAMPLE, GenerateAnswer | list[GenerateAnswer]),
        response_model=None,
    )
    async def generate(request: Request) -> Any:
        """Complete one prompt or a batch; with `stream`, respond with server-sent events of the cumulative output."""
        _, (body, items) = await reader.read(request, _read_generate)
        jobs = [item.job for item in items]
        outputs = generate_all(state, jobs, request, capture=body.capture, dp_rank=body.replica)
        respond = partial(_cumulative_responses, state.client, items, outputs, _style(body, state))
        indexed = is_batch(body, len(items))
        if body.stream:
            return await event_stream(_events(respond(partial(_event, indexed=indexed), only_ends=False)))
        answers = await unless_gone(request, _answers(respond(_encoded, only_ends=True), len(items)))
        return json_response(answers if indexed else answers[0])


def _read_generate(given: Any, model: ServedModel) -> tuple[GenerateBody, list[NativeGeneration]]:
    body = GenerateBody.parse(given)
    return body, read_generations(body, model)


def _add_tokenizer_routes(router: APIRouter, reader: BodyReader) -> None:
    @router.post("/tokenize", openapi_extra=openapi_body(TokenizeBody, {"prompt": "def main():"}, TokenizeAnswer))
    async def tokenize_route(request: Request) -> Response:
        """Tokenize a prompt, or messages rendered with the chat template; the fields are vLLM's."""
        return json_response((await reader.read(request, tokenize))[1])

    @router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody, {"tokens": [5, 6]}, DetokenizeAnswer))
    async def detokenize_route(request: Request) -> Response:
        """Decode token ids to text, special tokens included."""
        return json_response((await reader.read(request, detokenize))[1])


def _add_info_routes(router: APIRouter, state: AppState) -> None:
    @router.get("/ping")
    @router.post("/ping")
    @router.get("/health")
    async def health() -> Response:
        """Respond with 200 while the engine can compute, otherwise with 503 and the reason."""
        state.require_ready()
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        """Return the version of tapscope."""
        return JSONResponse({"version": __version__})

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Generate a token on every replica, then respond with 200; 503 while generation is paused."""
        state.require_ready()
        if (await state.client.call("state"))["is_paused"]:
            raise LiveError("generation is paused, see POST /continue_generation")
        await unless_gone(request, _generate_everywhere(state.client))
        return JSONResponse({"status": "ok"})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def get_model_info() -> Response:
        """Return the name, path and weight version of the served model."""
        facts = {"model_path": state.model_path, "served_model_name": state.model_name, "is_generation": True}
        return JSONResponse(facts | {"tokenizer_path": state.model_path, "weight_version": state.weight_version})

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def get_server_info() -> Response:
        """Return the settings and load of the engine."""
        engine = info_of(await state.client.call_all("state"))
        return JSONResponse({"version": __version__, "weight_version": state.weight_version} | engine)


def _add_abort_route(router: APIRouter, state: AppState) -> None:
    @router.post("/abort_request", openapi_extra=openapi_body(AbortBody, {"rid": "mine"}))
    async def abort_request(request: Request) -> Response:
        """Abort one live request, or all; aborted requests finish with the reason `abort` and their output so far."""
        body = AbortBody.parse(await read_json(request))
        state.client.abort(body.rid)
        return JSONResponse({"success": True})


def _add_cache_route(router: APIRouter, state: AppState) -> None:
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Empty the prefix cache except for pages that running requests hold."""
        freed = await state.client.call_all("flush_cache")
        state.client.forget_prefixes()
        return JSONResponse({"success": True, "num_pages": sum(each["num_pages"] for each in freed)})


def _add_adapter_routes(router: APIRouter, state: AppState, reader: BodyReader) -> None:
    @router.post("/load_lora_adapter", openapi_extra=openapi_body(LoadAdapterBody, _ADAPTER, AdaptersAnswer))
    @router.post(
        "/v1/load_lora_adapter", openapi_extra=openapi_body(LoadAdapterBody, _ADAPTER, AdaptersAnswer), tags=["openai"]
    )
    async def load_lora_adapter(request: Request) -> Response:
        """Load a LoRA adapter in PEFT's format; requests select it by `lora_name`."""
        body = LoadAdapterBody.parse(await read_json(request))
        async with state.updating:
            await reader.model()  # adds the adapters loaded at startup to state.adapters
            await state.client.load_adapter(body.lora_name, body.lora_path)
            state.adapters[body.lora_name] = body.lora_path
        return JSONResponse({"success": True, "loaded_adapters": state.adapters})

    @router.post("/unload_lora_adapter", openapi_extra=openapi_body(UnloadAdapterBody, _UNLOADED, AdaptersAnswer))
    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=openapi_body(UnloadAdapterBody, _UNLOADED, AdaptersAnswer),
        tags=["openai"],
    )
    async def unload_lora_adapter(request: Request) -> Response:
        """Unload a LoRA adapter: new requests cannot select it, while live requests (`num_live`) finish with it."""
        body = UnloadAdapterBody.parse(await read_json(request))
        async with state.updating:
            await reader.model()
            num_live = await state.client.unload_adapter(body.lora_name)
            del state.adapters[body.lora_name]
        return JSONResponse({"success": True, "num_live": num_live, "loaded_adapters": state.adapters})


def _add_profile_routes(router: APIRouter, state: AppState) -> None:
    @router.post("/start_profile", openapi_extra=openapi_body(ProfileBody, {}, required=False))
    async def start_profile(request: Request) -> Response:
        """Start recording every rank with `torch.profiler`."""
        ProfileBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            await state.client.call_all("start_profile")
        return JSONResponse({"success": True})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Stop profiling and write the `traces` to `profile_dir`: one file per rank, in Chrome's trace format."""
        name = time.strftime("%Y%m%d-%H%M%S")
        async with state.updating:
            written = await state.client.call_all("stop_profile", name=name)
        return JSONResponse({"success": True, "traces": [trace for each in written for trace in each["traces"]]})


async def _generate_everywhere(client: EngineClient) -> None:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    await asyncio.gather(*(client.generate((0,), params, dp_rank=number) for number in range(len(client.replicas))))


def _encoded(_: int, whole: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(whole))


def _event(index: int, whole: dict[str, Any], *, indexed: bool) -> str:
    return sse_event(({"index": index} if indexed else {}) | whole)


async def _answers(wholes: AsyncGenerator[tuple[int, msgspec.Raw]], count: int) -> list[msgspec.Raw]:
    """Collect the responses of all items in order; if one item fails, the others are aborted."""
    answers: dict[int, msgspec.Raw] = {}
    async with aclosing(wholes):
        async for index, whole in wholes:
            answers[index] = whole
    return [answers[index] for index in range(count)]


async def _events(wholes: AsyncGenerator[tuple[int, str]]) -> AsyncGenerator[str]:
    """Yield the events of ``wholes``, then SGLang's `[DONE]`; an error after the first event becomes an event."""
    began = False
    try:
        async for _, event in wholes:
            began = True
            yield event
    except TapscopeError as error:
        if not began:
            raise
        yield sse_event({"error": {"message": str(error), "code": status_of(error)}})
    finally:
        await wholes.aclose()
    yield sse_event("[DONE]")


async def _cumulative_responses(
    client: EngineClient,
    items: list[NativeGeneration],
    outputs: AsyncGenerator[tuple[int, Output]],
    style: ResponseStyle,
    write: Callable[[int, dict[str, Any]], T],
    *,
    only_ends: bool,
) -> AsyncGenerator[tuple[int, T]]:
    """Yield (index, encoded cumulative response) after each output of an item, or only after its last output.

    ``only_ends`` selects the latter. Intermediate outputs are skipped according to the item's ``stream_interval``.
    """
    started = time.perf_counter()

    def written(index: int, whole: Output, item: NativeGeneration, took_s: float) -> T:
        return write(index, answer(whole, took_s, item.logprobs, style, has_text=client.tokenizer is not None))

    sums: dict[int, Output] = {}
    num_values = [0] * len(items)
    num_sent_tokens = [-i.stream_interval for i in items]
    try:
        async for index, output in outputs:
            sums[index] = sums[index].followed_by(output) if index in sums else output
            num_values[index] += output.num_values
            item, whole = items[index], sums[index]
            is_soon = only_ends or len(whole.token_ids) - num_sent_tokens[index] < item.stream_interval
            if whole.finish_reason is None and is_soon:
                continue
            num_sent_tokens[index] = len(whole.token_ids)
            took_s = time.perf_counter() - started
            yield index, await client.build(num_values[index], written, index, whole, item, took_s)
    finally:
        await outputs.aclose()


def _style(body: GenerateBody, state: AppState) -> ResponseStyle:
    tokenizer = state.client.tokenizer
    decodes = body.return_text_in_logprobs and tokenizer is not None
    return ResponseStyle(
        decode=(lambda token: tokenizer.decode([token])) if decodes and tokenizer is not None else None,
        weight_version=lambda: state.weight_version,
    )
