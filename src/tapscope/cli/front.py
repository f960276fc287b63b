"""The HTTP process of `tapscope serve`: the engine's routes and the dumper's, side by side. Not called by hand."""

import asyncio
from pathlib import Path
from typing import Any

from tapscope.dumper.control import ControlClient, make_router
from tapscope.dumper.guard import Guard, token_of
from tapscope.dumper.metrics import exposition
from tapscope.dumper.mount import client_of
from tapscope.engine.server.front import Extras, front_main
from tapscope.errors import RecorderError, TapscopeError, UnreachableError


class _Recorder:
    """The recorder of the run that the engine's process opens; it stays the same when the run is changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._client: ControlClient | None = None

    def __call__(self) -> ControlClient:
        if self._client is None:
            try:
                self._client = client_of(self._run)
            except RecorderError as error:
                raise UnreachableError(str(error)) from None
        return self._client

    def metrics(self) -> bytes:
        """The recorder's metrics; nothing when it cannot be asked."""
        try:
            status, content = self().call("state")
        except TapscopeError:
            return b""
        return exposition(content) if status == 200 else b""


def extras(given: dict[str, Any]) -> Extras:
    """The dumper's routes and metrics, for the run that serve named."""
    recorder = _Recorder(Path(given["run"]))
    guard = Guard.of(given["host"], token_of(None))

    async def more_metrics() -> bytes:
        return await asyncio.to_thread(recorder.metrics)

    return Extras((make_router(recorder, guard, metrics=False),), more_metrics)


if __name__ == "__main__":
    raise SystemExit(front_main(extras))
