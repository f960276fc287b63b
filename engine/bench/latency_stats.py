"""Latency statistics: percentiles and the summary of a load test."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestTiming:
    """Client-side timing of one request, in seconds of ``time.perf_counter``."""

    began: float
    """Time at which the request was sent."""
    ended: float = 0.0
    first: float | None = None
    """Arrival time of the first text."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between consecutive chunks with text; a chunk may contain several tokens."""
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    text: str = ""
    """Text of the reply."""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for fewer than two tokens."""
        if self.first is None or self.num_output < 2:
            return None
        return (self.ended - self.first) / (self.num_output - 1)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, standard deviation, percentiles and maximum, in milliseconds, of ``values`` in seconds.

    None if ``values`` is empty.
    """
    if not values:
        return None
    array = 1000 * np.asarray(values)
    points = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    return {"mean": float(array.mean()), "std": float(array.std())} | points | {"max": float(array.max())}


def summary(timings: Sequence[RequestTiming], duration_s: float, peak: int) -> dict[str, Any]:
    """Summarize a load test as JSON values; times are in milliseconds."""
    done = [timing for timing in timings if timing.error is None]
    prompt, output = sum(t.num_prompt for t in done), sum(t.num_output for t in done)
    errors = Counter(timing.error for timing in timings if timing.error is not None)
    return {
        "duration_s": duration_s,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "errors": [{"error": text, "count": count} for text, count in errors.most_common(10)],
        "peak_concurrency": peak,
        "prompt_tokens": prompt,
        "cached_tokens": sum(timing.num_cached for timing in done),
        "output_tokens": output,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": output / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
        "ttft_ms": spread([t.first - t.began for t in done if t.first is not None]),
        "tpot_ms": spread([t.tpot_s for t in done if t.tpot_s is not None]),
        "itl_ms": spread([gap for timing in done for gap in timing.gaps]),
        "e2e_ms": spread([timing.ended - timing.began for timing in done]),
    }
