"""Request and response bodies: JSON, and uploaded weights as files."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from tapscope.core.errors import LiveError, UsageError
from tapscope.http.body import decode_json


async def read_json(request: Request, *, if_empty: Any = None) -> Any:
    """Read and decode the JSON body; ``if_empty``, if given, is the result for an empty body.

    BodyLimitMiddleware bounds the length of the body. Raises UsageError if the body is not JSON.
    """
    try:
        content = await request.body()
    except ClientDisconnect:
        raise UsageError("the client closed the connection") from None
    if not content and if_empty is not None:
        return if_empty
    try:
        return decode_json(content)
    except ValueError as error:
        raise UsageError(str(error)) from None


async def save_body(request: Request, path: Path) -> None:
    """Stream the body, a safetensors file, to ``path``.

    Raises UsageError if the body contains no tensors, LiveError if the file cannot be written.
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
        rule = "set TMPDIR to a directory with free space"
        raise LiveError(f"the body cannot be written to {path.parent}: {error}; {rule}") from None
    if not num_bytes:
        raise UsageError("the body is empty; send a safetensors file")
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") + 8 == num_bytes and file.read(1) == b"{":
            raise UsageError("the body has no tensors, only a header")


def json_response(content: Any) -> Response:
    """Create a JSON response with msgspec, which encodes large responses ten times as fast as :mod:`json`."""
    return Response(msgspec.json.encode(content), media_type="application/json")
