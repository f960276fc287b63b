"""RecorderClient: connect a rank to its recorder; values are queued while the recorder starts."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.pipeline import recorder_process
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.pipeline.sender import Sender
from tapscope.run_format.ledger import encode_line, event_line

_log = logging.getLogger("tapscope")
OnMessage = Callable[[Message], Message | None]
_EXIT_PATIENCE_S = 60.0  # longer than the startup and reply timeouts of a recorder together


class RecorderClient:
    """The send queue of a rank and, once the recorder has answered, the sender."""

    def __init__(self, config: DumperConfig) -> None:
        timeout_s = None if config.backpressure == "drop" else config.block_timeout_s
        self.queue = SendQueue(config.queue_bytes, timeout_s, None)
        self.problem: BaseException | None = None
        """Error of :meth:`open_later`, if it failed."""
        self.on_tick: Callable[[], None] = lambda: None
        """Callback, called in the sender's thread at least twice per second."""
        self.on_idle: Callable[[], None] = lambda: None
        """Callback, called in the sender's thread after half a second without activity."""
        self.rank_counters: Callable[[], dict[str, int]] = dict
        """Callback that returns additional counters of this rank for the recorder's state."""
        self._config = config
        self._sender: Sender | None = None
        self._joined: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None
        self._step = -1
        self._capture_steps_left: int | None = None

    def open(
        self, run: Callable[[], Path], join_request: Message, on_message: OnMessage, *, force: bool
    ) -> dict[str, Any]:
        """Find or start the recorder of ``run()`` and send ``join_request``; return the reply's fields and ``run``.

        Raises the errors of ``run()`` and of :func:`tapscope.dumper.pipeline.recorder_process.connect`.
        """
        path = run()
        sender, answer = recorder_process.connect(path, self._config, join_request, on_message, self.queue, force=force)
        sender.rank_counters, sender.on_tick, sender.on_idle = self.rank_counters, self.on_tick, self.on_idle
        sender.step, sender.capture_steps_left = self._step, self._capture_steps_left
        self._sender = sender
        return {"run": str(path)} | answer.fields

    def open_later(self, run: Callable[[], Path], join_request: Message, on_message: OnMessage, *, force: bool) -> None:
        """Run :meth:`open` in a thread; :meth:`take_answer` returns the reply. A failure is logged."""

        def work() -> None:
            try:
                self._joined = self.open(run, join_request, on_message, force=force)
            except BaseException as error:  # noqa: BLE001 - no error of this thread may reach the model
                self.problem = error
                self.queue.abandon(str(error))
                _log.warning("tapscope records nothing: %s", error)

        self._thread = threading.Thread(target=work, name="tapscope-opening", daemon=True)
        self._thread.start()

    def take_answer(self, *, wait: bool = False) -> dict[str, Any] | None:
        """Return the reply to :meth:`open_later` once; None if it is pending or already taken, or if opening failed.

        ``wait`` waits for a pending reply.
        """
        thread = self._thread
        if thread is None or (thread.is_alive() and not wait):
            return None
        thread.join(_EXIT_PATIENCE_S)
        answer, self._joined = self._joined, None
        if not thread.is_alive():
            self._thread = None
        return answer

    def put_line(self, line: dict[str, Any]) -> None:
        """Queue a line that is not a record."""
        self.queue.append(encode_line(line))

    def put_event(self, kind: str, **fields: Any) -> None:
        """Queue an ``event`` line."""
        self.put_line(event_line(kind, **fields))

    def put_message(self, message: Message) -> None:
        """Queue a message behind all items queued before."""
        self.queue.append(message)

    def set_position(self, *, step: int | None = None, capture_steps_left: int | None = None) -> None:
        """Set the position sent with every batch: the rank's step, and the remaining steps of a capture."""
        self._capture_steps_left = capture_steps_left
        if step is not None:
            self._step = step
        if self._sender is not None:
            self._sender.step, self._sender.capture_steps_left = self._step, capture_steps_left

    def close(self) -> str | None:
        """Send all queued items, then close; return None, or the reason why some were not acknowledged."""
        self.take_answer(wait=True)
        sender = self._sender
        if sender is None:
            return self.queue.dead or "the recorder did not start in time"
        return sender.close(Message("close", {"current_step": self._step, "load": sender.load()}))
