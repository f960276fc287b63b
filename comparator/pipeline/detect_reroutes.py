"""Detect reroutes: the fourth stage; mismatches that rounding explains, and what depends on them.

A sampled token or a choice of experts is discrete: an error far below any floor may turn it at a near tie. Token rows
that went to other experts are excluded around their router, since they are not comparable there.
"""

from collections.abc import Mapping

from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import Preparer
from tapscope.comparator.detectors.cast_gradients import without_branches
from tapscope.comparator.detectors.exclude_rerouted_rows import set_aside
from tapscope.comparator.detectors.implied_routing import implied_flips
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.pipeline.measure_pairs import MeasuredRuns
from tapscope.comparator.verdict.near_ties import Flip, explain_flips
from tapscope.comparator.verdict.sampled_tokens import with_tokens


class ScreenedRuns(Struct, frozen=True):
    """Measured runs, with the mismatches of discrete values that rounding explains."""

    measured: MeasuredRuns
    results: list[Examined]
    """Those of the pairs, and one for the tokens that were sampled where no site recorded them."""
    flips: Mapping[str, Flip]
    """Site of integers -> why they may differ."""

    @property
    def preparer(self) -> Preparer:
        """Prepares the pairs of these runs."""
        return self.measured.examiner.preparer

    @property
    def judged(self) -> list[Examined]:
        """The results that get a verdict."""
        return [one for one in self.results if not one.apart]

    def without_rerouted_rows(self, flips: Mapping[str, Flip] | None = None) -> "ScreenedRuns":
        """The same without the token rows that ``flips`` (default: all that were found) sent to other experts."""
        flips = self.flips if flips is None else flips
        return structs.replace(self, results=set_aside(self.results, flips, self.measured.examiner), flips=flips)


def detect_reroutes(measured: MeasuredRuns) -> ScreenedRuns:
    """Look at every mismatch of discrete values, and at gradients that only one run took of a cast copy."""
    preparer = measured.examiner.preparer
    results = with_tokens(without_branches(measured.results), preparer)
    flips = {**implied_flips(results, preparer), **explain_flips(results, preparer)}
    return ScreenedRuns(measured, results, flips)
