"""Missing shards: why a run may lack shards although the recorded model is correct."""

from functools import cached_property

from tapscope.core.site import compact_ranges
from tapscope.run_format.run import Run


class MissingShards:
    """Reasons for missing shards, from the run's ledger or from the selection of ranks."""

    def __init__(self, run: Run, ranks: frozenset[int] | None) -> None:
        """``ranks``: the selected ones; None for all."""
        self._run, self._ranks = run, ranks

    @property
    def are_chosen(self) -> bool:
        """Whether ranks were excluded by the user."""
        return self._ranks is not None and not self._ranks.issuperset(self._run.ranks)

    @cached_property
    def reason(self) -> str:
        """Why a shard may be missing; empty if the run should have all of them."""
        if self.are_chosen:
            return f"--ranks {compact_ranges(self._ranks or ())} excludes it"
        ledger = self._run.ledger()
        if missing := ledger.missing_ranks:
            return f"{'rank' if len(missing) == 1 else 'ranks'} {compact_ranges(missing)} never came"
        return "" if ledger.complete and not ledger.open_ranks else f"{self._run.name} is not complete"
