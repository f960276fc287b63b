"""HeldThreads: workers of a screen that return when a test allows it, in any order."""

from concurrent.futures import Future
from contextvars import copy_context
from functools import partial

from tapscope.dashboard.background import DaemonThreads


class HeldThreads:
    """Replaces the thread pool of screens: holds each worker until the test lets it return."""

    def __init__(self, monkeypatch):
        self._begun = []
        monkeypatch.setattr(DaemonThreads, "submit", self._submit)

    def _submit(self, call, *args):
        name, future = args[0].func.__name__, Future()
        future.set_running_or_notify_cancel()
        self._begun.append((name, partial(copy_context().run, call, *args), future))
        return future

    def count(self, name):
        """Return the number of workers with this name that have started but not returned."""
        return sum(each[0] == name for each in self._begun)

    def answer(self, name, which=0):
        """Let a worker with this name return: the ``which``-th in start order if there are several."""
        found = [each for each in self._begun if each[0] == name][which]
        self._begun.remove(found)
        found[2].set_result(found[1]())

    def answer_all(self, *, but=""):
        """Let all workers return in start order, except those with one name; return their number."""
        names = [each[0] for each in self._begun if each[0] != but]
        for name in names:
            self.answer(name)
        return len(names)
