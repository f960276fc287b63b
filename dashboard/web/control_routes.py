"""Routes that switch capture of a live job, for `tapscope web --control`; refused to read-only sessions."""

from typing import Annotated

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tapscope.core.errors import DataError
from tapscope.core.formatting import printable
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.web.api import json_response
from tapscope.dashboard.web.login import Login
from tapscope.http.access import RequestRefused

_Text = Annotated[str, Body(embed=True, max_length=4000)]
_Seconds = Annotated[int, Body(embed=True, ge=60, le=30 * 24 * 3600)]


def add_control_routes(app: FastAPI, control: CaptureControl | None, login: Login) -> None:
    """Add ``GET`` and ``POST /api/control``, and ``POST /api/links``."""

    def refused(request: Request) -> Response | None:
        try:
            login.check_full(request.headers)
        except RequestRefused as refusal:
            return JSONResponse({"error": refusal.error}, refusal.status)
        return None

    @app.get("/api/control")
    def get_control(request: Request) -> Response:
        if (response := refused(request)) is not None:
            return response
        if control is None:
            raise DataError("no control: start tapscope web with --control [HOST:]PORT or --control RUN")
        return json_response(control.state())

    @app.post("/api/control")
    def post_control(request: Request, command: _Text) -> Response:
        if (response := refused(request)) is not None:
            return response
        if control is None:
            raise DataError("no control: start tapscope web with --control [HOST:]PORT or --control RUN")
        return JSONResponse({"text": printable(control.command(command))})

    @app.post("/api/links")
    def post_link(request: Request, seconds: _Seconds) -> Response:
        if (response := refused(request)) is not None:
            return response
        return JSONResponse({"path": f"/login?token={login.add_read_only_link(seconds)}"})
