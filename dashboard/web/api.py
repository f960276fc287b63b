"""What all JSON routes share: query parameters with limits, and a view of the model as a response."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response

from tapscope.dashboard.model.schema import to_json

Text = Annotated[str, Query(max_length=500)]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=2000)]


def json_response(view: Any) -> Response:
    """JSON of a view, with every unsafe character escaped."""
    return json_of(to_json(view))


def json_of(text: bytes) -> Response:
    """The same of a view that is JSON already."""
    return Response(text, media_type="application/json")
