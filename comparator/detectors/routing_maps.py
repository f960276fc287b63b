"""Routing maps: expert choices that one run recorded as flags of all experts, and the other run as scores.

Megatron's router returns a flag and a weight for each expert, and no scores; transformers' router returns scores. Their
outputs therefore do not match. The rows of both are the same tokens: the experts with the largest scores in one run are
compared with the flags of the other. Where they differ, it is a near tie if the error of the router's input explains
the distance between the scores of both choices. The token's rows are then not comparable around that router, as if both
runs had recorded indices (:mod:`.near_ties`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.chosen_scores import Array, largest, numbers_of, rows_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics import chunks
from tapscope.comparator.noise_floor.constants import DEFAULT_CONDITION, ROUND_TO_NEAREST
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.modules import parent
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.routers import ROUTERS
from tapscope.comparator.runs.series import Series
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.formatting import plural
from tapscope.core.site import module_of, port_of

_MIN_TOP_K_SHARE = 0.9
"""Minimum fraction of rows whose flags match the largest scores; otherwise, a bias or expert groups influence the
choice."""


class RoutingMaps(Detector):
    """Detects near ties between the scores of one run's routers and the flags of the other's."""

    name = "routing_maps"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        changes = flagged_changes(evidence.pairs, evidence.preparer)
        return structs.replace(evidence, changes={**evidence.changes, **changes})


class _Router(NamedTuple):
    """A router's output that only one run has, with a column for each expert."""

    site: str
    block: str
    """The module that contains the router."""
    side: int
    series: Series


class _Choices(NamedTuple):
    """The rows of a router that both runs have."""

    pairs: Array
    scores: Array
    """[rows, experts]"""
    flags: Array
    """[rows, experts]: the choices of the other run."""


def flagged_changes(everything: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, ChoiceChange]:
    """Return site of a router's scores -> change, for routers whose differing rows are all near ties."""
    routers = list(_routers(everything))
    flags = {(one.side, canonical_name(f"{one.block}:")): one for one in routers if one.series.dtype == "bool"}
    inputs = {module_of(one.site): one for one in everything if _is_input(one)}
    changes: dict[str, ChoiceChange] = {}
    for one in routers if flags else ():
        other = flags.get((1 - one.side, canonical_name(f"{one.block}:")))
        if other is None or one.series.dtype == "bool" or one.series.shape[-1] != other.series.shape[-1]:
            continue
        first = one if one.side == 0 else other  # sites have the baseline's names
        given = inputs.get(first.block)
        choices = None if given is None else _read(preparer, one, other)
        change = None if given is None or choices is None else _change(preparer, choices, given, first.block)
        if change is not None:
            changes[first.site] = change
    return changes


def _routers(everything: Sequence[PairResult]) -> Iterator[_Router]:
    for one in everything:
        path, _, port = one.site.rpartition(":")
        if one.is_matched or one.exclusion_reason or path.rpartition(".")[2] not in ROUTERS:
            continue
        series = one.pair.baseline or one.pair.target
        if series is None or len(series.shape) < 2 or not port.startswith("out") or port.endswith(".grad"):
            continue
        if series.is_float or series.dtype == "bool":
            yield _Router(one.site, parent(path), int(one.pair.baseline is None), series)


def _is_input(result: PairResult) -> bool:
    port = port_of(result.site)
    is_compared = result.is_matched and result.distribution is not None and result.rows.num_compared > 0
    return is_compared and port.startswith("in[") and not port.endswith(".grad")


def _read(preparer: PairPreparer, scored: _Router, flagged: _Router) -> _Choices | None:
    """Read the rows that both routers have.

    Returns None if the rows cannot be aligned, or if the flags of most rows do not match the largest scores.
    """
    both = (scored.series, flagged.series) if scored.side == 0 else (flagged.series, scored.series)
    ready = preparer.prepare(Pair(*both, site=scored.site))
    parts: list[_Choices] = []
    try:
        for chunk in () if ready.problem else chunks.rows(ready, every=True):
            if chunk.join.pairs is None or chunk.baseline.shape != chunk.target.shape:
                return None
            sides = (chunk.baseline, chunk.target) if scored.side == 0 else (chunk.target, chunk.baseline)
            pairs = chunk.join.pairs[chunk.row : chunk.row + len(chunk.baseline)]
            parts.append(_Choices(pairs, sides[0].astype(np.float64), sides[1].astype(bool)))
    except DataError:  # unreadable bytes are a separate finding
        return None
    if not parts:
        return None
    choices = _Choices(*map(np.concatenate, zip(*parts, strict=True)))
    count = np.unique(choices.flags.sum(1))
    is_known = len(count) == 1 and 0 < count[0] < choices.flags.shape[1] and np.isfinite(choices.scores).all()
    return choices if is_known and (_largest(choices) == choices.flags).all(1).mean() >= _MIN_TOP_K_SHARE else None


def _largest(choices: _Choices) -> Array:
    """Return flags of the largest scores, [rows, experts], as many per row as the other run chose."""
    count = int(choices.flags[0].sum())
    flags = np.zeros_like(choices.flags)
    np.put_along_axis(flags, largest(choices.scores, count), True, axis=1)
    return flags


def _change(preparer: PairPreparer, choices: _Choices, given: PairResult, block: str) -> ChoiceChange | None:
    """Return the change of the rows with a different choice; None if there are none, or one of them is not a near
    tie."""
    mine = _largest(choices)
    moved = (mine != choices.flags).any(1)
    rows = rows_of(preparer, given, choices.pairs[moved]) if moved.any() else None
    if rows is None or len(rows.pairs) != moved.sum():
        return None
    order = np.argsort(choices.pairs[moved])
    scores, one, other = (side[moved][order] for side in (choices.scores, mine, choices.flags))
    off = np.linalg.norm(rows.target - rows.baseline, axis=1) / np.linalg.norm(rows.baseline, axis=1)
    rounding = ROUND_TO_NEAREST * max(map(dtypes.epsilon, given.dtypes))
    error = DEFAULT_CONDITION * np.hypot(off, rounding) * np.sqrt((scores**2).mean(1))
    left, right = (np.sort(np.take_along_axis(scores, numbers_of(side), 1), axis=1) for side in (one, other))
    if not (np.abs(left - right).max(1) <= 2.0 * error).all():
        return None
    rerouted, count = frozenset(rows.pairs.tolist()), int(one[0].sum())
    what = f"{plural(len(rerouted), 'token row')} went to other experts"
    sentence = f"{what}: their scores are closer together than the error of {given.site} explains"
    return ChoiceChange(sentence, given.site, rerouted, rerouted, count, block=block)
