"""Mount: the control routes of a run in a host's own FastAPI app."""

from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.core.errors import RecorderError, UnreachableError
from tapscope.dumper.control.access_guard import Guard
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.pipeline.recorder_process import find
from tapscope.dumper.transport.network import Endpoint

if TYPE_CHECKING:
    from fastapi import APIRouter


def control_client(run: Path | str) -> ControlClient:
    """Asks the recorder that writes ``run`` now; raises RecorderError when there is none."""
    return ControlClient(Endpoint.of(find(Path(run))))


def control_router(run: Path | str, guard: Guard | None = None, *, metrics: bool = True) -> "APIRouter":
    """The ``/dumper`` routes and ``/metrics`` for ``app.include_router``; the recorder is looked up at every request.

    ``guard`` checks every request: ``Guard("token")`` where other hosts can reach the app; the default only keeps web
    pages out. ``metrics`` False leaves ``/metrics`` to a host that has one.
    """
    from tapscope.dumper.control.control_app import make_router

    def client() -> ControlClient:
        try:
            return control_client(run)
        except RecorderError as error:
            raise UnreachableError(str(error)) from None

    return make_router(client, guard, metrics=metrics)
