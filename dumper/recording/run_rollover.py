"""RunRollover: the next run of a rank that continues in one by itself."""

import threading
from pathlib import Path
from typing import Any

from tapscope.core.errors import RecorderError, RunExistsError
from tapscope.core.wire import Message
from tapscope.dumper.pipeline.recorder_client import RecorderClient

_TIMEOUT_S = 10.0


class RunRollover:
    """Names the next run, and waits for the recorder's answer when a rank continues in it by itself."""

    def __init__(self) -> None:
        self._first: Path | None = None
        self._number = 1
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()

    def next(self, run: Path, name: str | None) -> Path:
        """The run after ``run``: called ``name``, or as the first one with ``-2``, ``-3``, and so on."""
        self._first = first = self._first or run
        self._number += 1
        return first.with_name(name or f"{first.name}-{self._number}")

    def continue_from(self, other: "RunRollover") -> None:
        """Continue the numbering of ``other``."""
        self._first, self._number = other._first, other._number

    def request(self, client: RecorderClient, request: Message) -> None:
        """Ask the recorder to open a run; :meth:`wait` for its answer."""
        self._answered.clear()
        client.put_message(request)

    def handle_message(self, message: Message) -> bool:
        """The recorder's answer, in the sender's thread; False for any other message."""
        if message.kind != "reopened":
            return False
        self._answer = message.fields
        self._answered.set()
        return True

    def wait(self, client: RecorderClient, run: Path) -> None:
        """Wait until ``run`` is open; raises RunExistsError when it exists, RecorderError when the
        recorder does not respond."""
        if not self._answered.wait(_TIMEOUT_S):
            reason = client.queue.dead or "it did not answer"
            raise RecorderError(f"the recorder has not opened {run} within {_TIMEOUT_S:g} s: {reason}")
        if (problem := self._answer.get("problem")) is not None:
            raise RunExistsError(str(problem))
