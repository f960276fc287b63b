"""WaitingQueue: the waiting requests, ordered fairly among parents."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from tapscope.engine.requests.request import Request

_urgency = attrgetter("urgency")


class WaitingQueue:
    """FIFO queues of waiting requests, one per (parent, priority); only their heads are candidates for admission.

    When a head is admitted, its successor becomes a candidate as if it had just arrived, behind all waiting parents
    (round-robin). A request with many generations therefore delays another by one admission per turn.
    """

    def __init__(self, priority_aging_steps: int) -> None:
        """``priority_aging_steps``: number of waiting steps that outweigh one priority level."""
        self._aging_steps = priority_aging_steps
        self._queues: dict[tuple[str, int], deque[Request]] = {}
        """Requests that were never admitted, in order of arrival."""
        self._ready: list[Request] = []
        """Heads of queues and preempted requests, most urgent first."""
        self._num_queued = 0
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._ready) + self._num_queued

    def __iter__(self) -> Iterator[Request]:
        """Yield the candidates, most urgent first, then the other requests queue by queue."""
        yield from self._ready
        for queue in self._queues.values():
            yield from islice(queue, 1, None)

    @property
    def ready(self) -> list[Request]:
        """Candidates for admission, most urgent first: the live list, which the methods below modify."""
        return self._ready

    def add(self, request: Request, step: int) -> None:
        """Add a new request that arrives at ``step``."""
        queue = self._queues.setdefault(_queue_key(request), deque())
        queue.append(request)
        if len(queue) == 1:
            self._add_candidate(request, step)
        else:
            self._num_queued += 1

    def requeue(self, request: Request) -> None:
        """Add a preempted request again, keeping its original urgency."""
        insort(self._ready, request, key=_urgency)

    def admit(self, request: Request, step: int) -> None:
        """Remove an admitted candidate; its successor in the queue becomes a candidate at ``step``."""
        self._ready.remove(request)
        if (successor := self._pop_head(request)) is not None:
            self._add_candidate(successor, step)

    def remove(self, request: Request) -> None:
        """Remove a request that will not run. The successor of a queue head inherits its urgency."""
        if request not in self._ready:
            self._queues[_queue_key(request)].remove(request)
            self._num_queued -= 1
            return
        self._ready.remove(request)
        if (successor := self._pop_head(request)) is not None:
            successor.urgency = request.urgency
            self.requeue(successor)

    def _add_candidate(self, request: Request, step: int) -> None:
        request.urgency = (step - request.priority * self._aging_steps, self._num_turns)
        self._num_turns += 1
        self.requeue(request)

    def _pop_head(self, request: Request) -> Request | None:
        """Remove ``request`` from the head of its queue and return its successor.

        Returns None if the queue is now empty, or if ``request`` was preempted and is in no queue.
        """
        queue = self._queues.get(_queue_key(request))
        if queue is None or queue[0] is not request:
            return None
        queue.popleft()
        if not queue:
            del self._queues[_queue_key(request)]
            return None
        self._num_queued -= 1
        return queue[0]


def _queue_key(request: Request) -> tuple[str, int]:
    return request.parent or request.id, request.priority
