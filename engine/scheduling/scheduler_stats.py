"""SchedulerStats: counters of the scheduler since the engine was created, for metrics."""

from dataclasses import dataclass

from tapscope.engine.requests.step_plan import ScheduledRequest


@dataclass(slots=True)
class SchedulerStats:
    """Counters; they only increase."""

    prefill_tokens: int = 0
    """Prompt rows computed for the first time."""
    cached_tokens: int = 0
    """Prompt rows taken from the prefix cache."""
    decode_tokens: int = 0
    """Tokens generated."""
    recomputed_tokens: int = 0
    """Rows computed again, after a preemption."""
    num_preemptions: int = 0
    """Requests preempted, to be computed again later."""

    def count(self, scheduled: ScheduledRequest, num_prompt: int) -> None:
        """Add the rows of a scheduled request with ``num_prompt`` prompt tokens."""
        again = sum(count for count, visit in scheduled.visits if visit)
        end = scheduled.position + len(scheduled.tokens)
        self.prefill_tokens += min(len(scheduled.tokens) - again, max(0, min(end, num_prompt) - scheduled.position))
        self.recomputed_tokens += again
