"""EngineThread: one background thread that owns an LLM, so that a server's requests join the running batch."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from tapscope.engine.llm import LLM
from tapscope.engine.request import Generation
from tapscope.errors import RankLostError, TapscopeError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs steps while requests are live, and everything else between two steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: dict[str, Future[Generation]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self.failure: BaseException | None = None
        """Why the engine can compute no more; None while it can."""
        self._thread = threading.Thread(target=self._run, name="tapscope-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way; live requests fail. The LLM stays open."""
        with self._lock:
            self._stopped = True
        self._commands.put(lambda: None)
        self._thread.join()

    def call(self, function: Callable[[LLM], T]) -> "Future[T]":
        """Have ``function`` called on the LLM between two steps; the future has its result or error."""
        future: Future[T] = _running_future()

        def command() -> None:
            _settle(future, lambda: function(self._llm))

        with self._lock:
            if self._stopped:
                future.set_exception(self._why_stopped())
            else:
                self._commands.put(command)
        return future

    def submit(self, prompt: Any, options: dict[str, Any]) -> "Future[tuple[str, Future[Generation]]]":
        """Queue a request by :meth:`LLM.submit`; gives its id, and a future of its Generation."""

        def enter(llm: LLM) -> tuple[str, Future[Generation]]:
            name = llm.submit(prompt, **options)
            self._waiting[name] = _running_future()
            return name, self._waiting[name]

        return self.call(enter)

    def abort(self, request_id: str) -> None:
        """Drop a request if it is still live; its future then has what was generated so far."""

        def leave(llm: LLM) -> None:
            generation = llm.abort(request_id)
            if generation is not None:
                self._waiting.pop(request_id).set_result(generation)

        self.call(leave)

    def _run(self) -> None:
        while not self._stopped:
            self._run_commands()
            try:
                for generation in self._llm.step():
                    self._waiting.pop(generation.request).set_result(generation)
            except Exception as error:  # noqa: BLE001  (it is delivered to every live request)
                _log.error("a step failed; its requests are answered with the error", exc_info=True)
                known = isinstance(error, TapscopeError)
                self._fail_all(error if known else TapscopeError(f"a step failed: {error!r}"))
                if isinstance(error, RankLostError):
                    with self._lock:
                        self.failure, self._stopped = error, True
        self._run_commands()  # those that were accepted before the stop
        self._fail_all(self._why_stopped())

    def _run_commands(self) -> None:
        """Everything that is queued; waits for a command while the engine has nothing else to do."""
        block = not self._llm.has_work and not self._stopped
        while block or not self._commands.empty():
            self._commands.get()()
            block = False

    def _fail_all(self, error: BaseException) -> None:
        for name, future in self._waiting.items():
            self._llm.abort(name)
            future.set_exception(error)
        self._waiting.clear()

    def _why_stopped(self) -> BaseException:
        return self.failure or RankLostError("the engine has been stopped and takes no more requests")


def _running_future() -> "Future[Any]":
    """A future that its waiter cannot cancel, so that setting its result never fails."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: "Future[T]", function: Callable[[], T]) -> None:
    try:
        result = function()
    except Exception as error:  # noqa: BLE001  (it belongs to whoever awaits the future)
        future.set_exception(error)
    else:
        future.set_result(result)
