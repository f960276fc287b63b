"""SGLang's routes for trainers: pausing generation, updating and digesting weights, releasing memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from tapscope.core.errors import CheckpointError, LiveError
from tapscope.engine.api.answer_schemas import DigestAnswer, MemoryAnswer, PauseAnswer, WeightsAnswer
from tapscope.engine.api.errors import error_responses
from tapscope.engine.api.request_model import openapi_answer, openapi_body
from tapscope.engine.api.weight_request import (
    ContinueBody,
    DestroyGroupBody,
    DigestBody,
    DistributedWeightsBody,
    InitGroupBody,
    MemoryBody,
    PauseBody,
    WeightsBody,
)
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.request_body import read_json, save_body

WeightVersion = Annotated[
    str | None,
    Query(description="Version name of the new weights, reported in responses. null: the name stays the same."),
]
_SAFETENSORS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
WEIGHTS_PATH = "/update_weights_from_tensor"
"""Route whose body may be as large as all weights."""

_GROUP = {"master_address": "127.0.0.1", "master_port": 29600, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
_TENSORS = {"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[128256, 4096]]}


def make_router(state: AppState) -> APIRouter:
    """Create the routes; ``state.client`` is available once the app runs."""
    router = APIRouter(tags=["native"], responses=error_responses("/generate"))
    _add_update_routes(router, state)
    _add_group_routes(router, state)
    _add_digest_and_memory_routes(router, state)
    _add_pause_routes(router, state)
    return router


def _add_update_routes(router: APIRouter, state: AppState) -> None:
    @router.post(
        "/update_weights_from_disk",
        openapi_extra=openapi_body(WeightsBody, {"model_path": "/models/step-100"}, WeightsAnswer),
    )
    async def update_weights_from_disk(request: Request) -> Response:
        """Load the weights of a checkpoint on every rank; a mismatching checkpoint gets 400 and changes nothing."""
        body = WeightsBody.parse(await read_json(request))
        return await _update(state, body.model_path, body.weight_version, partial=False)

    @router.post(WEIGHTS_PATH, openapi_extra=_SAFETENSORS | openapi_answer(WeightsAnswer))
    async def update_weights_from_tensor(request: Request, weight_version: WeightVersion = None) -> Response:
        """Replace some or all weights with those in the body, a safetensors file with Hugging Face names."""
        with TemporaryDirectory(prefix="tapscope-weights-") as folder:
            await save_body(request, Path(folder) / "model.safetensors")
            with _errors_name_the_body(folder):
                return await _update(state, folder, weight_version, partial=True)


def _add_group_routes(router: APIRouter, state: AppState) -> None:
    @router.post("/init_weights_update_group", openapi_extra=openapi_body(InitGroupBody, _GROUP))
    async def init_weights_update_group(request: Request) -> Response:
        """Join a trainer's process group on every rank; respond once all `world_size` ranks have joined."""
        body = InitGroupBody.parse(await read_json(request))
        group = {"address": body.master_address, "port": body.master_port, "group": body.group_name}
        group |= {"rank_offset": body.rank_offset, "world_size": body.world_size, "backend": body.backend}
        async with state.updating:
            await state.client.call_all("init_weights_update_group", **group)
        return JSONResponse({"success": True, "message": f"joined {body.group_name}"})

    @router.post("/destroy_weights_update_group", openapi_extra=openapi_body(DestroyGroupBody, {}, required=False))
    async def destroy_weights_update_group(request: Request) -> Response:
        """Leave a trainer's process group."""
        body = DestroyGroupBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            await state.client.call_all("destroy_weights_update_group", group=body.group_name)
        return JSONResponse({"success": True, "message": f"left {body.group_name}"})

    @router.post(
        "/update_weights_from_distributed", openapi_extra=openapi_body(DistributedWeightsBody, _TENSORS, WeightsAnswer)
    )
    async def update_weights_from_distributed(request: Request) -> Response:
        """Replace weights with the tensors that the trainer broadcasts in this order; a mismatch changes nothing."""
        body = DistributedWeightsBody.parse(await read_json(request))
        async with state.updating:
            answer = await state.client.update_received_weights(
                names=body.names, dtypes=body.dtypes, shapes=body.shapes, group=body.group_name
            )
            state.weight_version = body.weight_version or state.weight_version
        return JSONResponse({"success": True, "weight_version": state.weight_version} | answer)


def _add_digest_and_memory_routes(router: APIRouter, state: AppState) -> None:
    @router.post("/weights_digest", openapi_extra=openapi_body(DigestBody, {}, DigestAnswer, required=False))
    async def weights_digest(request: Request) -> Response:
        """Return the digest of every weight, summed over ranks; `names` selects the caller's naming scheme."""
        body = DigestBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            first, *others = await state.client.call_all("weights_digest", names=body.names)
        different = [number for number, digests in enumerate(others, 1) if digests != first]
        if different:
            raise LiveError(f"the DP replicas 0 and {different[0]} have different weights")
        return JSONResponse({"weight_version": state.weight_version, "weights": first})

    @router.post("/release_memory_occupation", openapi_extra=openapi_body(MemoryBody, {}, MemoryAnswer, required=False))
    async def release_memory_occupation(request: Request) -> Response:
        """Release the memory of `tags` (default: all); requests get 503 until the memory is resumed."""
        body = MemoryBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            answer = await state.client.release_memory(body.tags)
        return JSONResponse({"success": True} | answer)

    @router.post("/resume_memory_occupation", openapi_extra=openapi_body(MemoryBody, {}, MemoryAnswer, required=False))
    async def resume_memory_occupation(request: Request) -> Response:
        """Allocate the memory of `tags` (default: all) again; weights keep their values, the KV cache is empty."""
        body = MemoryBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            first, *_ = await state.client.call_all("resume_memory", tags=body.tags)
        return JSONResponse({"success": True} | first)


def _add_pause_routes(router: APIRouter, state: AppState) -> None:
    @router.post(
        "/pause_generation", openapi_extra=openapi_body(PauseBody, {"mode": "retract"}, PauseAnswer, required=False)
    )
    async def pause_generation(request: Request) -> Response:
        """Pause generation on every replica; `num_live` requests and new ones wait until generation continues."""
        body = PauseBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            if body.mode == "abort":  # includes requests that wait for their grammar outside of the engine
                state.client.abort(None)
            answers = await state.client.call_all("pause_generation", mode=body.mode)
        return _with_num_live(answers, "Generation paused successfully.")

    @router.post("/continue_generation", openapi_extra=openapi_body(ContinueBody, {}, PauseAnswer, required=False))
    async def continue_generation(request: Request) -> Response:
        """Resume generation after a pause; 503 while the memory of the weights or the KV cache is released."""
        ContinueBody.parse(await read_json(request, if_empty={}))
        async with state.updating:
            answers = await state.client.call_all("continue_generation")
        return _with_num_live(answers, "Generation continued successfully.")


def _with_num_live(answers: list[dict[str, Any]], message: str) -> JSONResponse:
    """Create SGLang's response, extended by the number of live requests of all replicas."""
    num_live = sum(answer["num_live"] for answer in answers)
    return JSONResponse({"status": "ok", "message": message, "num_live": num_live})


@contextmanager
def _errors_name_the_body(folder: str) -> Iterator[None]:
    """Context manager: replace the temporary file's path in error messages with "the body"."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        for path in (str(Path(folder) / "model.safetensors"), folder):
            text = text.replace(path, "the body")
        raise CheckpointError(text) from None


async def _update(state: AppState, folder: str, version: str | None, *, partial: bool) -> JSONResponse:
    async with state.updating:
        answer = await state.client.update_weights(folder, partial=partial)
        state.weight_version = version or state.weight_version
    return JSONResponse({"success": True, "weight_version": state.weight_version} | answer)
