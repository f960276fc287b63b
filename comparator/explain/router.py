"""Router: explain differences in how a mixture-of-experts router turns scores into weights and chosen experts.

Top-k of a softmax or sigmoid, normalized or not; bias and groups as in DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion, rounding_noise
from tapscope.comparator.explain.predictions import Prediction, select_prediction
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.region_text import spans
from tapscope.comparator.explain.scale import is_router, number
from tapscope.comparator.explain.token_slots import rows_like
from tapscope.comparator.verdict.explanation import Tested

Array = np.ndarray[Any, Any]

_MIN_AGREEMENT = 0.99
"""Minimum fraction of rows whose experts a rule must reproduce."""
_MIN_RANK_AGREEMENT = 0.5
"""Maximum fraction of rows in which a changed rank of the top-k may still agree."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_MIN_DIFFERING_ROWS = 0.02
"""Minimum fraction of rows with different experts; below it there is no choice to explain."""


class RouterOutput(NamedTuple):
    """The output of a router in one run."""

    logits: Array
    """[rows, experts] scores before softmax or sigmoid."""
    weights: Array
    """[rows, k] weights of the chosen experts."""
    chosen: Array
    """[rows, k] indices of the chosen experts."""
    bias: Array | None
    """[experts] correction bias; None if it was not recorded."""


def explain_router(region: ErrorRegion, sites: SiteReader, configs: Sequence[Mapping[str, Any]]) -> Tested | None:
    """Return the explanation of a router's weights or choices from its scores; None for other sites, or if no cause
    fits."""
    path, _, port = region.sample.site.rpartition(":")
    if not is_router(region.sample.site) or not port.startswith("out["):
        return None
    sides = [_recorded_output(path, sites, region, side) for side in (0, 1)]
    one, two = sides
    if one is None or two is None:
        return None
    groups = next(((c["n_group"], c["topk_group"]) for c in configs if c.get("n_group") and c.get("topk_group")), None)
    choice = explain_choice(one, two, groups, region.rows)
    if choice:
        return Tested("router", choice, 0.0)
    if port != "out[1]":
        return None
    return explain_weights(region, one, two)


def explain_weights(region: ErrorRegion, one: RouterOutput, two: RouterOutput) -> Tested | None:
    """Return the explanation of the target's weights, judged in all columns of the affected rows."""
    whole = replace(region, columns=np.arange(region.sample.baseline.shape[1]))
    noise = score_noise(region, two)
    causes = predictions(one, two, noise, region.rows)
    return select_prediction(whole, (c._replace(values=whole.cut(c.values)) for c in causes), noise)


def score_noise(region: ErrorRegion, two: RouterOutput) -> float:
    """Return the relative rounding error of weights computed from the target's own scores; input errors do not
    matter."""
    size = float(np.median(np.abs(two.logits).max(axis=1)))
    return rounding_noise(region.sample.dtypes) * max(size, 1.0)


def predictions(one: RouterOutput, two: RouterOutput, noise: float, rows: Array) -> Iterator[Prediction]:
    """Yield the target's weights under formulas that differ from the baseline's; factors are fitted on the affected
    ``rows``."""
    fitted = [
        (*variant, *_fit(_weights(one, *variant), one.weights)) for variant in product((False, True), (False, True))
    ]
    is_sigmoid, is_normal, factor, off = min(fitted, key=lambda variant: variant[3])
    if not off < max(4 * noise, 1e-5):
        return
    plain = factor * _weights(two, is_sigmoid, is_normal)
    other = _weights(two, is_sigmoid, not is_normal)
    text = "not normalized, they do not sum to 1" if is_normal else "normalized, they sum to 1, baseline's do not"
    yield Prediction("router", f"the router's weights are {text} in target", factor * other, 0)
    names = ("sigmoid", "softmax") if is_sigmoid else ("softmax", "sigmoid")
    text = f"the router takes a {names[1]} of its scores in target, baseline a {names[0]}"
    yield Prediction("router", text, factor * _weights(two, not is_sigmoid, is_normal), 0)
    count = plain.shape[1]
    if count > 1:
        first = np.zeros_like(plain)
        first[:, 0] = plain.sum(axis=1)
        yield Prediction(
            "router", f"the router's weights all go to one expert in target (top-1, not {count})", first, 0
        )
        equal = np.repeat(plain.mean(axis=1, keepdims=True), count, axis=1)
        yield Prediction("router", "the router's weights are all equal in target", equal, 0)
        level, _ = _fit(equal[rows], two.weights[rows])
        text = f"the router's weights are all equal in target, {level:.4g} × the mean of baseline's"
        yield Prediction("router", text, level * equal, 1)
        yield Prediction("router", "the router's weights are in reverse order in target", plain[:, ::-1], 0)
        last = plain.copy()
        last[:, -1] = 0.0
        yield Prediction("router", "the router's weight of the last chosen expert is zero in target", last, 0)
    again, _ = _fit(plain[rows], two.weights[rows])
    if abs(again - 1.0) <= noise:
        return  # the weights follow from the choice of experts
    missing = f": the scaling factor {factor:.4g} is missing" if abs(again * factor - 1) < 0.01 else ""
    text = f"the router's weights are {number(again, noise)} × baseline's{missing}"
    yield Prediction("router", text, again * plain, 2)


def explain_choice(one: RouterOutput, two: RouterOutput, groups: tuple[int, int] | None, rows: Array) -> str:
    """Return why the target's experts in ``rows`` differ from the experts that the baseline's rule gives for the
    target's scores.

    Empty if they do not differ, or if no rule reproduces either side.
    """
    count, size = one.chosen.shape[1], one.logits.shape[1]
    two = RouterOutput(two.logits[rows], two.weights[rows], two.chosen[rows], two.bias)
    if not _share_of_different_rows(one.chosen[rows], two.chosen) > _MIN_DIFFERING_ROWS:
        return ""
    rules = [
        (bias, group)
        for bias in ((None,) if one.bias is None else (one.bias, None))
        for group in ((None,) if groups is None else (groups, None))
    ]
    own = next((rule for rule in rules if _agree(best(one.logits, count, *rule), one.chosen)), None)
    if own is None:
        return ""
    bias, group = own
    if not _share_of_different_rows(best(two.logits, count, bias, group), two.chosen) > _MIN_DIFFERING_ROWS:
        return ""  # the target's own scores explain the choice
    chosen = best(two.logits, count, *own)
    if (
        bias is not None
        and two.bias is not None
        and two.bias.any()
        and _agree(best(two.logits, count, two.bias, group), two.chosen)
    ):
        differs = np.flatnonzero(bias != two.bias)
        return f"the router's correction bias differs for {spans('expert', differs)}" if len(differs) else ""
    others = {"the router takes the expert after the chosen one in target": (chosen + 1) % size}
    if (place := _only_other(best(one.logits, count, *own), one.chosen, chosen, two.chosen)) is not None:
        text = f"the router's {_ORDINALS[place]} chosen expert differs in target, the others are the same"
        others[text] = two.chosen
    if bias is not None:
        others["the router's bias is not used in target: experts are those of the scores alone"] = best(
            two.logits, count, None, group
        )
    if group is not None:
        text = "the router admits all groups of experts in target"
        others[f"{text}, baseline {group[1]} of {group[0]}"] = best(two.logits, count, bias, None)
    explanations = [text for text, chosen in others.items() if _agree(chosen, two.chosen)]
    return explanations[0] if len(explanations) == 1 else ""


def _only_other(rule: Array, own: Array, expected: Array, given: Array) -> int | None:
    """Return the only rank of the top-k at which the target's experts mostly differ from the ``expected`` ones.

    None if there is no such rank, or if the baseline's ``own`` order is not that of its ``rule``.
    """
    if rule.shape[1] < 2 or rule.shape[1] > len(_ORDINALS) or (rule == own).mean() <= _MIN_AGREEMENT:
        return None
    same = (expected == given).mean(axis=0)
    off = np.flatnonzero(same <= _MIN_AGREEMENT)
    return int(off[0]) if len(off) == 1 and same[off[0]] < _MIN_RANK_AGREEMENT else None


def best(logits: Array, count: int, bias: Array | None, groups: tuple[int, int] | None) -> Array:
    """Return the experts with the largest scores as [rows, count].

    With ``groups`` (number of groups, number of admitted groups), only groups with the largest sum of their top two
    scores are admitted.
    """
    scores = logits if bias is None and groups is None else 1.0 / (1.0 + np.exp(-logits))
    scores = scores if bias is None else scores + bias
    if groups is not None and scores.shape[1] % groups[0] == 0:
        split = scores.reshape(len(scores), groups[0], -1)
        worth = np.sort(split, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-worth, axis=1, kind="stable")[:, : groups[1]]
        allowed = np.zeros(worth.shape, bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        scores = np.where(np.repeat(allowed, split.shape[2], axis=1), scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _share_of_different_rows(one: Array, two: Array) -> float:
    """Return the fraction of rows whose sets of experts differ."""
    return float((np.sort(one, axis=1) != np.sort(two, axis=1)).any(axis=1).mean()) if one.shape == two.shape else 1.0


def _agree(one: Array, two: Array) -> bool:
    return _share_of_different_rows(one, two) <= 1.0 - _MIN_AGREEMENT


def _weights(given: RouterOutput, is_sigmoid: bool, is_normal: bool) -> Array:
    if is_sigmoid:
        scores = 1.0 / (1.0 + np.exp(-given.logits))
    else:
        raised = np.exp(given.logits - given.logits.max(axis=1, keepdims=True))
        scores = raised / raised.sum(axis=1, keepdims=True)
    weights: Array = np.take_along_axis(scores, given.chosen, axis=1)
    return weights / weights.sum(axis=1, keepdims=True) if is_normal else weights


def _fit(made: Array, wanted: Array) -> tuple[float, float]:
    """Return (fitted factor, remaining relative error)."""
    factor = float((made * wanted).sum() / max(float((made * made).sum()), 1e-300))
    off = float(((factor * made - wanted) ** 2).sum()) / max(float((wanted**2).sum()), 1e-300)
    return factor, off**0.5


def _recorded_output(path: str, sites: SiteReader, region: ErrorRegion, side: int) -> RouterOutput | None:
    outputs = [sites.slots(f"{path}:out[{i}]") for i in range(3)]
    parts = [rows_like(both[side], region.sample) for both in outputs if both is not None]
    known = [part for part in parts if part is not None]
    if len(known) != 3 or known[1].shape != known[2].shape or known[0].shape[1] < known[1].shape[1]:
        return None
    chosen = known[2].astype(np.int64)
    if not np.isfinite(known[0]).all() or chosen.min() < 0 or chosen.max() >= known[0].shape[1]:
        return None
    return RouterOutput(known[0], known[1], chosen, sites.vector(f"{path}:buffer[e_score_correction_bias]", side))
