"""Near ties: unequal integers that rounding explains, because they were chosen from nearly equal scores.

Integers must be equal. Integers that a module receives, such as positions, were not chosen. A sampled token may differ
for two reasons. First, its request forks right after it: later rows are then excluded, and the fork is reported.
Second, its logits are so close that the error of their row decides between the two tokens, and that error is within its
floor.

The same applies to the experts that a router selects. With e the largest error of the row, a near tie means that the
baseline's scores of both runs' c-th choices are within 2 e of each other. If a bias or expert groups influence the
choice (:mod:`.expert_choices`), both runs' choices must follow from their own scores by one rule. A token that was
routed to other experts is not comparable downstream of them, see :mod:`.exclude_rerouted_rows`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.chosen_scores import Array, Rows, masked, numbers_of, rows_of, vectors_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.expert_choices import are_copies, rule_of
from tapscope.comparator.detectors.sampled_tokens import BASIS, explained, fork_rows
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.modules import parent
from tapscope.comparator.runs.routers import ROUTERS, ExpertChoosers
from tapscope.comparator.runs.series import content_id
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.core.site import module_of, port_of

_OTHER_TERMS = "a bias or expert groups decide in addition to"
_CANNOT_BE_SHOWN = "a near tie cannot be shown"
_CLOSER_THAN_ERROR = "are closer together than their own error"
_MAX_ROW_ERROR = 0.1
"""Relative error of a row above which a different choice may be the cause: one of k equal scores is 1 / sqrt(k) of the
row."""
_MAX_SITES_BEFORE = 8
"""Maximum number of sites before a choice that are searched for its scores."""


class NearTies(Detector):
    """Explains unequal integers that were chosen from scores whose difference is smaller than their errors."""

    name = "near_ties"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        changes = explain_changes(evidence.pairs, evidence.preparer)
        return structs.replace(evidence, changes={**evidence.changes, **changes})


def explain_changes(results: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, ChoiceChange]:
    """Return site -> explanation, for the sites whose unequal integers can all be explained.

    ``results`` includes the pairs that could not be compared, because these may contain the bias of a router.
    """
    included = [result for result in results if not result.exclusion_reason]
    vectors = [
        result for result in results if result.meta.baseline is not None and len(result.meta.baseline.shape) == 1
    ]
    changes: dict[str, ChoiceChange] = {}
    seen: dict[object, str] = {}
    choosers = ExpertChoosers(module_of(one.site) for one in results)
    forks = fork_rows(preparer)
    tokens = {pair: (fork.baseline_token, fork.target_token) for pair, fork in forks.items()}
    for i, result in enumerate(included):
        if result.basis == BASIS:
            sentence, logits, is_excused = explained(preparer, included[:i], tokens)
            changes[result.site] = ChoiceChange(sentence, logits, num_choices=1, is_unexplained=not is_excused)
            continue
        of_experts = choosers.may_choose(result.site)
        if not result.num_unequal or not (
            _has_rows(result, of_experts=of_experts) if result.is_exact else _may_be_masked(result)
        ):
            continue
        if not of_experts and not _may_be_sampled(result):
            continue
        same = content_id(result.pair.baseline), content_id(result.pair.target)
        first = seen.setdefault(same, result.site) if None not in same else result.site
        change = changes.get(first) or _explain_choices(included, i, preparer, vectors, of_experts=of_experts)
        if change is not None:
            changes[result.site] = change
    return changes


def _has_rows(result: PairResult, *, of_experts: bool) -> bool:
    """Return whether the rows that differ are known.

    Row -1 stands for a tensor compared as a whole, from a host without tokens: choices of experts are then identified
    by row number.
    """
    return bool(result.extras.unequal_rows) and (of_experts or min(result.extras.unequal_rows) >= 0)


def _may_be_sampled(result: PairResult) -> bool:
    """Return whether the integers may be sampled tokens: no module receives the tokens sampled in its own step."""
    return result.is_exact and not port_of(result.site).startswith(("in[", "param[", "buffer["))


def _explain_choices(
    included: Sequence[PairResult],
    index: int,
    preparer: PairPreparer,
    vectors: Sequence[PairResult],
    *,
    of_experts: bool,
) -> ChoiceChange | None:
    result = included[index]
    rows = rows_of(preparer, result) if result.is_exact else masked(preparer, result)
    if rows is None:
        return None
    rows = Rows(rows.pairs, numbers_of(rows.baseline), numbers_of(rows.target))
    if not of_experts:
        return _of_tokens(included[:index], rows, preparer)
    count = len(rows.pairs)
    unexplained: ChoiceChange | None = None
    before = (
        included[:index] if result.is_exact else [e for e in included[: index + _MAX_SITES_BEFORE] if e is not result]
    )
    for scores in _scores(before, result):
        score_rows = rows_of(preparer, scores, rows.pairs)
        if score_rows is None:
            continue
        if _are_near_ties(rows, score_rows) or (
            _are_sets(preparer, result, scores) and _are_near_ties(rows, score_rows, are_sets=True)
        ):
            return _change(
                f"{count} unequal, each a near tie: the scores of {scores.site} {_CLOSER_THAN_ERROR}",
                result,
                scores,
                rows,
            )
        if not (score_rows.baseline != score_rows.target).any(1).all() or not _use_other_terms(
            preparer, result, scores
        ):
            continue
        if rule := _same_rule(preparer, rows, score_rows, (result, scores, _bias_of(vectors, result, scores))):
            return _change(
                f"{count} unequal, each is {rule}, which differ by no more than rounding", result, scores, rows
            )
        unexplained = unexplained or ChoiceChange(
            f"{_OTHER_TERMS} {scores.site}, and were not recorded: {_CANNOT_BE_SHOWN}", is_unexplained=True
        )
    return unexplained


def _change(sentence: str, result: PairResult, scores: PairResult, rows: Rows) -> ChoiceChange:
    """Return the change of the choices ``result`` in ``rows`` due to the errors of ``scores``."""
    changed, shape = frozenset(rows.pairs.tolist()), result.baseline.shape if result.baseline is not None else ()
    num_rows = math.prod(shape[:-1]) if min(changed) < 0 else 0
    return ChoiceChange(sentence, scores.site, _rerouted_rows(rows), changed, rows.baseline.shape[1], num_rows)


def _bias_of(vectors: Sequence[PairResult], result: PairResult, scores: PairResult) -> PairResult | None:
    """Return the site of the bias added to the scores, with one number per expert, or None.

    The bias is a buffer or an input of the module that computes the scores, or of the module that selects.
    """
    width = scores.baseline.shape[-1:] if scores.baseline is not None else ()
    for each in vectors:
        path, _, port = each.site.rpartition(":")
        if each.baseline is None or each.target is None or each.is_exact or each.baseline.shape != width:
            continue
        if (
            path in (module_of(scores.site), module_of(result.site))
            and port.startswith(("buffer[", "in["))
            and not port.endswith(".grad")
        ):
            return each
    return None


def _same_rule(
    preparer: PairPreparer, rows: Rows, score_rows: Rows, sites: tuple[PairResult, PairResult, PairResult | None]
) -> str:
    """Describe the rule by which both runs chose from their own scores; empty if there is none.

    ``sites`` contains the choices, the scores, and the bias if there is one.
    """
    choices, scores, holder = sites
    known = _choices(preparer, choices, scores)
    biases = (None, None) if holder is None else vectors_of(preparer, holder)
    if known is None or not np.array_equal(rows.pairs, score_rows.pairs):
        return ""
    if biases[0] is not None and biases[1] is not None and not are_copies(biases[0], biases[1]):
        return ""
    rule = rule_of(*known, biases[0], preparer.baseline.model_config)
    bias = np.zeros(1) if biases[1] is None else biases[1]
    return rule.text() if rule is not None and rule.explains(rows.target, score_rows.target, bias) else ""


def _choices(preparer: PairPreparer, result: PairResult, scored: PairResult) -> tuple[Array, Array] | None:
    """Return (choices [rows, k], scores [rows, width]) of the baseline for the rows that both sites have.

    Returns None if the choices are not indices into the scores.
    """
    chosen, scores = rows_of(preparer, result, every=True), rows_of(preparer, scored, every=True)
    if chosen is None or scores is None:
        return None
    _, mine, other = np.intersect1d(chosen.pairs, scores.pairs, assume_unique=True, return_indices=True)
    numbers, given = numbers_of(chosen.baseline[mine]), scores.baseline[other]
    if not len(mine) or numbers.shape[1] >= given.shape[1] or numbers.min() < 0 or numbers.max() >= given.shape[1]:
        return None
    return numbers, given


def _of_tokens(before: Sequence[PairResult], rows: Rows, preparer: PairPreparer) -> ChoiceChange | None:
    """Explain tokens that differ, one per row; None if the reason is unknown."""
    if rows.baseline.shape[1:] != (1,) or rows.target.shape[1:] != (1,):
        return None
    sides = zip(rows.baseline[:, 0].tolist(), rows.target[:, 0].tolist(), strict=True)
    sentence, logits, is_excused = explained(preparer, before, dict(zip(rows.pairs.tolist(), sides, strict=True)))
    return ChoiceChange(sentence, logits, num_choices=1, is_unexplained=not is_excused) if sentence else None


def _scores(before: Sequence[PairResult], result: PairResult) -> Iterator[PairResult]:
    """Yield sites that may contain the scores of a choice: other outputs of its module, then outputs of sibling
    modules."""
    path = module_of(result.site)
    near = [e for e in reversed(before) if e.distribution is not None and not e.is_exact and e.pair.target is not None]
    siblings = [e for e in near if path and parent(module_of(e.site)) == parent(path)]
    siblings.sort(key=lambda e: module_of(e.site) != path)
    yield from siblings[:_MAX_SITES_BEFORE]


def _are_sets(preparer: PairPreparer, result: PairResult, scores: PairResult) -> bool:
    """Return whether the baseline's choices are unordered; a few rows may be ordered by chance, but not all of them."""
    known = _choices(preparer, result, scores)
    return known is not None and _rises(np.take_along_axis(known[1], known[0], 1))


def _rises(scores: Array) -> bool:
    """Return whether a later choice has a larger score in any row."""
    return bool(np.diff(scores, axis=1).max(initial=-np.inf) > 0)


def _are_near_ties(chosen: Rows, scores: Rows, *, are_sets: bool = False) -> bool:
    """Return whether the baseline's scores of both runs' choices are so close that the errors of the rows may swap
    them.

    ``are_sets`` states that the choices are unordered, even if these rows look ordered.
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


def _use_other_terms(preparer: PairPreparer, result: PairResult, scored: PairResult) -> bool:
    """Return whether the baseline's choices are not its largest scores.

    DeepSeek-V3 adds a bias to the scores and admits only experts of the best groups.
    """
    known = _choices(preparer, result, scored)
    if known is None or known[0].shape[1] < 2:
        return False
    chosen, scores = known
    mine = np.take_along_axis(scores, chosen, 1).min(1)
    return bool((mine < np.sort(scores, axis=1)[:, -chosen.shape[1]]).any())


def _rerouted_rows(chosen: Rows) -> frozenset[int]:
    other = (np.sort(chosen.baseline, axis=1) != np.sort(chosen.target, axis=1)).any(1)
    return frozenset(chosen.pairs[other].tolist())


def _may_be_masked(result: PairResult) -> bool:
    """Return whether the site may be a router's scores with zeros for experts that were not selected, as in Llama 4.

    If the selection differs, the row has almost no element in common with the baseline's row.
    """
    is_router = module_of(result.site).rpartition(".")[2] in ROUTERS
    return (
        is_router
        and result.distribution is not None
        and result.rows.num_compared > 0
        and result.distribution.errors[-1] > _MAX_ROW_ERROR
    )
