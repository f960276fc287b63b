"""WaitingQueue: requests that wait to run, in an order that is fair among their parents."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from tapscope.engine.requests.request import Request

_urgency = attrgetter("urgency")


class WaitingQueue:
    """One line for each parent and priority; only the head of a line competes with others.

    When a head is admitted, the next of its line enters the competition as if it arrived now, behind every parent that
    waits already (round-robin). So one request with many generations delays another by one admission per turn.
    """

    def __init__(self, ageing_steps: int) -> None:
        """``ageing_steps``: steps of waiting that make up for one level of priority."""
        self._ageing_steps = ageing_steps
        self._lines: dict[tuple[str, int], deque[Request]] = {}
        """Requests never admitted, in order of arrival."""
        self._ready: list[Request] = []
        """Heads of lines and preempted requests, most urgent first."""
        self._num_behind = 0
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._ready) + self._num_behind

    def __iter__(self) -> Iterator[Request]:
        """Those that compete, most urgent first, then the others, line by line."""
        yield from self._ready
        for line in self._lines.values():
            yield from islice(line, 1, None)

    @property
    def ready(self) -> list[Request]:
        """Those that compete, most urgent first; changes with each call below."""
        return self._ready

    def add(self, request: Request, step: int) -> None:
        """A new request arrives at ``step``."""
        line = self._lines.setdefault(_line_of(request), deque())
        line.append(request)
        if len(line) == 1:
            self._compete(request, step)
        else:
            self._num_behind += 1

    def put_back(self, request: Request) -> None:
        """A request that :meth:`admit` took waits again, at its old urgency."""
        insort(self._ready, request, key=_urgency)

    def admit(self, request: Request, step: int) -> None:
        """Take out a request that competes; its line's next one competes from ``step`` on."""
        self._ready.remove(request)
        if (successor := self._leave_line(request)) is not None:
            self._compete(successor, step)

    def drop(self, request: Request) -> None:
        """Take out a request that will not run; behind a head, the next one inherits its place."""
        if request not in self._ready:
            self._lines[_line_of(request)].remove(request)
            self._num_behind -= 1
            return
        self._ready.remove(request)
        if (successor := self._leave_line(request)) is not None:
            successor.urgency = request.urgency
            self.put_back(successor)

    def _compete(self, request: Request, step: int) -> None:
        request.urgency = (step - request.priority * self._ageing_steps, self._num_turns)
        self._num_turns += 1
        self.put_back(request)

    def _leave_line(self, request: Request) -> Request | None:
        """Remove the head of a line and return the next one; None for a preempted request, and at the line's end."""
        line = self._lines.get(_line_of(request))
        if line is None or line[0] is not request:
            return None
        line.popleft()
        if not line:
            del self._lines[_line_of(request)]
            return None
        self._num_behind -= 1
        return line[0]


def _line_of(request: Request) -> tuple[str, int]:
    return request.parent or request.id, request.priority
