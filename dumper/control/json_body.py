"""Bodies of control requests: one short JSON object."""

from typing import TYPE_CHECKING, Any

from tapscope.http.access import RequestRefused
from tapscope.http.body import BodyTooLongError, LimitedReceive, announced_length, decode_object

if TYPE_CHECKING:
    from fastapi import Request

MAX_BYTES = 1024 * 1024
"""A longer body is refused with a 413 before it is read into memory."""


async def read_object(request: "Request") -> dict[str, Any]:
    """The JSON object in the body, an empty one where there is no body; raises RequestRefused."""
    from fastapi import Request

    try:
        if announced_length(request.headers) > MAX_BYTES:
            raise BodyTooLongError
        content = await Request(request.scope, LimitedReceive(request.receive, MAX_BYTES)).body()
        return decode_object(content)
    except BodyTooLongError:
        error = f"the body is longer than {MAX_BYTES} bytes; a configuration is a few lines"
        raise RequestRefused(413, error) from None
    except ValueError as error:
        raise RequestRefused(400, str(error)) from None
