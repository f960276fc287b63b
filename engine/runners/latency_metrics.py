"""Meters: how long requests took, as the client of the engine sees it; whoever wants it listens."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from tapscope.engine.requests.output import Output


@dataclass(slots=True)
class Stopwatch:
    """Times of one request, in seconds of time.perf_counter."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """When its first token came."""
    last: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    """None while it is live, and for a client that went away."""
    error: str | None = None
    dp_rank: int = 0
    """The replica that computes it."""
    routed_by: str = "load"
    """Why that one, see router.py."""
    between: tuple[float, int] | None = None
    """Seconds since the output before, and tokens that came with this one; None with the first."""

    def note(self, output: Output) -> None:
        """An output has come."""
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
        """Time to the first token."""
        return None if self.first is None else self.first - self.started

    @property
    def elapsed_s(self) -> float:
        """Time from start until now."""
        return time.perf_counter() - self.started


class Listener(Protocol):
    """Told of every request."""

    def gave(self, watch: Stopwatch, output: Output) -> None:
        """An output came."""
        ...

    def ended(self, request: str, prompt_tokens: int, watch: Stopwatch) -> None:
        """It is over, by whatever reason."""
        ...


class LatencyMetrics:
    """Counts live requests and tells listeners."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self.num_live = 0
        self._listeners = listeners

    def started(self) -> None:
        """A request was sent to the engine."""
        self.num_live += 1

    def gave(self, watch: Stopwatch, output: Output) -> None:
        """An output came."""
        for listener in self._listeners:
            listener.gave(watch, output)

    def ended(self, request: str, prompt_tokens: int, watch: Stopwatch) -> None:
        """A request is over."""
        self.num_live -= 1
        for listener in self._listeners:
            listener.ended(request, prompt_tokens, watch)
