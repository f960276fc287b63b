"""Counters: what the scheduler has done since the engine was made, for metrics."""

from dataclasses import dataclass

from tapscope.engine.requests.step_plan import Share


@dataclass(slots=True)
class Counters:
    """Numbers that only go up."""

    prefill_tokens: int = 0
    """Prompt rows computed for the first time."""
    cached_tokens: int = 0
    """Prompt rows that the prefix cache saved."""
    decode_tokens: int = 0
    """Tokens generated."""
    recomputed_tokens: int = 0
    """Rows computed again, after a preemption."""
    num_preemptions: int = 0
    """Requests put back to be computed again later."""

    def count(self, share: Share, num_prompt: int) -> None:
        """Add the rows of a share of a request with ``num_prompt`` prompt tokens."""
        again = sum(count for count, visit in share.visits if visit)
        end = share.position + len(share.tokens)
        self.prefill_tokens += min(len(share.tokens) - again, max(0, min(end, num_prompt) - share.position))
        self.recomputed_tokens += again
