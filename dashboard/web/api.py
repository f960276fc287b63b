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
    return Response(to_json(view), media_type="application/json")
