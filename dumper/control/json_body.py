"""Body: what a request carries, read with a bound, as one plain JSON object."""

import json
from typing import TYPE_CHECKING, Any, NoReturn

from tapscope.dumper.control.access_guard import Refusal

if TYPE_CHECKING:
    from fastapi import Request

_MAX_DEPTH = 16
MAX_BYTES = 1024 * 1024
"""A longer body is refused with a 413 before it is held in memory."""


async def read_object(request: "Request") -> dict[str, Any]:
    """The JSON object in the body, an empty one where there is no body; raises Refusal."""
    if _announced_bytes(request) > MAX_BYTES:
        raise _too_long()
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BYTES:
            raise _too_long()
    return parse_object(bytes(content))


def parse_object(content: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no number beyond a double, no member twice, no broken text; raises Refusal."""
    if not content.strip():
        return {}
    try:
        body = json.loads(
            content, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair cannot travel on
    except UnicodeError:
        raise Refusal(400, "the body is no JSON: a text in it is no valid Unicode") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if _is_deep(body):
        raise Refusal(400, "the body is nested too deeply")
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    return body


def _announced_bytes(request: "Request") -> int:
    text = request.headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else MAX_BYTES + 1


def _too_long() -> Refusal:
    return Refusal(413, f"the body is longer than {MAX_BYTES} bytes; a configuration is a few lines")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(f"{text} is beyond a double")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the member {next(n for n in names if names.count(n) > 1)!r} comes twice")
    return members


def _is_deep(value: Any) -> bool:
    """Whether anything lies below _MAX_DEPTH containers; some interpreters parse thousands."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)
