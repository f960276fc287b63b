"""Expert choices: rules of top-k routing with a bias or with expert groups.

DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) turns logits into scores, adds a load-balancing bias, admits only the
experts of the best groups, and selects the largest. A run does not record the rule of its model, so the rule is
inferred: it must derive the baseline's choices from the baseline's own scores. If the same rule derives the target's
choices from the target's scores, the selection is correct, and the difference is due to the scores.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

Array = np.ndarray[Any, Any]

_TIE_RTOL = 1e-5
"""Maximum difference between merits that float32 rounding may swap, relative to the largest merit."""
_BIAS_ROUNDING = 2.0**-8
"""Maximum error of a bias that was rounded to bfloat16, relative to its largest element."""


def _sigmoid(scores: Array) -> Array:
    weights: Array = 1.0 / (1.0 + np.exp(-scores))
    return weights


def _softmax(scores: Array) -> Array:
    grown: Array = np.exp(scores - scores.max(1, keepdims=True))
    total: Array = grown.sum(1, keepdims=True)
    return np.divide(grown, total)


_SCORE_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "": lambda scores: scores,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}
_GROUP_SCORES: Mapping[str, int] = {"two best": 2, "best": 1}
"""Name of a group score -> number of the group's best experts that it sums: as in DeepSeek-V3 and DeepSeek-V2."""


class ChoiceRule(Struct, frozen=True):
    """A rule that selects experts from scores [rows, experts]."""

    score_function: str
    bias: bool
    groups: int
    admitted: int
    """Number of groups whose experts are admitted."""
    group_score: str

    def text(self) -> str:
        """Describe the rule for a note."""
        parts = [
            f"{self.score_function} of the scores" if self.score_function else "the scores",
            *(["the recorded bias"] * self.bias),
        ]
        among = (
            f" among the {self.admitted} groups of {self.groups} with the {self.group_score}" if self.groups > 1 else ""
        )
        return f"the largest of {' plus '.join(parts)}{among}"

    def merits(self, scores: Array, bias: Array) -> Array:
        """Return the values of which the largest are selected, [rows, experts]; -inf for experts that are not
        admitted."""
        merits = _SCORE_FUNCTIONS[self.score_function](scores) + (bias if self.bias else 0.0)
        if self.groups < 2:
            return merits
        by_group = merits.reshape(len(merits), self.groups, -1)
        group_score = np.sort(by_group, axis=2)[:, :, -_GROUP_SCORES[self.group_score] :].sum(2)
        least = np.sort(group_score, axis=1)[:, -self.admitted, None]
        return np.where((group_score >= least)[:, :, None], by_group, -np.inf).reshape(merits.shape)

    def explains(self, chosen: Array, scores: Array, bias: Array) -> bool:
        """Return whether the choices [rows, k] follow from the scores, in any order."""
        merits = self.merits(scores, bias)
        mine = np.sort(np.take_along_axis(merits, chosen, 1), axis=1)
        best = np.sort(merits, axis=1)[:, -chosen.shape[1] :]
        return bool((np.abs(mine - best) <= _TIE_RTOL * np.abs(best).max()).all())


def rule_of(chosen: Array, scores: Array, bias: Array | None, config: Mapping[str, int | float]) -> ChoiceRule | None:
    """Return the simplest rule that derives all of ``chosen`` [rows, k] from the scores [rows, experts], or None."""
    groups, admitted = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    if scores.shape[1] % groups or scores.shape[1] // groups < max(_GROUP_SCORES.values()):
        groups = 1
    grouped = [(1, 1)] if groups == 1 else [(groups, admitted), (1, 1)]
    biases = (False,) if bias is None else (True, False)
    for biased, (count, few), score_function, group_score in itertools.product(
        biases, grouped, _SCORE_FUNCTIONS, _GROUP_SCORES
    ):
        rule = ChoiceRule(score_function, biased, count, few, group_score)
        if rule.explains(chosen, scores, np.zeros(1) if bias is None else bias):
            return rule
    return None


def are_copies(one: Array, other: Array) -> bool:
    """Return whether two biases are equal up to one rounding."""
    return one.shape == other.shape and bool(
        (np.abs(one - other) <= _BIAS_ROUNDING * np.abs(one).max(initial=0.0)).all()
    )
