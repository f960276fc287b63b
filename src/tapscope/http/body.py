"""Request bodies: a length limit, and strict JSON."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive

MAX_DEPTH = 16
"""Maximum nesting depth of a configuration body."""
_MAX_DISCARDED = 1 << 30  # bytes to read and discard from a too long body, so that its sender receives the response


class BodyTooLongError(Exception):
    """Raised while reading a body that exceeds the length limit."""


def announced_length(headers: Mapping[str, str]) -> int:
    """Return ``Content-Length``: 0 if it is missing, and a value above any limit if it is not a number."""
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 1 << 64


class LimitedReceive:
    """An ASGI ``receive`` that raises BodyTooLongError once more than ``limit`` bytes have arrived."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit

    async def __call__(self) -> Message:
        """Return the next ASGI message."""
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise BodyTooLongError
        return message


async def discard_body(receive: Receive) -> None:
    """Read and discard the rest of the body, up to 1 GiB.

    A client that is disconnected while it still sends would not receive the response.
    """
    num_bytes = 0
    while num_bytes < _MAX_DISCARDED:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def decode_json(content: bytes) -> Any:
    """Decode a JSON body strictly; raises ValueError for NaN, numbers beyond a double's range and invalid Unicode."""
    try:
        return msgspec.json.decode(content)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"the body is not valid JSON: {error}") from None


def decode_object(content: bytes) -> dict[str, Any]:
    """Decode the JSON object of a short body; an empty body yields an empty object.

    Raises ValueError, also for duplicate keys and for nesting deeper than ``MAX_DEPTH``.
    """
    if not content.strip():
        return {}
    body = decode_json(content)
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    if _is_deep(body):
        raise ValueError("the body is nested too deeply")
    try:
        json.loads(content, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"the body is not valid JSON: {error}") from None
    return body


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"member {next(n for n in names if names.count(n) > 1)!r} is given twice")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = (each for each in level if isinstance(each, dict | list))
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return bool(level)
