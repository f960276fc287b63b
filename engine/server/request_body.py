"""Body: what a request carries, as JSON and as a checked model."""

import asyncio
import reprlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pydantic_core
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect

from tapscope.core.errors import LiveError, UsageError

M = TypeVar("M", bound=BaseModel)

_REPR = reprlib.Repr()
"""As :func:`repr`, without writing out a list of a million numbers of which 60 characters are shown."""
_REPR.maxlist = _REPR.maxdict = _REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


async def read_json(request: Request) -> Any:
    """The body, decoded; raises UsageError when it is no JSON. The door has bounded its length."""
    try:
        content = await request.body()
    except ClientDisconnect:
        raise UsageError("the client closed the connection") from None  # nobody reads it
    try:
        return pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise UsageError(f"the body is no JSON: {error}") from None


async def spooled(request: Request, path: Path) -> None:
    """Write the body, a safetensors file, to ``path`` as it comes, never holding more than a piece.

    Raises UsageError for one without a byte of a tensor, LiveError where there is no room.
    """
    num_bytes = 0
    try:
        with path.open("wb") as file:
            async for piece in request.stream():
                num_bytes += len(piece)
                await asyncio.to_thread(file.write, piece)
    except ClientDisconnect:
        raise UsageError("the client closed the connection") from None
    except OSError as error:
        raise LiveError(f"the body cannot be kept in {path.parent}: {error}; set TMPDIR to a place with room") from None
    if not num_bytes:
        raise UsageError("the body is empty; send a safetensors file")
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") + 8 == num_bytes and file.read(1) == b"{":
            raise UsageError("the body holds no tensors: nothing but a header")


def json_response(content: Any) -> Response:
    """An answer that may be large: msgspec writes a million numbers in a tenth of the time that :mod:`json` takes."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def checked(model: type[M], body: Any) -> M:
    """``body`` as ``model``; raises UsageError with one sentence that says what to write instead.

    A field that the model lacks is refused unless it asks for nothing (null or false): it would change the answer if
    it were understood.
    """
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    for name, value in body.items():
        if name not in model.model_fields and value is not None and value is not False:
            raise UsageError(f"field {name[:100]!r} is not supported; supported: {', '.join(model.model_fields)}")
    given = {name: value for name, value in body.items() if name in model.model_fields and value is not None}
    try:
        return model.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ")  # pydantic's word for a rule of ours
        raise UsageError(f"{where!r}: {text}" if where else text) from None


def rule(text: str) -> WrapValidator:
    """For ``Annotated``: whatever is wrong with the field, say this."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            shown = _REPR.repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise PydanticCustomError("rule", "{shown} given; it {text}", {"shown": shown, "text": text}) from None

    return WrapValidator(check)


def described(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` for a route that reads its body by :func:`checked`."""
    content = {"application/json": {"schema": model.model_json_schema(), "example": example}}
    return {"requestBody": {"required": True, "content": content}}
