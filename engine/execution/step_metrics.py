"""StepMetrics: the metrics that an observer receives with each step."""

import time
from collections.abc import Mapping, Sequence

from tapscope.engine.checkpoint.startup_timer import resident_bytes
from tapscope.engine.requests.step_plan import StepPlan

_MEMORY_INTERVAL_S = 0.1


class StepMetrics:
    """Metrics of the steps of one model runner."""

    def __init__(self, num_pages: int) -> None:
        """``num_pages``: number of pages of the KV cache."""
        self._num_pages = num_pages
        self._started = self._memory_due = 0.0
        self._memory: dict[str, float] = {}

    def start(self) -> None:
        """Start the timer of a step, at its launch."""
        self._started = time.perf_counter()

    def of(self, plan: StepPlan, accepted: Mapping[str, Sequence[int]] | None) -> dict[str, float]:
        """Return the metrics of the step that ends; ``accepted`` as in :meth:`.ModelRunner.finish`."""
        metrics = {
            "batch_size": float(len(plan.scheduled)),
            "num_tokens": float(plan.num_tokens),
            "latency_s": time.perf_counter() - self._started,
            "kv_pages_used": float(plan.kv_pages_used),
            "kv_pages_total": float(self._num_pages),
        }
        if accepted:
            metrics["num_draft_tokens"] = float(sum(item.num_drafts for item in plan.scheduled))
            metrics["num_accepted_tokens"] = float(sum(map(len, accepted.values())))
        return metrics | self._memory_metrics()

    def _memory_metrics(self) -> dict[str, float]:
        """Return the resident bytes of this process, at most 0.1 s old; empty if the system does not report them."""
        now = time.monotonic()
        if now > self._memory_due:
            resident = resident_bytes()
            self._memory_due = now + _MEMORY_INTERVAL_S
            self._memory = {} if resident is None else {"rss_bytes": float(resident)}
        return self._memory
