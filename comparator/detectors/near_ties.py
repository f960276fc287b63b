"""Near ties: unequal integers that rounding explains, because they were chosen from nearly equal scores.

Integers must be equal. Those that a module receives, such as positions, were not chosen. Two things excuse a sampled
token that differs: its request forks right after it (then the rows after it are left out, and the fork is reported), or
the logits it was chosen from are so close that the error of their row decides between the two tokens, and that error
is within its floor.

The same holds for the experts that a router chooses. With e the largest error of the row, the baseline's scores of both
runs' c-th choices are within 2 e of each other at a near tie. Where a bias or expert groups decide too
(:mod:`.expert_choices`), both runs' choices must follow from their own scores by one rule. A token that went to other
experts is not comparable downstream of them, see :mod:`.exclude_rerouted_rows`.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.chosen_scores import Array, Rows, masked, numbers_of, rows_of, vectors_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.expert_choices import are_copies, rule_of
from tapscope.comparator.detectors.sampled_tokens import BASIS, explained, parted
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.routers import ROUTERS, ExpertChoosers
from tapscope.comparator.runs.series import content_id
from tapscope.comparator.verdict.choice_change import ChoiceChange

_BY_MORE = "a bias or expert groups decide in addition to"
_NOT_TOLD = "a near tie cannot be shown"
_CLOSE = "are closer together than their own error"
_APART = 0.1
"""Relative error of a row beyond which another choice may be the cause: of k alike scores one is 1 / sqrt(k)."""
_NEAR = 8
"""Sites before a choice among which its scores are looked for."""


class NearTies(Detector):
    """Explains unequal integers that were chosen from scores closer together than their errors."""

    name = "near_ties"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """See :class:`.Detector`."""
        found = explain_changes(evidence.pairs, evidence.preparer)
        return structs.replace(evidence, changes={**evidence.changes, **found})


def explain_changes(everything: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, ChoiceChange]:
    """Site -> explanation, for the sites whose unequal integers all have one; of ``everything`` those that do not meet
    may still hold a bias."""
    examined = [one for one in everything if not one.exclusion_reason]
    vectors = [one for one in everything if one.meta.baseline is not None and len(one.meta.baseline.shape) == 1]
    found: dict[str, ChoiceChange] = {}
    seen: dict[object, str] = {}
    choosers = ExpertChoosers(map(_path, everything))
    forks = parted(preparer)
    tokens = {pair: (fork.baseline_token, fork.target_token) for pair, fork in forks.items()}
    for i, one in enumerate(examined):
        if one.basis == BASIS:
            said, logits, is_excused = explained(preparer, examined[:i], tokens)
            found[one.site] = ChoiceChange(said, logits, num_choices=1, is_unexplained=not is_excused)
            continue
        # Rows without a place are tensors compared whole.
        has_place = (
            one.extras.unequal_rows and min(one.extras.unequal_rows) >= 0 if one.is_exact else _may_be_masked(one)
        )
        of_experts = choosers.may_choose(one.site)
        if not one.num_unequal or not has_place or not (of_experts or _may_be_sampled(one)):
            continue
        same = content_id(one.pair.baseline), content_id(one.pair.target)
        first = seen.setdefault(same, one.site) if None not in same else one.site
        change = found.get(first) or _flip(examined, i, preparer, vectors, of_experts=of_experts)
        if change is not None:
            found[one.site] = change
    return found


def _may_be_sampled(one: PairResult) -> bool:
    """Whether its integers may be tokens that were sampled: no module is given those of its own step."""
    return one.is_exact and not one.site.rpartition(":")[2].startswith(("in[", "param[", "buffer["))


def _flip(
    examined: Sequence[PairResult],
    index: int,
    preparer: PairPreparer,
    vectors: Sequence[PairResult],
    *,
    of_experts: bool,
) -> ChoiceChange | None:
    one = examined[index]
    rows = rows_of(preparer, one) if one.is_exact else masked(preparer, one)
    if rows is None:
        return None
    rows = Rows(rows.pairs, numbers_of(rows.baseline), numbers_of(rows.target))
    if not of_experts:
        return _of_tokens(examined[:index], rows, preparer)
    count = len(rows.pairs)
    doubt: ChoiceChange | None = None
    before = examined[:index] if one.is_exact else [e for e in examined[: index + _NEAR] if e is not one]
    for scores in _scores(before, one):
        beside = rows_of(preparer, scores, rows.pairs)
        if beside is None:
            continue
        if _are_near_ties(rows, beside) or (
            _are_sets(preparer, one, scores) and _are_near_ties(rows, beside, are_sets=True)
        ):
            return _change(f"{count} unequal, each a near tie: the scores of {scores.site} {_CLOSE}", scores, rows)
        if not (beside.baseline != beside.target).any(1).all() or not _are_chosen_by_more(preparer, one, scores):
            continue
        if rule := _same_rule(preparer, rows, beside, (one, scores, _bias_of(vectors, one, scores))):
            return _change(f"{count} unequal, each is {rule}, which are off by no more than rounding", scores, rows)
        doubt = doubt or ChoiceChange(
            f"{_BY_MORE} {scores.site}, and were not recorded: {_NOT_TOLD}", is_unexplained=True
        )
    return doubt


def _change(sentence: str, scores: PairResult, rows: Rows) -> ChoiceChange:
    """The flip of ``rows``, whose choices the errors of ``scores`` turned."""
    return ChoiceChange(sentence, scores.site, _moved(rows), frozenset(rows.pairs.tolist()), rows.baseline.shape[1])


def _bias_of(vectors: Sequence[PairResult], one: PairResult, scores: PairResult) -> PairResult | None:
    """The vector beside the scores, a number for each: their module holds it, or it is given to that module or to the
    one that chooses."""
    width = scores.baseline.shape[-1:] if scores.baseline is not None else ()
    for each in vectors:
        path, _, port = each.site.rpartition(":")
        if each.baseline is None or each.target is None or each.is_exact or each.baseline.shape != width:
            continue
        if path in (_path(scores), _path(one)) and port.startswith(("buffer[", "in[")) and not port.endswith(".grad"):
            return each
    return None


def _same_rule(
    preparer: PairPreparer, rows: Rows, beside: Rows, sites: tuple[PairResult, PairResult, PairResult | None]
) -> str:
    """The rule by which both runs chose from their own scores, in words; empty where there is none. ``sites``: of what
    was chosen, of the scores, and of a bias."""
    one, scores, holder = sites
    known = _choices(preparer, one, scores)
    biases = (None, None) if holder is None else vectors_of(preparer, holder)
    if known is None or not np.array_equal(rows.pairs, beside.pairs):
        return ""
    if biases[0] is not None and biases[1] is not None and not are_copies(biases[0], biases[1]):
        return ""
    rule = rule_of(*known, biases[0], preparer.baseline.model_config)
    bias = np.zeros(1) if biases[1] is None else biases[1]
    return rule.text() if rule is not None and rule.explains(rows.target, beside.target, bias) else ""


def _choices(preparer: PairPreparer, one: PairResult, beside: PairResult) -> tuple[Array, Array] | None:
    """(choices [rows, k], scores [rows, width]) of the baseline, of all rows that are read of both; None where the
    choices are none of the scores."""
    wanted = np.arange(preparer.row_map.num_pairs)
    chosen, scores = rows_of(preparer, one, wanted), rows_of(preparer, beside, wanted)
    if chosen is None or scores is None:
        return None
    _, mine, other = np.intersect1d(chosen.pairs, scores.pairs, assume_unique=True, return_indices=True)
    numbers, given = numbers_of(chosen.baseline[mine]), scores.baseline[other]
    if not len(mine) or numbers.shape[1] >= given.shape[1] or numbers.min() < 0 or numbers.max() >= given.shape[1]:
        return None
    return numbers, given


def _of_tokens(before: Sequence[PairResult], rows: Rows, preparer: PairPreparer) -> ChoiceChange | None:
    """Of tokens, one a row, that differ; None where nothing is known of why they do."""
    if rows.baseline.shape[1:] != (1,) or rows.target.shape[1:] != (1,):
        return None
    sides = zip(rows.baseline[:, 0].tolist(), rows.target[:, 0].tolist(), strict=True)
    said, logits, is_excused = explained(preparer, before, dict(zip(rows.pairs.tolist(), sides, strict=True)))
    return ChoiceChange(said, logits, num_choices=1, is_unexplained=not is_excused) if said else None


def _scores(before: Sequence[PairResult], one: PairResult) -> Iterator[PairResult]:
    """What experts may have been chosen from: another output of its module, or of one beside it."""
    path = _path(one)
    near = [e for e in reversed(before) if e.distribution is not None and not e.is_exact and e.pair.target is not None]
    beside = [e for e in near if path and _path(e).rpartition(".")[0] == path.rpartition(".")[0]]
    beside.sort(key=lambda e: _path(e) != path)
    yield from beside[:_NEAR]


def _path(one: PairResult) -> str:
    return one.site.rpartition(":")[0]


def _are_sets(preparer: PairPreparer, one: PairResult, scores: PairResult) -> bool:
    """Whether the baseline's choices are in no order: a few may be in order by accident, all are not."""
    known = _choices(preparer, one, scores)
    return known is not None and _rises(np.take_along_axis(known[1], known[0], 1))


def _rises(scores: Array) -> bool:
    """Whether what was chosen later has the larger score anywhere."""
    return bool(np.diff(scores, axis=1).max(initial=-np.inf) > 0)


def _are_near_ties(chosen: Rows, scores: Rows, *, are_sets: bool = False) -> bool:
    """Whether the baseline's scores of what both runs chose are as close as the errors of the rows can turn around.

    ``are_sets``: what was chosen is in no order, though it may look so here.
    """
    if not np.array_equal(chosen.pairs, scores.pairs) or chosen.baseline.shape != chosen.target.shape:
        return False
    numbers = np.stack([chosen.baseline, chosen.target])
    width = scores.baseline.shape[1]
    if numbers.shape[2] >= width or numbers.min() < 0 or numbers.max() >= width:
        return False
    with np.errstate(invalid="ignore"):
        error = np.abs(scores.baseline - scores.target).max(1)
        mine, other = (np.take_along_axis(scores.baseline, side, 1) for side in numbers)
        if are_sets or _rises(mine):
            mine, other = np.sort(mine, axis=1), np.sort(other, axis=1)
        gap = mine - other
        return bool((np.abs(gap).max(1) <= 2.0 * error).all())


def _are_chosen_by_more(preparer: PairPreparer, one: PairResult, beside: PairResult) -> bool:
    """Whether the baseline's own choices are not its largest scores: DeepSeek-V3 adds a bias to them, and admits the
    experts of the best groups alone."""
    known = _choices(preparer, one, beside)
    if known is None or known[0].shape[1] < 2:
        return False
    chosen, scores = known
    mine = np.take_along_axis(scores, chosen, 1).min(1)
    return bool((mine < np.sort(scores, axis=1)[:, -chosen.shape[1]]).any())


def _moved(chosen: Rows) -> frozenset[int]:
    other = (np.sort(chosen.baseline, axis=1) != np.sort(chosen.target, axis=1)).any(1)
    return frozenset(chosen.pairs[other].tolist())


def _may_be_masked(one: PairResult) -> bool:
    """Whether it may be a router's scores of which all but those of the chosen experts are zero, as Llama 4 has them:
    where the choice is another one, a row has hardly anything in common with what it was."""
    is_router = _path(one).rpartition(".")[2] in ROUTERS
    return (
        is_router
        and one.distribution is not None
        and one.rows.num_compared > 0
        and one.distribution.errors[-1] > _APART
    )
