"""WorkerScreen: which answers of its workers a screen still waits for, and which come too late."""

from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable

from textual.screen import Screen
from textual.worker import Worker

from tapscope.dashboard import messages
from tapscope.dashboard.model.permalink import Permalink


class WorkerScreen(Screen[Permalink | None]):
    """A screen that reads and computes in worker threads, which answer with messages in any order."""

    _workers: tuple[Worker[None], ...] = ()
    """Those that have not answered."""
    _rest: TimerHandle | None = None
    """Starts a worker once the cursor has rested."""

    @property
    def settled(self) -> bool:
        """Whether everything asked for has been answered and drawn."""
        return self.is_mounted and not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether a worker has not answered, or is about to start."""
        return self._rest is not None or not all(worker.is_cancelled for worker in self._workers)

    def track(self, worker: Worker[None]) -> None:
        """Wait for the answer of a worker, and no longer for those that it has cancelled."""
        self._workers = (*(each for each in self._workers if not each.is_cancelled), worker)

    def track_after(self, seconds: float, start: Callable[[], Worker[None]]) -> None:
        """Start a worker when the cursor has rested that long; in place of what was to be started then."""

        def start_now() -> None:
            self._rest = None
            self.track(start())

        self.cancel_rest()
        self._rest = self.call_after(seconds, start_now)

    def cancel_rest(self) -> None:
        """Do not start what was to be started when the cursor has rested."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def accept(self, answer: messages.Answer) -> bool:
        """Whether the answer is waited for; from now on its worker no longer is.

        An exclusive worker cancels the others of its group: whatever they still answer is late.
        """
        is_expected = answer.worker in self._workers and not answer.worker.is_cancelled
        self._workers = tuple(each for each in self._workers if each is not answer.worker)
        return is_expected

    def cancel_workers(self) -> None:
        """Wait for no answer: all of them would be about something else."""
        self.cancel_rest()
        for worker in self._workers:
            worker.cancel()
        self._workers = ()

    def call_after(self, seconds: float, call: Callable[[], object]) -> TimerHandle:
        """Call once after a delay. Textual's timers skip a call that is already late when they start."""
        return get_running_loop().call_later(seconds, call)
