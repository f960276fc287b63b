"""Experts: recorded expert weights are exchanged, or only the rows routed to one or two experts differ."""

import math
from itertools import combinations
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.region_text import spans
from tapscope.comparator.explain.token_slots import rows_like
from tapscope.comparator.verdict.explanation import Tested

Array = np.ndarray[Any, Any]

MAX_CHANCE = 1e-3
"""Maximum probability, over all experts, that as many random rows were all routed to the same expert."""
MIN_ROW_RATIO = 2.0
"""Minimum ratio of the error of affected rows to the largest error of rows not routed to the expert."""
MIN_COLUMN_RATIO = 4.0
"""Minimum ratio of the error of affected columns to that of the other rows, and of the other columns."""
EQUAL_INPUT_RTOL = 1e-3
"""Relative distance below which two rows have equal inputs: they are routed alike and count once."""
SAME_WEIGHT = 2.0**-8
"""Maximum difference of two copies of a 16-bit weight, relative to the largest weight."""
_INPUTS = ("in[hidden_states]", "in[x]", "in[input]")


def expert_weights(region: ErrorRegion, sites: SiteReader) -> Tested | None:
    """Return which experts have different weights.

    Evidence is recorded weights that are exchanged, or one or two experts to which all affected rows were routed. None
    if the site is not an output of experts, or if the result may be chance.
    """
    path, _, port = region.sample.site.rpartition(":")
    path = path.removesuffix(".partial")
    if not path.endswith("experts") or not port.startswith("out") or region.sample.is_integer:
        return None
    if order := _order_of(path, sites):
        return Tested("expert", order, 0.0)
    chosen = _chosen(path, sites, region)
    if chosen is None:
        return None
    known = np.flatnonzero(chosen.min(axis=1) >= 0)  # a row that the runs route differently differs for that reason
    error = _errors(region)
    given = next((slots for name in _INPUTS if (slots := sites.slots(f"{path}:{name}")) is not None), None)
    rows = None if given is None else rows_like(given[0], region.sample)
    given_known = None if rows is None else rows[known]
    expert = common_expert(chosen[known], error[known], given_known)
    experts = common_experts(chosen[known], error[known], given_known) if expert is None else (expert,)
    if not experts:
        return None
    has = np.asarray(np.isin(chosen, experts).any(axis=1))
    what = f"the weights of experts {' and '.join(map(str, experts))} differ (gate, up or down), or what they compute"
    if len(experts) == 1:
        what = _describe_weights(region, experts[0], has)
    return Tested("expert", f"{what}: {_describe_rows(error, has, known, len(experts))}", 0.0)


def common_experts(chosen: Array, error: Array, given: Array | None) -> tuple[int, ...]:
    """Return the two experts whose rows alone differ, judged like :func:`common_expert`; empty unless exactly one pair
    fits.

    For neither expert may the result be chance among the rows without the other.
    """
    chosen, error = _once(chosen, error, given)
    worst = chosen[int(np.argmax(error))].tolist() if len(error) else []
    known = np.unique(chosen).tolist()
    common = []
    for one, two in combinations(known, 2):
        if one not in worst and two not in worst:
            continue
        has = [(chosen == expert).any(axis=1) for expert in (one, two)]
        off = error > MIN_ROW_RATIO * float(error[~(has[0] | has[1])].max(initial=0.0))
        chances = [
            len(known) * _chance(int((own & ~other).sum()), int((~other).sum()), int((off & ~other).sum()))
            for own, other in (has, has[::-1])
        ]
        if max(chances) < MAX_CHANCE:
            common.append((one, two))
    return common[0] if len(common) == 1 else ()


def common_expert(chosen: Array, error: Array, given: Array | None) -> int | None:
    """Return the only expert whose rows alone differ, unless that may be chance; otherwise None.

    ``chosen`` [rows, k] are expert indices, ``error`` [rows], ``given`` [rows, width] the inputs of the experts.
    """
    chosen, error = _once(chosen, error, given)
    has = {int(e): (chosen == e).any(axis=1) for e in np.unique(chosen)}
    off = {e: error > MIN_ROW_RATIO * float(error[~rows].max(initial=0.0)) for e, rows in has.items()}
    chance = {e: len(has) * _chance(int(rows.sum()), len(rows), int(off[e].sum())) for e, rows in has.items()}
    best = min(chance, key=lambda e: chance[e], default=-1)
    if best < 0 or chance[best] >= MAX_CHANCE:
        return None
    rows, here = off[best], has[best]
    others = [other for e, other in has.items() if e != best and other[rows].all()]
    shared = [_chance(int((here & other).sum()), int(other.sum()), int(rows.sum())) for other in others]
    return best if max(shared, default=0.0) < MAX_CHANCE else None


def _once(chosen: Array, error: Array, given: Array | None) -> tuple[Array, Array]:
    """Return choices and errors without rows that repeat an earlier row."""
    once = np.arange(len(chosen)) if given is None or not np.isfinite(given).all() else distinct(given)
    return chosen[once], error[once]


def _chance(size: int, total: int, number: int) -> float:
    """Return the probability that ``number`` of ``total`` rows, drawn at random, are all among ``size`` of them."""
    return math.comb(size, number) / math.comb(total, number)


def _describe_weights(region: ErrorRegion, expert: int, has: Array) -> str:
    """Return a sentence on the weights of the expert that differ; changed rows of its down projection affect single
    columns."""
    error = (region.sample.target - region.sample.baseline) / region.sample.size
    columns = columns_apart(error[has], error[~has])
    if columns is None:
        return f"the weights of expert {expert} differ, or what it computes"
    return f"the down projection of expert {expert} differs in its {spans('row', columns)}"


def _order_of(path: str, sites: SiteReader) -> str:
    """Return how the recorded weights of the experts are exchanged, in words; empty if they are not, or were not
    recorded."""
    by_order: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name in sites.parameters(path):
        sides = sites.stored(f"{path}:param[{name}]")
        if sides is not None and (swapped := exchanged(*sides)):
            by_order.setdefault(tuple(swapped.items()), []).append(name)
    sentences = []
    for order, names in by_order.items():
        what = " and ".join(names)
        if len(order) == 2:
            sentences.append(f"experts {order[0][0]} and {order[1][0]} are exchanged: each has the other's {what}")
        else:
            some = ", ".join(f"{one} has that of {two}" for one, two in order[:4])
            sentences.append(
                f"{what} of {len(order)} experts is in another order: expert {some}{', …' * (len(order) > 4)}"
            )
    return "; ".join(sentences)


def exchanged(baseline: Array, target: Array) -> dict[int, int]:
    """Return target expert -> baseline expert with the same weights, for all experts that differ.

    Weights [experts, ..., ...] are compared up to 16-bit rounding. Empty unless the differing weights are a
    permutation.
    """
    if baseline.shape != target.shape or baseline.ndim < 3:
        return {}
    one, two = (side.reshape(len(side), -1) for side in (baseline, target))
    level = SAME_WEIGHT * np.abs(one).max(axis=1)
    differ = np.flatnonzero(~(np.abs(one - two).max(axis=1) <= level)).tolist()
    source_of: dict[int, int] = {}
    for expert in differ:
        near = [other for other in differ if np.abs(one[other] - two[expert]).max() <= level[other]]
        if len(near) == 1:
            source_of[expert] = near[0]
    return source_of if differ and sorted(source_of.values()) == differ else {}


def columns_apart(error: Array, others: Array) -> Array | None:
    """Return the affected columns of ``error`` if the remaining columns are as in ``others``; None if all are
    affected."""
    here, there = (np.sqrt((rows**2).mean(axis=0)) for rows in (error, others))
    level = MIN_COLUMN_RATIO * float(np.sqrt((there**2).mean()))
    columns = np.flatnonzero(here > level)
    spared = np.delete(here, columns)
    if (
        not len(columns)
        or 2 * len(spared) < len(here)
        or not here[columns].min() > MIN_COLUMN_RATIO * float(spared.max())
    ):
        return None
    return columns


def _describe_rows(error: Array, has: Array, known: Array, num_experts: int) -> str:
    here = np.zeros(len(error), bool)
    here[known] = True
    off = has & here & (error > MIN_ROW_RATIO * float(error[here & ~has].max(initial=0.0)))
    count = int((has & here).sum())
    rows = f"all {count}" if off.sum() == count else f"{int(off.sum())} of {count}"
    return f"{rows} rows that chose {'it' if num_experts == 1 else 'either'} are off, and no other"


def _chosen(path: str, sites: SiteReader, region: ErrorRegion) -> Array | None:
    """Return the experts of each row of the sample as [rows, k]; -1 in rows that the runs route differently."""
    parent = path.rpartition(".")[0]
    names = (f"{path}:in[top_k_index]", f"{parent}.gate:out[2]", f"{parent}.router:out[2]")
    both = next((slots for name in names if (slots := sites.slots(name)) is not None), None)
    if both is None:
        return None
    sides = [rows_like(side, region.sample) for side in both]
    if sides[0] is None or sides[1] is None or sides[0].shape != sides[1].shape:
        return None
    one, two = (np.sort(side, axis=1) for side in sides if side is not None)
    return np.where((one == two).all(axis=1, keepdims=True), one, -1.0).astype(np.int64)


def _errors(region: ErrorRegion) -> Array:
    """Return the error relative to the norm of each row as [rows]; inf where values are not finite."""
    sample = region.sample
    error = np.nan_to_num(sample.target - sample.baseline, nan=np.inf)
    errors: Array = np.sqrt((error**2).sum(axis=1)) / sample.size[:, 0]
    return errors


def distinct(given: Array) -> Array:
    """Return the indices of the rows that do not repeat an earlier row, up to :data:`EQUAL_INPUT_RTOL`."""
    unit = given / np.maximum(np.sqrt((given**2).sum(axis=1, keepdims=True)), 1e-300)
    apart = np.sqrt(np.maximum(2.0 - 2.0 * unit @ unit.T, 0.0))
    return np.flatnonzero(~np.tril(apart < EQUAL_INPUT_RTOL, -1).any(axis=1))
