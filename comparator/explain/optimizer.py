"""Optimizer: find the update rule that explains a parameter's update.

SGD with momentum (Sutskever et al. 2013) and Nesterov momentum, as implemented in torch; Adam (Kingma and Ba 2015,
arXiv 1412.6980) with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.95, 0.95))
"""Adam betas used in training recipes."""
EPSILON = 1e-8
COUPLED_DECAYS = (0.1, 0.01, 0.001, 0.0001)
"""Coupled weight decays (added to the gradient) that are tried."""
MIN_RESIDUAL_GAP = 60.0
"""Minimum gap in residual energy to the second best rule, in units of the mean residual energy per value."""
MAX_RESIDUAL = 0.05
"""Fraction of an update's energy that a rule may leave."""


class Trajectory(NamedTuple):
    """One parameter over the steps: values after each update, and gradients."""

    values: Sequence[Array]
    gradients: Sequence[Array]


class Rule(NamedTuple):
    """One update rule and its terms for a trajectory; the update is a linear combination of the terms."""

    name: str
    """Sentence about a target that follows this rule; empty for the baseline's rule."""
    parts: Sequence[Array]


class Fit(NamedTuple):
    """A rule with fitted coefficients."""

    rule: Rule
    factors: Array
    left: float
    """Residual energy."""


def explained(baseline: Trajectory, target: Trajectory, at: int) -> str:
    """Return how the rule of the target's update ``at`` (from step at - 1 to at) differs from the baseline's; empty if
    unknown."""
    frozen = _frozen(baseline, target)
    if frozen:
        return frozen
    if not 0 < at < min(len(baseline.values), len(target.values)):
        return ""
    rule = _adam(baseline, target, at)
    return rule or _sgd(baseline, target, at)


def _frozen(baseline: Trajectory, target: Trajectory) -> str:
    """Return a sentence if the target is never updated; otherwise empty."""
    if len(target.values) < 2 or any(not np.array_equal(target.values[0], one) for one in target.values[1:]):
        return ""
    if not any(gradient.any() for gradient in target.gradients):
        return ""
    moved = not np.array_equal(baseline.values[0], baseline.values[-1])
    return "the parameter is not updated in target: it is unchanged from step to step" if moved else ""


def _adam(baseline: Trajectory, target: Trajectory, at: int) -> str:
    own = _best(baseline, at, [Rule(str(i), _adam_parts(baseline, at, betas)) for i, betas in enumerate(BETAS)])
    if own is None:
        return ""
    betas = BETAS[int(own.rule.name)]
    best = _best(target, at, list(_adam_rules(target, at, betas)))
    if best is None:
        return ""
    if best.rule.name:
        return best.rule.name
    return _rate(own, best)


def _adam_rules(one: Trajectory, at: int, betas: tuple[float, float]) -> Iterator[Rule]:
    """Yield the baseline's rule, then the other rules."""
    yield Rule("", _adam_parts(one, at, betas))
    text = f"Adam's betas are swapped in target ({betas[1]:g}, {betas[0]:g} for {betas[0]:g}, {betas[1]:g})"
    yield Rule(text, _adam_parts(one, at, (betas[1], betas[0])))
    text = "Adam's moments are not corrected for their start from zero in target (no bias correction)"
    yield Rule(text, _adam_parts(one, at, betas, corrected=False))
    text = f"Adam's moments are lost before step {at} in target: its state was reset to zero"
    yield Rule(text, _adam_parts(one, at, betas, first=at))
    text = "target adds weight decay to the gradient (Adam's, coupled), baseline to the parameter (AdamW)"
    for decay in COUPLED_DECAYS:
        yield Rule(text, _adam_parts(one, at, betas, coupled=decay)[:1])


def _adam_parts(
    one: Trajectory,
    at: int,
    betas: tuple[float, float],
    *,
    first: int = 0,
    corrected: bool = True,
    coupled: float = 0.0,
) -> list[Array]:
    """Return [Adam's update for a learning rate of 1, the term of decoupled weight decay]."""
    mean = np.zeros_like(one.gradients[0])
    square = np.zeros_like(mean)
    for step in range(first, at + 1):
        before = one.values[
            max(step - 1, 0)
        ]  # the value before the first update is not recorded; the value after it is close
        gradient = one.gradients[step] + coupled * before
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
    count = at + 1 - first
    if corrected:
        mean, square = mean / (1 - betas[0] ** count), square / (1 - betas[1] ** count)
    return [mean / (np.sqrt(square) + EPSILON), one.values[at - 1]]


def _sgd(baseline: Trajectory, target: Trajectory, at: int) -> str:
    """Return how an SGD update differs: fits this step's gradient, the previous gradient, and weight decay."""
    if at != 1:
        return ""
    sides = [
        _fit(one, at, Rule("", [one.gradients[at], one.gradients[at - 1], one.values[at - 1]]))
        for one in (baseline, target)
    ]
    if any(side.left > MAX_RESIDUAL * _energy(one, at) for side, one in zip(sides, (baseline, target), strict=True)):
        return ""
    (now, before, _), (other, earlier, _) = (side.factors for side in sides)
    if not now or not other:
        return ""
    momentum, seen = before / now, earlier / other
    if momentum > 0.3 and abs(seen) < 0.05 * momentum:
        text = "momentum is not kept in target: the gradient of the step before does not count"
        return f"{text} (baseline's momentum is {momentum:.2g})"
    if momentum > 0.3 and abs(other / now - (1 + momentum)) < 0.03 and abs(earlier / now - momentum**2) < 0.03:
        return f"target takes Nesterov's momentum, baseline plain momentum ({momentum:.2g})"
    if abs(seen - momentum) < 0.03 * max(abs(momentum), 0.1):
        return _rated(other / now)
    return ""


def _rate(own: Fit, other: Fit) -> str:
    return _rated(float(other.factors[0] / own.factors[0])) if own.factors[0] else ""


def _rated(factor: float) -> str:
    same = abs(factor - 1) <= 0.02
    return "" if same else f"the learning rate is {factor:.3g} × baseline's: the update follows the same rule"


def _update(one: Trajectory, at: int) -> Array:
    update: Array = one.values[at] - one.values[at - 1]
    return update


def _energy(one: Trajectory, at: int) -> float:
    return float((_update(one, at) ** 2).sum())


def _fit(one: Trajectory, at: int, rule: Rule) -> Fit:
    parts = np.stack([part.ravel() for part in rule.parts], axis=1)
    update = _update(one, at).ravel()
    factors = np.linalg.lstsq(parts, update, rcond=None)[0]
    return Fit(rule, factors, float(((update - parts @ factors) ** 2).sum()))


def _best(one: Trajectory, at: int, rules: Sequence[Rule]) -> Fit | None:
    """Return the rule that explains an update clearly better than every rule with another name; None if none does."""
    fits = [_fit(one, at, rule) for rule in rules]
    best = min(fits, key=lambda fit: fit.left)
    energy = _energy(one, at)
    if best.left > MAX_RESIDUAL * energy:
        return None
    variance = best.left / max(one.values[0].size, 1)
    for fit in fits:
        if fit.rule.name != best.rule.name and fit.left - best.left <= MIN_RESIDUAL_GAP * variance:
            return None
    return best
