"""Helpers of all JSON routes: bounded query parameters, and responses from views of the model."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response

from tapscope.dashboard.model.schema import to_json

Rows = Annotated[str, Query(pattern=r"^(\d{1,9}(\.\d{1,9}){0,50})?$")]
"""Row indices of successive heat-map levels, e.g. ``3.1``."""
Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=2000)]


def json_response(view: Any) -> Response:
    """Encode a view as a JSON response, with unsafe characters escaped."""
    return json_of(to_json(view))


def json_of(text: bytes) -> Response:
    """Return a response for a view that is already JSON."""
    return Response(text, media_type="application/json")


def spanned(first: int | None, last: int | None) -> tuple[int, int] | None:
    """Return the inclusive range of steps from ``first`` to ``last``, by default ``first`` only; None for all steps."""
    return None if first is None else (first, first if last is None else last)


def row_numbers(rows: str) -> tuple[int, ...]:
    """Parse a :data:`Rows` parameter."""
    return tuple(map(int, rows.split("."))) if rows else ()
