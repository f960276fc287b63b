"""Entry point of the HTTP process that `tapscope serve` starts: the routes of the engine and of the dumper."""

import asyncio
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError, RecorderError, TapscopeError, UnreachableError
from tapscope.dumper.control.access_guard import Guard, token_of
from tapscope.dumper.control.control_app import ControlClient, make_router
from tapscope.dumper.control.metrics import exposition
from tapscope.dumper.control_router import control_client
from tapscope.dumper.recorder.control_handler import next_run
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.http_server import Extras, http_server_main


class _Recorder:
    """Connection to the recorder of the current run; the object outlives a change of the run."""

    def __init__(self, run: Path, state: AppState) -> None:
        self._first = self._run = run
        self._state = state
        self._client: ControlClient | None = None
        self._reopening = asyncio.Lock()

    def __call__(self) -> ControlClient:
        if self._client is None:
            try:
                self._client = control_client(self._run)
            except RecorderError as error:
                raise UnreachableError(str(error)) from None
        return self._client

    def metrics(self, accept: str) -> bytes:
        """Return the recorder's metrics in the format requested by ``accept``; empty if the recorder does not
        respond."""
        try:
            status, content = self().call("state")
        except TapscopeError:
            return b""
        return exposition(content, accept) if status == 200 else b""

    async def reopen(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """After the recorder has ended, make every rank continue in a new run with a new recorder."""
        if self._reopening.locked():
            return 409, {"error": "another reset is in progress; try again in a second"}
        async with self._reopening:
            try:
                self._state.require_ready()
                self._require_ended()
                run = next_run(self._first, body)
                first, *others = self._state.client.replicas
                answers = [await first.call("reopen", run=str(run))]  # its rank 0 starts the recorder for all replicas
                answers += await asyncio.gather(*(replica.call("reopen", run=str(run)) for replica in others))
            except TapscopeError as error:
                return 400 if isinstance(error, ConfigError) else 503, {"error": str(error)}
            self._run, self._client = run, None
        ranks = {rank: step for answer in answers for rank, step in answer.items()}
        return 200, {"epoch": 0, "run": str(run), "ranks": ranks}

    def _require_ended(self) -> None:
        """Raise UnreachableError if a recorder process still exists but does not respond."""
        try:
            control_client(self._run)
        except RecorderError:
            return
        raise UnreachableError("the recorder process does not respond; is it stopped? Resume or kill it first")


def extras(given: dict[str, Any], state: AppState) -> Extras:
    """Return the dumper's routes and metrics for the run named by `tapscope serve`."""
    recorder = _Recorder(Path(given["run"]), state)
    guard = Guard.of(given["host"], token_of(None))

    async def more_metrics(accept: str) -> bytes:
        return await asyncio.to_thread(recorder.metrics, accept)

    return Extras((make_router(recorder, guard, metrics=False, reopen=recorder.reopen),), more_metrics)


if __name__ == "__main__":
    raise SystemExit(http_server_main(extras))
