"""The control routes of a run, for a host's own FastAPI app."""

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
    """A client of the recorder that writes ``run`` now; raises RecorderError when there is none."""
    return ControlClient(Endpoint.of(find(Path(run))))


def control_router(run: Path | str, guard: Guard | None = None, *, metrics: bool = True) -> "APIRouter":
    """The ``/dumper`` routes and ``/metrics`` for ``app.include_router``. Each request looks up the recorder.

    ``guard`` checks every request: use ``Guard("token")`` when other hosts can reach the app; the default only refuses
    cross-origin requests. ``metrics`` False leaves ``/metrics`` to a host that has its own.
    """
    from tapscope.dumper.control.control_app import make_router

    def client() -> ControlClient:
        try:
            return control_client(run)
        except RecorderError as error:
            raise UnreachableError(str(error)) from None

    return make_router(client, guard, metrics=metrics)
