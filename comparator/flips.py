"""Flips: unequal integers that rounding explains, because they were chosen from scores that lie close together.

Integers must be equal. Two things excuse a sampled token that is not: its request forks right behind it (then the
rows behind are set aside, and the fork is reported), or the logits it was chosen from are so close together that the
error of their row decides between the two tokens, and that error is itself no more than rounding.

So it is with the experts a router chooses: the c-th largest score is no further from what it was than the row's
largest error e, nor is the score of whoever has it now; so the baseline's scores of both runs' c-th choices are within
2 e of each other, or it was no near tie. A token that went to other experts is not comparable behind them, see
:mod:`.set_aside`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator import chunks
from tapscope.comparator.examined import Examined
from tapscope.comparator.prepare import Preparer
from tapscope.comparator.series import identity

Array = np.ndarray[Any, Any]

_BY_MORE = "a bias or groups decide beside"
_NEAR = 8
"""Sites before a choice among which its scores are looked for."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Why the unequal integers of a site are no fault of the target."""

    sentence: str
    scores: str = ""
    """Site whose errors explain them, if that one is within its floor; empty when forks do."""
    moved: frozenset[int] = frozenset()
    """Row pairs that went to other experts; a change of their order alone moves nothing."""
    turned: frozenset[int] = frozenset()
    """Row pairs whose choices are not the same ones in the same order."""
    width: int = 0
    """Choices a row."""
    is_doubt: bool = False
    """Whether it excuses nothing and only says why nothing could."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a site on both sides."""

    pairs: Array
    """[rows] row pair of each, ascending."""
    baseline: Array
    """[rows, width]"""
    target: Array


def explain_flips(examined: Sequence[Examined], preparer: Preparer) -> Mapping[str, Flip]:
    """Site -> explanation, for the sites whose unequal integers all have one."""
    found: dict[str, Flip] = {}
    seen: dict[object, str] = {}
    for i, one in enumerate(examined):
        # Rows without a place are tensors compared whole.
        if not one.is_exact or not one.num_unequal or not one.unequal or min(one.unequal) < 0:
            continue
        same = identity(one.pair.baseline), identity(one.pair.target)
        first = seen.setdefault(same, one.site) if None not in same else one.site
        flip = found.get(first) or _flip(examined[:i], one, preparer)
        if flip is not None:
            found[one.site] = flip
    return found


def _flip(before: Sequence[Examined], one: Examined, preparer: Preparer) -> Flip | None:
    rows = _rows(preparer, one)
    if rows is None:
        return None
    parted = {(f.index, f.position - 1) for f in preparer.row_map.forks if not f.in_prompt}
    requests, positions = preparer.row_map.pair_request[rows.pairs], preparer.row_map.pair_position[rows.pairs]
    rest = np.array([place not in parted for place in zip(requests.tolist(), positions.tolist(), strict=True)])
    count = len(rest)
    if not rest.any():
        return Flip(f"{count} unequal, each where its request's tokens part")
    rows = _Rows(rows.pairs[rest], *map(_numbers, (rows.baseline[rest], rows.target[rest])))
    doubt: Flip | None = None
    for scores in _scores(before, one):
        beside = _rows(preparer, scores, rows.pairs)
        if beside is not None and _are_near_ties(rows, beside):
            is_logits = _is_logits(scores)
            said = "a near tie: the scores of" if rows.baseline.shape[1] > 1 else "a near tie: the logits of"
            return Flip(
                f"{count} unequal, each {said} {scores.site} are closer together than their own error",
                scores.site,
                frozenset() if is_logits else _moved(rows),
                frozenset() if is_logits else frozenset(rows.pairs.tolist()),
                rows.baseline.shape[1],
            )
        is_off = beside is not None and bool((beside.baseline != beside.target).any(1).all())
        if is_off and doubt is None and _are_chosen_by_more(preparer, one, scores):
            doubt = Flip(f"{_BY_MORE} {scores.site}, which was not recorded: a near tie cannot be told", is_doubt=True)
    return doubt


def _numbers(chosen: Array) -> Array:
    """[rows, k] what was chosen: the numbers themselves, or the places of flags, [rows, n] bool."""
    if chosen.dtype != np.bool_:
        return chosen.astype(np.int64)
    most = int(chosen.sum(1).max(initial=0))
    places = np.argsort(~chosen, axis=1, kind="stable")[:, :most]
    return np.where(np.take_along_axis(chosen, places, 1), places, -1)


def _scores(before: Sequence[Examined], one: Examined) -> Iterator[Examined]:
    """What it may have been chosen from: another output of its module, or of one beside it, else the logits."""
    path = _path(one)
    near = [e for e in reversed(before) if e.spread is not None and not e.is_exact and e.pair.target is not None]
    beside = [e for e in near if path and _path(e).rpartition(".")[0] == path.rpartition(".")[0]]
    beside.sort(key=lambda e: _path(e) != path)
    yield from beside[:_NEAR]
    yield from [e for e in near if _is_logits(e)][:1]


def _is_logits(one: Examined) -> bool:
    return one.site.rpartition(":")[2] == "out[logits]" or _path(one).endswith("lm_head")


def _path(one: Examined) -> str:
    return one.site.rpartition(":")[0]


def _are_near_ties(chosen: _Rows, scores: _Rows) -> bool:
    """Whether the baseline's scores of what both runs chose are as close as the errors of the rows can turn around."""
    if not np.array_equal(chosen.pairs, scores.pairs) or chosen.baseline.shape != chosen.target.shape:
        return False
    numbers = np.stack([chosen.baseline, chosen.target])
    width = scores.baseline.shape[1]
    if numbers.shape[2] >= width or numbers.min() < 0 or numbers.max() >= width:
        return False
    with np.errstate(invalid="ignore"):
        error = np.abs(scores.baseline - scores.target).max(1)
        mine, other = (np.take_along_axis(scores.baseline, side, 1) for side in numbers)
        if np.diff(mine, axis=1).max(initial=-np.inf) > 0:  # in no order: they are a set
            mine, other = np.sort(mine, axis=1), np.sort(other, axis=1)
        gap = mine - other
        gap = np.abs(gap) if gap.shape[1] > 1 else gap  # a token that was sampled need not be the likeliest
        return bool((gap.max(1) <= 2.0 * error).all())


def _are_chosen_by_more(preparer: Preparer, one: Examined, beside: Examined) -> bool:
    """Whether the baseline's own choices are not its largest scores: DeepSeek-V3 adds a bias to them, and admits the
    experts of the best groups alone."""
    wanted = np.arange(preparer.row_map.num_pairs)
    chosen, scores = _rows(preparer, one, wanted), _rows(preparer, beside, wanted)
    if chosen is None or scores is None or not np.array_equal(chosen.pairs, scores.pairs):
        return False
    numbers, width = _numbers(chosen.baseline), scores.baseline.shape[1]
    if not 1 < numbers.shape[1] < width or numbers.min() < 0 or numbers.max() >= width:
        return False
    mine = np.take_along_axis(scores.baseline, numbers, 1).min(1)
    return bool((mine < np.sort(scores.baseline, axis=1)[:, -numbers.shape[1]]).any())


def _moved(chosen: _Rows) -> frozenset[int]:
    other = (np.sort(chosen.baseline, axis=1) != np.sort(chosen.target, axis=1)).any(1)
    return frozenset(chosen.pairs[other].tolist())


def _rows(preparer: Preparer, one: Examined, wanted: Array | None = None) -> _Rows | None:
    """The wanted rows of a site, or those that are not equal; None where a row comes twice, or none does."""
    found: list[tuple[Array, Array, Array]] = []
    for chunk in chunks.rows(preparer.prepare(one.pair)):
        if chunk.join.pairs is None or chunk.baseline.shape != chunk.target.shape:
            return None
        pairs = chunk.join.pairs[chunk.row : chunk.row + len(chunk.baseline)]
        use = (chunk.baseline != chunk.target).any(1) if wanted is None else np.isin(pairs, wanted)
        left, right = chunk.baseline[use], chunk.target[use]
        if wanted is not None:
            left, right = left.astype(np.float64), right.astype(np.float64)
        found.append((pairs[use], left, right))
    if not found:
        return None
    pairs, baseline, target = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    if not len(pairs) or (pairs[1:] == pairs[:-1]).any():
        return None
    return _Rows(pairs, baseline[order], target[order])
