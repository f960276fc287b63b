"""CallTracker: distinguishes overlapping calls of one model from several threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tapscope.dumper.steps.autograd_passes import ForwardOrigins
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.tag_context import ctx

_lock = threading.Lock()


class CallTracker:
    """Tracks the calls of one model that are in progress.

    A call that begins while another thread's call is in progress gets a number within the step, from 1. Firings inside
    that call use the number as their microbatch and carry it as the tag ``call``.
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # thread -> nesting depth, as a model may call itself

    @contextmanager
    def track(self, step: OpenStep | None, origins: ForwardOrigins) -> Iterator[None]:
        """Context manager around one call in the open step; notes the graph nodes of the call in ``origins``."""
        thread = threading.get_ident()
        with _lock:
            depth = self._depths[thread] = self._depths.get(thread, 0) + 1
            overlaps = depth == 1 and len(self._depths) > 1
        try:
            if not overlaps or step is None:
                yield
                return
            with ctx(call=_number(step, thread, origins)):
                try:
                    yield
                finally:
                    step.calls.pop(thread, None)
        finally:
            with _lock:
                self._depths[thread] -= 1
                if not self._depths[thread]:
                    del self._depths[thread]


def _number(step: OpenStep, thread: int, origins: ForwardOrigins) -> int:
    with _lock:
        step.num_calls += 1
        number = step.calls[thread] = step.num_calls
    origins.note(step, number)
    return number
