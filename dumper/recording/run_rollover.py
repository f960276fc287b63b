"""RunRollover: continue in a new run after a reset that this rank requested."""

import threading
from pathlib import Path
from typing import Any

from tapscope.core.errors import RecorderError, RunExistsError
from tapscope.core.wire import Message
from tapscope.dumper.pipeline.recorder_client import RecorderClient

_TIMEOUT_S = 10.0


class RunRollover:
    """Names the next run, requests it from the recorder, and waits for the answer."""

    def __init__(self) -> None:
        self._first: Path | None = None
        self._number = 1
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()

    def next(self, run: Path, name: str | None) -> Path:
        """Return the path of the run after ``run``: ``name``, or the first run's name with ``-2``, ``-3``, ..."""
        self._first = first = self._first or run
        self._number += 1
        return first.with_name(name or f"{first.name}-{self._number}")

    def continue_from(self, other: "RunRollover") -> None:
        """Continue the numbering of ``other``."""
        self._first, self._number = other._first, other._number

    def request(self, client: RecorderClient, request: Message) -> None:
        """Send a ``reopen`` request to the recorder; :meth:`wait` waits for the answer."""
        self._answered.clear()
        client.put_message(request)

    def handle_message(self, message: Message) -> bool:
        """Handle the recorder's ``reopened`` answer in the sender's thread; return False for other messages."""
        if message.kind != "reopened":
            return False
        self._answer = message.fields
        self._answered.set()
        return True

    def wait(self, client: RecorderClient, run: Path) -> None:
        """Wait up to 10 s until the recorder has opened ``run``.

        Raises RunExistsError if the run exists or cannot be created, and RecorderError if the recorder does not answer.
        """
        if not self._answered.wait(_TIMEOUT_S):
            reason = client.queue.dead or "it did not answer"
            raise RecorderError(f"the recorder has not opened {run} within {_TIMEOUT_S:g} s: {reason}")
        if (problem := self._answer.get("problem")) is not None:
            raise RunExistsError(str(problem))
