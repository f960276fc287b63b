"""Token rows: the rows of a divergence above the floor, measured again for the few culprits."""

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.facts import Place
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair, WidthError, measure
from tapscope.comparator.metrics.summand_ranks import faulty_rank, is_only_faulty_rank
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.pair_analysis.row_place import index_in_shard, place_of
from tapscope.comparator.verdict.finding import Finding
from tapscope.core.errors import DataError
from tapscope.kernels.native.aggregate import row_errors

MAX_TOKENS = 8


class TokenError(Struct, frozen=True):
    """Error of one row above the floor."""

    place: Place
    error: float
    """Error relative to the norm of the row."""
    ratio: float
    """error / row floor; 0 if rounding does not apply."""


def tokens_of(
    analyzer: PairAnalyzer, result: PairResult, finding: Finding, step: int
) -> tuple[tuple[TokenError, ...], int, Place | None]:
    """Return (first rows above the floor in a target step, number of such rows in all steps, worst row of that
    step)."""
    if (
        finding.basis != "values"
        or result.pair.baseline is None
        or result.pair.target is None
        or _is_elsewhere(finding)
    ):
        return (), 0, finding.worst
    ready = analyzer.preparer.prepare(result.pair)
    try:
        measured = measure(LazyPair(ready))
    except (WidthError, DataError):
        return (), 0, finding.worst
    errors = row_errors(measured.rows)
    is_mismatch = measured.rows.nonfinite_mismatch > 0
    if finding.row_floor > 0.0:
        beyond = is_mismatch | (errors > finding.row_floor)
    else:
        beyond = measured.rows.equal < measured.rows.width
    if not beyond.any():  # all rows have a small error, as from a scale or in one channel
        beyond = errors >= np.median(errors)
    steps = np.array([whole.records[0].key.step for whole in ready.right])[measured.target_firing]
    here = np.flatnonzero(beyond & (steps == step))
    if not len(here):
        return (), int(beyond.sum()), finding.worst
    worst = int(here[np.argmax(np.where(is_mismatch[here], np.inf, errors[here]))])
    tokens = [
        TokenError(
            place_of(measured, int(row), ready, analyzer.preparer.row_map),
            float(errors[row]),
            float(errors[row]) / finding.row_floor if finding.row_floor > 0.0 else 0.0,
        )
        for row in here[:MAX_TOKENS]
    ]
    place = place_of(measured, worst, ready, analyzer.preparer.row_map)
    rank = _rank_at_fault(finding, measured, worst, ready, place)
    in_shard = () if rank is None else index_in_shard(measured, worst, ready, rank)
    place = structs.replace(place, rank=rank, in_shard=in_shard)
    return tuple(tokens), int(beyond.sum()), place


def _rank_at_fault(finding: Finding, measured: MeasuredPair, row: int, ready: PreparedPair, place: Place) -> int | None:
    """Return the rank that has the error of a row, if exactly one rank has it; otherwise None."""
    if finding.test == "replicas":
        return finding.worst.rank if finding.worst is not None else None
    if place.rank is None:
        return faulty_rank(measured, row, ready)
    return place.rank if is_only_faulty_rank(measured, row, ready, place.rank, finding.row_floor) else None


def _is_elsewhere(finding: Finding) -> bool:
    """Return whether the wrong replica is not the compared one."""
    return (
        finding.test == "replicas"
        and finding.metrics is not None
        and finding.metrics.num_equal == finding.metrics.num_elements
    )
