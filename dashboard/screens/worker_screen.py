"""Bookkeeping of a screen's workers: pending results, and outdated ones to drop."""

from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable

from textual.screen import Screen
from textual.worker import Worker

from tapscope.dashboard import messages
from tapscope.dashboard.model.permalink import Permalink


class WorkerScreen(Screen[Permalink | None]):
    """Screen that reads and computes in worker threads, which post messages in any order."""

    _workers: tuple[Worker[None], ...] = ()
    """Workers with a pending result."""
    _rest: TimerHandle | None = None
    """Timer that starts a worker once the cursor has rested."""

    @property
    def settled(self) -> bool:
        """Whether all requested results have arrived and been drawn."""
        return self.is_mounted and not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether a worker is pending or about to start."""
        return self._rest is not None or not all(worker.is_cancelled for worker in self._workers)

    def track(self, worker: Worker[None]) -> None:
        """Expect a result from ``worker``; canceled workers are no longer expected to post one."""
        self._workers = (*(each for each in self._workers if not each.is_cancelled), worker)

    def track_after(self, seconds: float, start: Callable[[], Worker[None]]) -> None:
        """Start a worker once the cursor has rested for ``seconds``; replaces an earlier scheduled start."""

        def start_now() -> None:
            self._rest = None
            self.track(start())

        self.cancel_rest()
        self._rest = self.call_after(seconds, start_now)

    def cancel_rest(self) -> None:
        """Cancel the scheduled start of a worker."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def accept(self, answer: messages.Answer) -> bool:
        """Return whether the result is expected, and mark its worker as done.

        An exclusive worker cancels the others of its group, whose results are then outdated.
        """
        is_expected = answer.worker in self._workers and not answer.worker.is_cancelled
        self._workers = tuple(each for each in self._workers if each is not answer.worker)
        return is_expected

    def cancel_workers(self) -> None:
        """Cancel all pending workers, because their results would be outdated."""
        self.cancel_rest()
        for worker in self._workers:
            worker.cancel()
        self._workers = ()

    def call_after(self, seconds: float, call: Callable[[], object]) -> TimerHandle:
        """Call once after a delay. Textual's timers skip a call that is already overdue when they start."""
        return get_running_loop().call_later(seconds, call)
