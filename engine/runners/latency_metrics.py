"""LatencyMetrics: request latencies measured by the engine's client, for listeners such as metrics and logs."""

import contextvars
import time
from dataclasses import dataclass, field
from typing import Protocol

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output


@dataclass(slots=True)
class RequestTimer:
    """Timestamps and counts of one request; timestamps are in seconds of ``time.perf_counter``."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """Arrival of the first token."""
    last: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    """None while the request is live and if its client disconnected."""
    error: str | None = None
    error_type: str = ""
    """Class name of the error, for example ``UsageError``."""
    dp_rank: int = 0
    """DP rank of the replica that computes the request."""
    routed_by: str = "load"
    """Reason for choosing this replica, see :class:`~tapscope.engine.runners.replica_router.Choice`."""
    between: tuple[float, int] | None = None
    """(seconds since the previous output, number of tokens in the latest one); None for the first output."""
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter: str = ""
    """Name of the LoRA adapter; empty for the base model."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context variables of the task that sent the request, for example the caller's trace."""

    def note(self, output: Output) -> None:
        """Record the arrival of an output."""
        now = time.perf_counter()
        self.finish_reason = output.finish_reason
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if not output.token_ids:
            return
        self.between = None if self.last is None else (now - self.last, len(output.token_ids))
        self.num_tokens += len(output.token_ids)
        self.first = now if self.first is None else self.first
        self.last = now

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None before the first token."""
        return None if self.first is None else self.first - self.started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request was sent."""
        return time.perf_counter() - self.started


class Listener(Protocol):
    """Interface of objects that are notified of the events of every request."""

    def on_output(self, timer: RequestTimer, output: Output) -> None:
        """Called for every output."""
        ...

    def ended(self, request: str, prompt_tokens: int, timer: RequestTimer) -> None:
        """Called when a request has finished, failed, or been abandoned by its client."""
        ...


class LatencyMetrics:
    """Count of live requests and dispatcher of request events to listeners."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self.num_live = 0
        self._listeners = listeners

    def started(self) -> None:
        """Record that a request was sent to the engine."""
        self.num_live += 1

    def on_output(self, timer: RequestTimer, output: Output) -> None:
        """Notify the listeners of an output."""
        for listener in self._listeners:
            listener.on_output(timer, output)

    def ended(self, request: str, prompt_tokens: int, timer: RequestTimer) -> None:
        """Record the end of a request and notify the listeners."""
        self.num_live -= 1
        for listener in self._listeners:
            listener.ended(request, prompt_tokens, timer)
