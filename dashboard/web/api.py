"""What all JSON routes share: query parameters with limits, and a view of the model as a response."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response

from tapscope.dashboard.model.schema import to_json

Rows = Annotated[str, Query(pattern=r"^(\d{1,9}(\.\d{1,9}){0,50})?$")]
"""``3.1``: rows of successive levels of a heat map."""
Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=2000)]


def json_response(view: Any) -> Response:
    """JSON of a view, with every unsafe character escaped."""
    return json_of(to_json(view))


def json_of(text: bytes) -> Response:
    """The same of a view that is JSON already."""
    return Response(text, media_type="application/json")


def spanned(first: int | None, last: int | None) -> tuple[int, int] | None:
    """The steps from ``first`` to ``last``, or ``first`` alone; None for all."""
    return None if first is None else (first, first if last is None else last)


def row_numbers(rows: str) -> tuple[int, ...]:
    """The numbers in a :data:`Rows` parameter."""
    return tuple(map(int, rows.split("."))) if rows else ()
