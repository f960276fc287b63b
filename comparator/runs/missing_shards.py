"""Gaps: why shards of a run may lack though nothing is wrong with the model that was recorded."""

from functools import cached_property

from tapscope.core.site import compact_ranges
from tapscope.run_format.run import Run


class MissingShards:
    """What one run, or who chose of it, says of shards that are not there."""

    def __init__(self, run: Run, ranks: frozenset[int] | None) -> None:
        """``ranks``: those that were chosen; None for all."""
        self._run, self._ranks = run, ranks

    @property
    def are_chosen(self) -> bool:
        """Whether ranks were left out on purpose."""
        return self._ranks is not None and not self._ranks.issuperset(self._run.ranks)

    @cached_property
    def reason(self) -> str:
        """Why a shard may lack; empty where the run should have all of them."""
        if self.are_chosen:
            return f"--ranks {compact_ranges(self._ranks or ())} leaves it out"
        ledger = self._run.ledger()
        if missing := ledger.missing_ranks:
            return f"{'rank' if len(missing) == 1 else 'ranks'} {compact_ranges(missing)} never came"
        return "" if ledger.complete and not ledger.open_ranks else f"{self._run.name} is not complete"
