"""Gradient identity: compares a parameter's gradient with the tensors from which its own run computed it.

Between two runs, a gradient may differ by the rounding of the whole backward. Within its own run, it may differ from
the product of the output's gradient and the input by the rounding of one sum only (:mod:`.linear_gradients`). If the
identity holds in one run but not in the other, the gradient of the other run is wrong, however small the error is.

If the identity holds in both runs and all inputs agree, the gradient is not blamed, even if some rows have large
relative errors: their terms cancel. This covers errors as large as those of the inputs if each has its own direction.
An error that all inputs share appears only in the sum, and remains a finding.

Rows may be missing, steps accumulated, all gradients clipped or scaled. The identity then holds for no parameter, or
for all of them up to one factor. The factor is divided out. A run in which the identity does not hold for most
parameters is not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.linear_gradients import MAX_ELEMENTS, Product, norm_product, product
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict, as_different
from tapscope.core.errors import DataError
from tapscope.core.site import port_of

MAX_HOLDING_ERROR = 2.0
"""Maximum error of an identity that holds, in epsilons of the coarsest dtype of either run: half an epsilon for the
result, the rest for partial sums stored in that dtype."""
MIN_VIOLATION = 4.0 * MAX_HOLDING_ERROR
"""Minimum error of an identity that is violated."""
_MIN_EPSILON = 2.0**-16
"""Lower bound of the epsilon: rounding of a float32 sum over very many rows."""
_LOOSE_FLOOR = 0.02
"""Row floor above which a wrong gradient may be hidden."""
_MAX_ELEMENTS = 1 << 26
"""Maximum number of elements read in total."""
_MIN_PARAMETERS = 3
"""Minimum number of parameters from which to infer the usual gain and error of a run."""
_ROW_TESTS = frozenset({"median_row", "p90_p98_row", "max_row", "element", "max_element"})
_VALUES = ("out", "out[0]")
_LINEAR = 3
"""Maximum number of tensors in the identity of a linear map."""
_OUTPUTS = ("out.grad", "out[0].grad")

_Side = Mapping[int, Product]
"""Step -> product, of one run."""


class _Checked(Struct, frozen=True):
    """A parameter whose gradient was recomputed in both runs."""

    finding: Finding
    sides: tuple[_Side, _Side]
    sources: tuple[PairResult, ...]
    """The tensors from which the gradient was computed."""

    @property
    def is_explained(self) -> bool:
        """Whether the errors of these tensors explain the gradient's error, if each row's error has its own
        direction."""
        error = math.hypot(*(part.distribution.errors[-1] for part in self.sources if part.distribution))
        one, two = ([side[step] for step in sorted(side)] for side in self.sides)
        return len(one) == len(two) and all(a.leaves(b, error) for a, b in zip(one, two, strict=True))


class GradientIdentity(Detector):
    """Compares a parameter's gradient with the gradients and inputs from which its own run computed it."""

    name = "gradient_identity"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        findings = with_identities(evidence.findings, evidence.judged, evidence.preparer)
        return structs.replace(evidence, findings=findings)


def with_identities(
    findings: Sequence[Finding], examined: Sequence[PairResult], preparer: PairPreparer
) -> list[Finding]:
    """Return the findings, corrected by the gradient identities.

    A gradient that violates its identity in exactly one run becomes ``differs``. A gradient that satisfies its identity
    in both runs becomes ``close`` if the tensors from which it was computed agree.
    """
    reviewed = list(findings)
    if not any(_is_loose(one) or _is_accused(one) for one in findings):
        return reviewed
    bad = {one.site for one in findings if one.verdict.is_bad}
    checked = list(_checked(findings, examined, preparer))
    gains = [_gains([one.sides[side] for one in checked]) for side in (0, 1)]
    errors = [tuple(_worst(one, side, gains[side]) for side in (0, 1)) for one in checked]
    if not all(_holds_mostly([pair[side][0] for pair in errors]) for side in (0, 1)):
        return reviewed
    for one, pair in zip(checked, errors, strict=True):
        wrong = next(
            (side for side in (0, 1) if pair[side][0] > MIN_VIOLATION and pair[1 - side][0] <= MAX_HOLDING_ERROR), None
        )
        if wrong is not None and _is_loose(one.finding):
            runs = preparer.baseline.name, preparer.target.name
            reviewed[one.finding.order] = _with_violation(one.finding, pair[wrong], (runs[wrong], runs[1 - wrong]))
        holds = all(each[0] <= MAX_HOLDING_ERROR for each in pair) and _are_alike(gains)
        agrees = bad.isdisjoint(part.site for part in one.sources)
        if holds and agrees and _is_accused(one.finding) and one.is_explained:
            reviewed[one.finding.order] = _explained_by_cancellation(one.finding)
    return reviewed


def _is_known(finding: Finding) -> bool:
    return finding.basis == "values" and finding.judged_by == "rounding" and _is_summed(finding.site)


def _is_loose(finding: Finding) -> bool:
    return finding.verdict is Verdict.CLOSE and finding.row_floor > _LOOSE_FLOOR and _is_known(finding)


def _is_accused(finding: Finding) -> bool:
    """Return whether the gradient differs in single rows or elements; cancellation does not explain a common gain."""
    return finding.verdict is Verdict.DIFFERS and finding.test in _ROW_TESTS and _is_known(finding)


def _are_alike(gains: Sequence[Mapping[int, float]]) -> bool:
    """Return whether both runs scale their gradients by the same factor."""
    steps = {step for side in gains for step in side}
    return all(math.isclose(gains[0].get(step, 1.0), gains[1].get(step, 1.0), rel_tol=_LOOSE_FLOOR) for step in steps)


def _is_summed(site: str) -> bool:
    return site.endswith(".grad") and port_of(site).startswith("param[")


def _checked(findings: Sequence[Finding], examined: Sequence[PairResult], preparer: PairPreparer) -> Iterator[_Checked]:
    """Yield the parameters whose gradients can be recomputed, those with the widest floors first, within the read
    budget."""
    sites = {one.site: one for one in examined if one.baseline and one.target and not one.problem}
    inputs: dict[str, list[PairResult]] = {}
    for site, one in sites.items():
        path, _, port = site.rpartition(":")
        if port.startswith("in[") and not port.endswith(".grad") and not one.is_exact:
            inputs.setdefault(path, []).append(one)
    left = _MAX_ELEMENTS
    is_open = _is_loose
    if any(map(_is_accused, findings)):
        is_open = _is_known  # the other parameters show whether the identity holds in a run
    for finding in sorted(filter(is_open, findings), key=lambda f: (not _is_accused(f), -f.row_floor)):
        parts = _parts(finding, sites, inputs)
        if not parts:
            continue
        ready = [preparer.prepare(one.pair) for one in parts]
        cost = sum(math.prod(w.shape) for each in ready for w in (*each.left, *each.right))
        if cost > left or not all(map(_is_small, ready)):
            continue
        left -= cost
        try:
            of_norm = len(ready) > _LINEAR
            sides = (
                _products([each.left for each in ready], of_norm=of_norm),
                _products([each.right for each in ready], of_norm=of_norm),
            )
        except DataError:
            continue
        if sides[0] and sides[1]:
            yield _Checked(finding, sides, parts[1:])


def _parts(
    finding: Finding, sites: Mapping[str, PairResult], inputs: Mapping[str, Sequence[PairResult]]
) -> tuple[PairResult, ...]:
    """Return a parameter's gradient and the tensors from which it is computed; empty if one of them was not compared.

    These are the output's gradient; for a matrix also the input; for a norm's weight also the output, the weight, and
    the bias if there is one.
    """
    path, _, port = finding.site.rpartition(":")
    own, outputs = sites.get(finding.site), _first(sites, path, _OUTPUTS)
    if own is None or outputs is None:
        return ()
    if _is_weight(finding):
        given = inputs.get(path, ())
        return (own, outputs, *given) if len(given) == 1 else ()
    if "bias" in port:
        return own, outputs
    values, weight, bias = (_first(sites, path, ports) for ports in (_VALUES, ("param[weight]",), ("param[bias]",)))
    if values is None or weight is None or not port.startswith("param[weight]"):
        return ()
    return (own, outputs, values, weight, *((bias,) if bias is not None else ()))


def _first(sites: Mapping[str, PairResult], path: str, ports: Sequence[str]) -> PairResult | None:
    return next((sites[name] for port in ports if (name := f"{path}:{port}") in sites), None)


def _is_small(ready: PreparedPair) -> bool:
    wholes = (*ready.left, *ready.right)
    return all(w.has_values and not w.replicas and math.prod(w.shape) <= MAX_ELEMENTS for w in wholes)


def _products(sites: Sequence[Sequence[AssembledTensor]], *, of_norm: bool) -> dict[int, Product]:
    """Map each step to its product; empty if the shapes of some step do not match."""
    gradients, outputs, *more = [_by_step(wholes) for wholes in sites]
    by_step = {}
    for step, (own, *others) in gradients.items():
        given, rest = outputs.get(step, []), [one.get(step, []) for one in more]
        if not all(_have_equal_bytes(own, other) for other in others) or not given or not all(rest):
            return {}
        made = norm_product(own, given, *rest) if of_norm else product(own, given, *rest)
        if made is None:
            return {}
        by_step[step] = made
    return by_step


def _have_equal_bytes(one: AssembledTensor, other: AssembledTensor) -> bool:
    """Return whether the hashes of two firings show equal bytes.

    A gradient is recorded at the end of its step, and again by an optimizer that steps later.
    """
    hashes = [[record.hash for record in whole.records] for whole in (one, other)]
    return hashes[0] == hashes[1] and None not in hashes[0]


def _by_step(wholes: Sequence[AssembledTensor]) -> dict[int, list[AssembledTensor]]:
    by_step: dict[int, list[AssembledTensor]] = {}
    for whole in wholes:
        by_step.setdefault(whole.records[0].key.step, []).append(whole)
    return by_step


def _gains(sides: Sequence[_Side]) -> dict[int, float]:
    """Map each step to the factor common to all gradients, due to clipping, a scaled loss, or a mean over ranks."""
    gains: dict[int, list[float]] = {}
    for side in sides:
        for step, one in side.items():
            if math.isfinite(gain := one.gain):
                gains.setdefault(step, []).append(gain)
    return {step: float(np.median(ratios)) if len(ratios) >= _MIN_PARAMETERS else 1.0 for step, ratios in gains.items()}


def _worst(one: _Checked, side: int, gains: Mapping[int, float]) -> tuple[float, int]:
    """Return (largest error in epsilons, its step)."""
    epsilon = max(_MIN_EPSILON, *(each.epsilon for products in one.sides for each in products.values()))
    errors = [(each.error(gains.get(step, 1.0)) / epsilon, step) for step, each in one.sides[side].items()]
    return max(errors, key=lambda error: error[0] if not math.isnan(error[0]) else math.inf)


def _is_weight(finding: Finding) -> bool:
    return finding.baseline is not None and len(finding.baseline.shape) == 2


def _holds_mostly(errors: Sequence[float]) -> bool:
    """Return whether the identity holds for most parameters of a run."""
    return len(errors) >= _MIN_PARAMETERS and 2 * sum(error <= MIN_VIOLATION for error in errors) > len(errors)


def _with_violation(finding: Finding, worst: tuple[float, int], names: tuple[str, str]) -> Finding:
    error, step = worst
    what = "out.grad times the input of its module" if _is_weight(finding) else "the sum of out.grad over token rows"
    wrong, right = names
    note = f"in {wrong} the gradient is not {what} ({error:,.0f} roundings apart at step {step}); in {right} it is"
    return as_different(
        finding,
        "gradient_identity",
        note,
        error=error,
        floor=MIN_VIOLATION,
        row_floor=0.0,
        added_error_ratio=error / MAX_HOLDING_ERROR,
        judged_by="gradient_identity",
    )


def _explained_by_cancellation(finding: Finding) -> Finding:
    note = "above its floor, but in both runs it equals what it was computed from, which agrees: its terms cancel"
    return structs.replace(
        finding,
        verdict=Verdict.CLOSE,
        floor=finding.error,
        added_error_ratio=0.0,
        judged_by="gradient_identity",
        notes=(note, *finding.notes),
    )
