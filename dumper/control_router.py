"""HTTP control routes of a run, to mount in a host's own FastAPI app."""

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
    """Return a client of the recorder that is writing ``run``; raises RecorderError if no recorder is."""
    return ControlClient(Endpoint.of(find(Path(run))))


def control_router(run: Path | str, guard: Guard | None = None, *, metrics: bool = True) -> "APIRouter":
    """Return a router with the ``/dumper`` routes and ``/metrics``, for ``app.include_router``.

    Each request looks up the recorder of ``run``. ``guard`` checks every request: use ``Guard("token")`` when other
    hosts can reach the app; the default only rejects cross-origin requests. Pass ``metrics=False`` if the host serves
    its own ``/metrics``.
    """
    from tapscope.dumper.control.control_app import make_router

    def client() -> ControlClient:
        try:
            return control_client(run)
        except RecorderError as error:
            raise UnreachableError(str(error)) from None

    return make_router(client, guard, metrics=metrics)
