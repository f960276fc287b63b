"""Routes: the paths of the control API, with their request bodies and responses."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from tapscope.dumper.control import schemas
from tapscope.http.access import RequestRefused
from tapscope.http.body import BodyTooLongError, LimitedReceive, announced_length, decode_object, discard_body

MAX_BODY_BYTES = 1024 * 1024
"""Maximum body length; a longer body is rejected with status 413 before it is read into memory."""
Ask = Callable[[str, dict[str, Any] | None], Awaitable[tuple[int, dict[str, Any]]]]

_ERRORS = {
    400: (
        "The request is invalid, or a rank refuses it.",
        "keep='some': must be one of off, stats, sketch, full",
    ),
    401: ("The token is missing or wrong.", "this needs a token; send 'Authorization: Bearer TOKEN'"),
    403: (
        "The request comes from a web page of another origin.",
        "cross-origin request from 'http://a.example' refused; use a program such as curl",
    ),
    409: ("Another change is in progress, or no rank is connected.", "no rank is connected; start the model first"),
    413: ("The body is longer than 1 MiB.", "the body is longer than 1048576 bytes"),
    501: ("A package is missing.", "metrics need prometheus-client; install tapscope[capture]"),
    503: ("The recorder has ended.", "the recorder has ended; its run is closed (see: tapscope info RUN)"),
    504: ("A rank did not respond, or died; nothing changed.", "rank 1 did not answer within 5 s; nothing was changed"),
}
_READING = (401, 403, 503)
_GLOB = {
    "name": "glob",
    "in": "query",
    "schema": {"type": "string"},
    "description": "Only sites that match.",
    "example": "layers.3.*:out",
}


def add_routes(router: APIRouter, ask: Ask, *, metrics: bool) -> None:
    """Add all routes to ``router``; each forwards its request to the recorder through ``ask``."""
    _add_read_routes(router, ask)
    _add_change_routes(router, ask)
    if metrics:
        _add_metrics(router, ask)


def _add_read_routes(router: APIRouter, ask: Ask) -> None:
    @router.get(
        "/dumper/state", summary="Run, epoch, configuration, every rank, and hints", **_responses(schemas.StateAnswer)
    )
    async def state(request: Request) -> JSONResponse:
        _query(request)
        return _json(*await ask("state", None))

    @router.get(
        "/dumper/sites",
        summary="Modules and ports that can be tapped",
        **_responses(schemas.SitesAnswer, 400, *_READING),
        openapi_extra={"parameters": [_GLOB]},
    )
    async def sites(request: Request) -> JSONResponse:
        _query(request, "glob")
        return _json(*await ask("sites", {"glob": request.query_params.get("glob")}))

    @router.get(
        "/dumper/verdict",
        summary="The live comparison with the reference run (setting against)",
        **_responses(schemas.VerdictAnswer, 400, *_READING),
    )
    async def verdict(request: Request) -> JSONResponse:
        _query(request)
        return _json(*await ask("verdict", None))

    @router.post(
        "/dumper/get_state",
        summary="SGLang's format: a list, one object per rank",
        **_responses(list[schemas.RankDump]),
    )
    async def get_state(request: Request) -> JSONResponse:
        status, content = await ask("get_state", await _body(request))
        return _json(status, content["ranks"] if status == 200 else content)


def _add_change_routes(router: APIRouter, ask: Ask) -> None:
    changing = (400, 401, 403, 409, 413, 503, 504)

    @router.post(
        "/dumper/configure",
        summary="Change settings, on all ranks at the same step",
        **_responses(schemas.ChangeAnswer, *changing),
        **_request_body(schemas.ConfigureBody, {"enabled": True, "keep": "stats", "rules": ["layers.3.*:out=full"]}),
    )
    async def configure(request: Request) -> JSONResponse:
        return _json(*await ask("configure", await _body(request)))

    @router.post(
        "/dumper/capture",
        summary="Record the next steps in full, then restore the settings; or write past steps of the flight recorder",
        **_responses(schemas.ChangeAnswer | schemas.ReleaseAnswer, *changing),
        **_request_body(schemas.CaptureBody, {"steps": 4}),
    )
    async def capture(request: Request) -> JSONResponse:
        return _json(*await ask("capture", await _body(request)))

    @router.post(
        "/dumper/reset",
        summary="Close the run and open a new one next to it (for a served model also when the recorder was lost)",
        **_responses(schemas.ResetAnswer, *changing),
        **_request_body(schemas.ResetBody, {"run": "second"}),
    )
    async def reset(request: Request) -> JSONResponse:
        return _json(*await ask("reset", await _body(request)))


def _add_metrics(router: APIRouter, ask: Ask) -> None:
    text: dict[str, Any] = {"content": {"text/plain": {"example": 'tapscope_step{rank="0"} 17.0'}}}

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: text, **_errors(*_READING, 501)},
    )
    async def metrics(request: Request) -> Response:
        _query(request)
        try:
            from tapscope.dumper.control.metrics import exposition
            from tapscope.http.prometheus import content_type
        except ImportError:
            raise RequestRefused(501, "metrics need prometheus-client; install tapscope[capture]") from None
        status, content = await ask("state", None)
        if status != 200:
            return _json(status, content)
        accept = request.headers.get("accept", "")
        return Response(exposition(content, accept), headers={"Content-Type": content_type(accept)})


def _json(status: int, content: Any) -> JSONResponse:
    return JSONResponse(content, status)


async def _body(request: Request) -> dict[str, Any]:
    _query(request)
    return await _read_object(request)


def _query(request: Request, *known: str) -> None:
    if unknown := set(request.query_params) - set(known):
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise RequestRefused(400, f"{min(unknown)[:100]!r} is not a query parameter of {request.url.path}; {takes}")


def _responses(model: Any, *statuses: int) -> dict[str, Any]:
    return {"responses": {200: {"model": model}, **_errors(*(statuses or _READING))}, "response_model": None}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {
            "model": schemas.ErrorAnswer,
            "description": _ERRORS[status][0],
            "content": {"application/json": {"example": {"error": _ERRORS[status][1]}}},
        }
        for status in statuses
    }


def _request_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema(), "example": example}}
    return {"openapi_extra": {"requestBody": {"required": False, "content": content}}}


async def _read_object(request: Request) -> dict[str, Any]:
    """Read the body as a JSON object, empty if there is no body; raises RequestRefused."""
    try:
        if announced_length(request.headers) > MAX_BODY_BYTES:
            raise BodyTooLongError
        content = await Request(request.scope, LimitedReceive(request.receive, MAX_BODY_BYTES)).body()
        return decode_object(content)
    except BodyTooLongError:
        await discard_body(request.receive)
        error = f"the body is longer than {MAX_BODY_BYTES} bytes; a configuration is a few lines"
        raise RequestRefused(413, error) from None
    except ValueError as error:
        raise RequestRefused(400, str(error)) from None
