"""Activation mismatch: the runs apply different activation functions, inferred from each run's own inputs and outputs.

The inputs and outputs of an activation are recorded together, so each run tabulates its function, whatever errors its
inputs have. GELU and its tanh approximation differ by 5e-4: in bfloat16, that is negligible for large values and many
roundings for small ones. The values of a run therefore fit one known function to about one rounding, and no other. If
the runs fit different functions, they differ, however small the error is. The same holds for gradients: the gradient of
the input is that of the output times the function's derivative.

Unknown functions are skipped. So are compositions with internal roundings (a GELU written out in bfloat16), whose noise
hides the function: each function must fit its own run several times better than the other function does.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.detectors.activation_functions import FUNCTIONS, derivative
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.linear_gradients import chunks_of
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict, as_different
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.site import module_of

Array = np.ndarray[Any, Any]

_MIN_FLOOR_SHARE = 0.02
"""Minimum error of checked findings, as a fraction of their floor."""
_MAX_FINDINGS = 256
"""Maximum number of findings to check; those nearest to their floor come first."""
_MAX_VALUES = 1 << 13
"""Maximum number of values read per site and run; at most half of them from one firing."""
_KERNEL = 2.0**-18
"""Error of a float32 kernel relative to its input, due to cancellation in its sums."""
_MAX_FIT_ERROR = 4.0
"""Maximum error of the function that fits a run, in epsilons of the dtype."""
_MIN_FUNCTION_GAP = 2.0
"""Number of roundings by which two functions must differ at an input for the input to distinguish them."""
_MIN_INPUTS = 16
"""Minimum number of distinct inputs that distinguish two functions."""
_MIN_ENERGY_RATIO = 4.0
"""Factor by which the other run's function must have a larger squared error at these inputs."""
_ROUNDING_VARIANCE = 0.2
"""Maximum mean square error of rounding to nearest, in roundings: 1/12, with a margin for kernels."""
_NUM_FIT_VALUES = 512
"""Number of values used to find the best function."""
_MAX_COUNTED_ERROR = 100.0
"""Upper limit of an error, in roundings; larger errors are clamped."""


class Table(Struct, frozen=True):
    """Inputs and outputs of an activation in one run."""

    x: Array
    """[n] float64: inputs."""
    y: Array
    """[n] float64: outputs, or gradients of the inputs."""
    slope: Array
    """[1] float64: 1; for gradients [n]: gradients of the outputs."""
    dtype: str
    """The dtype of ``y``."""

    def values(self, name: str) -> Array:
        """Return the outputs, or gradients of the inputs, that the function ``name`` would produce, [n]."""
        function = FUNCTIONS[name]
        return self.slope * (derivative(function) if self.is_gradient else function)(self.x)

    @property
    def is_gradient(self) -> bool:
        """Whether the table contains gradients, and therefore the derivative."""
        return self.slope.size > 1

    def roundings(self, values: Array) -> Array:
        """Return the distance between the recorded outputs and ``values`` in roundings, [n]."""
        roundings: Array = np.minimum(np.abs(self.y - values) / self._unit(values), _MAX_COUNTED_ERROR)
        return roundings

    def _unit(self, values: Array) -> Array:
        kernel = np.abs(self.slope) if self.is_gradient else np.maximum(np.abs(self.x), np.abs(values))
        return rounding_of(values, self.dtype, kernel)

    def is_of(self, name: str) -> bool:
        """Return whether the outputs differ from the function ``name`` only by rounding to nearest."""
        return float(np.square(self.roundings(self.values(name))).mean()) < _ROUNDING_VARIANCE

    def best_function(self) -> str:
        """Return the name of the function that fits the table; empty if none fits."""
        some = self._some(max(1, len(self.x) // _NUM_FIT_VALUES))
        name = min(FUNCTIONS, key=lambda name: float(np.square(some.roundings(some.values(name))).sum()))
        left = float(np.linalg.norm(self.y - self.values(name)))
        most = (_MAX_FIT_ERROR * dtypes.epsilon(self.dtype) + _KERNEL) * float(np.linalg.norm(self.y))
        return name if left <= most else ""

    def _some(self, step: int) -> "Table":
        return Table(self.x[::step], self.y[::step], self.slope[:: step if self.is_gradient else 1], self.dtype)

    def distinguishes(self, own: str, other: str) -> bool:
        """Return whether the function ``own`` fits the table clearly better than ``other``."""
        one, two = self.values(own), self.values(other)
        apart = np.abs(one - two) > _MIN_FUNCTION_GAP * self._unit(one)
        mine, theirs = (float(np.square(self.roundings(values)[apart]).sum()) for values in (one, two))
        return len(np.unique(self.x[apart])) >= _MIN_INPUTS and _MIN_ENERGY_RATIO * mine <= theirs


def rounding_of(values: Array, dtype: str, terms: Array) -> Array:
    """Return the size of one rounding of each of ``values``: the step of the dtype there, plus the error of a float32
    kernel that adds ``terms`` of these sizes."""
    exponents = np.frexp(values)[1] - 1
    steps = np.maximum(dtypes.epsilon(dtype) * np.exp2(exponents), dtypes.smallest(dtype))
    rounding: Array = steps + _KERNEL * terms
    return rounding


class ActivationMismatch(Detector):
    """Detects activations that compute different functions in the two runs, from each run's own values."""

    name = "activation_mismatch"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        findings = with_pointwise(evidence.findings, evidence.judged, evidence.preparer, evidence.pointwise)
        return structs.replace(evidence, findings=findings)


def with_pointwise(
    findings: Sequence[Finding], examined: Sequence[PairResult], preparer: PairPreparer, paths: Collection[str]
) -> list[Finding]:
    """Return the findings, with ``differs`` for those whose runs compute different functions despite a small error.

    ``paths`` contains the pointwise modules.
    """
    reviewed = list(findings)
    near = [f for f in findings if _is_near(f) and module_of(f.site) in paths]
    if not near:
        return reviewed
    sites = {one.site: one for one in examined if one.baseline and one.target and not one.problem}
    given: dict[str, list[str]] = {}
    for site in sites:
        path, _, port = site.rpartition(":")
        if path in paths and port.startswith("in[") and not port.endswith(".grad"):
            given.setdefault(path, []).append(site)
    for finding in sorted(near, key=lambda f: -f.ratio)[:_MAX_FINDINGS]:
        parts = _parts(finding.site, sites, given)
        if not parts:
            continue
        ready = [preparer.prepare(one.pair) for one in parts]
        try:
            tables = _table([each.left for each in ready]), _table([each.right for each in ready])
        except DataError:
            continue
        names = _names(*tables)
        if names:
            reviewed[finding.order] = _with_mismatch(finding, names)
    return reviewed


def _is_near(finding: Finding) -> bool:
    passed = finding.verdict is Verdict.CLOSE and finding.basis == "values" and finding.judged_by == "rounding"
    return passed and finding.ratio >= _MIN_FLOOR_SHARE


def _names(one: Table | None, two: Table | None) -> tuple[str, ...]:
    """Return the functions of the baseline and the target if they differ, otherwise an empty tuple."""
    if one is None or two is None or not (ours := one.best_function()):
        return ()
    if two.is_of(ours):
        return ()
    theirs = two.best_function()
    differ = theirs not in ("", ours) and one.distinguishes(ours, theirs) and two.distinguishes(theirs, ours)
    return (ours, theirs) if differ else ()


def _parts(site: str, sites: Mapping[str, PairResult], given: Mapping[str, Sequence[str]]) -> tuple[PairResult, ...]:
    """Return the input and output of a module; for a gradient of the input, that input and both gradients."""
    path = module_of(site)
    out, inputs = f"{path}:out", given.get(path, ())
    if len(inputs) != 1:
        return ()
    names = {out: (inputs[0], out), f"{inputs[0]}.grad": (inputs[0], f"{inputs[0]}.grad", f"{out}.grad")}.get(site, ())
    return tuple(sites[name] for name in names) if all(name in sites for name in names) else ()


def _table(parts: Sequence[Sequence[AssembledTensor]]) -> Table | None:
    """Tabulate the activation of one run; None if inputs and outputs do not match."""
    firings = [{place_of(whole): whole for whole in wholes} for wholes in parts]
    samples: list[list[Array]] = []
    for place, whole in firings[0].items():
        ours = [some.get(place) for some in firings]
        if any(other is None or other.shape != whole.shape or not other.has_values for other in ours):
            return None
        samples += _some([other for other in ours if other is not None])
        if sum(len(values[0]) for values in samples) >= _MAX_VALUES:
            break
    if not samples:
        return None
    x, y, *slope = map(np.concatenate, zip(*samples, strict=True))
    use = np.isfinite([x, y, *slope]).all(0)
    dtype = next(iter(firings[1].values())).dtype or ""
    return Table(x[use], y[use], slope[0][use] if slope else np.ones(1), dtype) if use.any() else None


def place_of(whole: AssembledTensor) -> tuple[object, ...]:
    """Return the part of the key that identifies a firing within its site."""
    key = whole.records[0].key
    return key.step, key.micro, key.rank, key.occurrence


def _some(wholes: Sequence[AssembledTensor]) -> Iterator[list[Array]]:
    """Yield the same sample of elements from several tensors of equal shape."""
    left = _MAX_VALUES // 2
    for chunks in zip(*map(chunks_of, wholes), strict=False):
        if left <= 0 or len({part.shape for _, part, _ in chunks}) != 1:
            return
        step = max(1, chunks[0][1].size // left) | 1  # odd, so that no column is left out
        sample = [part.ravel()[::step] for _, part, _ in chunks]
        left -= len(sample[0])
        yield sample


def _with_mismatch(finding: Finding, names: tuple[str, ...]) -> Finding:
    what = "the gradient of " if finding.site.endswith(".grad") else ""
    note = f"it is {what}{names[0]} of its input in the baseline, and {what}{names[1]} in the target"
    return as_different(finding, "activation", note)
