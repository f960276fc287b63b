"""Pointwise: which function a module applies to each element, read off its own run, however wide its floor.

What goes into an activation and what comes out are recorded together, so that each run tabulates its function, whatever
errors its inputs carry: GELU and its approximation by tanh are 5e-4 apart, which in bfloat16 is next to nothing beside
large values and many roundings beside small ones. So one known function is what a run's values are of, to a rounding
or so, and another is not. Where that is one in the one run and the other in the other, they differ, however little.
The same holds of gradients: that of the input is that of the output times the function's derivative.

Nothing is said of functions that are not known, and of those that were put together from roundings of their own (a
GELU written out in bfloat16), whose noise hides which one it is: each must explain its own run's values several times
better than the other one does, where the two are apart.
"""

import math
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
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core import dtypes
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

_NEAR = 0.02
"""Share of its floor from which a finding is looked at."""
_MOST = 256
"""Findings that are looked at, those nearest to their floor first."""
_ELEMENTS = 1 << 13
"""Values of either run that are read of one site, and half of them of one firing at most."""
_KERNEL = 2.0**-18
"""What a kernel in float32 may be off of what goes in: sums in it cancel."""
_OWN = 4.0
"""Epsilons of the values' type that the run's own function leaves of them at most."""
_APART = 2.0
"""Roundings that two functions are apart where it shows which one it is."""
_FEWEST = 16
"""Different inputs at which they are."""
_BETTER = 4.0
"""How many times as much, squared, the other run's function leaves there than its own."""
_ROUNDED = 0.2
"""Square of what roundings to nearest leave on average: 1/12 of one, and some room for kernels."""
_GUESSED = 512
"""Values at which the likeliest function is looked for."""
_OUTLIER = 100.0
"""Roundings as which anything further off counts."""


class Table(Struct, frozen=True):
    """A function as one run tabulates it."""

    x: Array
    """[n] float64: what went in."""
    y: Array
    """[n] float64: what came out, or the gradient of what went in."""
    slope: Array
    """[n] float64: 1, or the gradient of what came out."""
    dtype: str
    """Of ``y``."""

    def values(self, name: str) -> Array:
        """What a function makes of the inputs."""
        function = FUNCTIONS[name]
        return self.slope * (derivative(function) if self.is_gradient else function)(self.x)

    @property
    def is_gradient(self) -> bool:
        """Whether it is one of the derivative."""
        return self.slope.size > 1

    def roundings(self, values: Array) -> Array:
        """[n]: what the recorded ones are off from these, in roundings."""
        found: Array = np.minimum(np.abs(self.y - values) / self._unit(values), _OUTLIER)
        return found

    def _unit(self, values: Array) -> Array:
        exponents = np.frexp(values)[1] - 1
        steps = np.maximum(dtypes.epsilon(self.dtype) * np.exp2(exponents), dtypes.smallest(self.dtype))
        kernel = np.abs(self.slope) if self.is_gradient else np.maximum(np.abs(self.x), np.abs(values))
        found: Array = steps + _KERNEL * kernel
        return found

    def is_of(self, name: str) -> bool:
        """Whether the function leaves nothing but roundings to nearest."""
        return float(np.square(self.roundings(self.values(name))).mean()) < _ROUNDED

    def own(self) -> str:
        """The name of the function that explains it; empty where none does."""
        some = self._some(max(1, len(self.x) // _GUESSED))
        name = min(FUNCTIONS, key=lambda name: float(np.square(some.roundings(some.values(name))).sum()))
        left = float(np.linalg.norm(self.y - self.values(name)))
        most = (_OWN * dtypes.epsilon(self.dtype) + _KERNEL) * float(np.linalg.norm(self.y))
        return name if left <= most else ""

    def _some(self, step: int) -> "Table":
        return Table(self.x[::step], self.y[::step], self.slope[:: step if self.is_gradient else 1], self.dtype)

    def tells(self, own: str, other: str) -> bool:
        """Whether it is of the one function and not of the other."""
        one, two = self.values(own), self.values(other)
        apart = np.abs(one - two) > _APART * self._unit(one)
        mine, theirs = (float(np.square(self.roundings(values)[apart]).sum()) for values in (one, two))
        return len(np.unique(self.x[apart])) >= _FEWEST and _BETTER * mine <= theirs


class ActivationMismatch(Detector):
    """Finds activations that are another function in either run, told by each run's own values."""

    name = "activation_mismatch"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """See :class:`.Detector`."""
        found = with_pointwise(evidence.findings, evidence.judged, evidence.preparer, evidence.pointwise)
        return structs.replace(evidence, findings=found)


def with_pointwise(
    findings: Sequence[Finding], examined: Sequence[PairResult], preparer: PairPreparer, paths: Collection[str]
) -> list[Finding]:
    """The findings, those differing that pass by their size and are not of the same function in both runs; ``paths``
    are the modules that work on each element by itself."""
    found = list(findings)
    near = [f for f in findings if _is_near(f) and f.site.rpartition(":")[0] in paths]
    if not near:
        return found
    sites = {one.site: one for one in examined if one.baseline and one.target and not one.problem}
    given: dict[str, list[str]] = {}
    for site in sites:
        path, _, port = site.rpartition(":")
        if path in paths and port.startswith("in[") and not port.endswith(".grad"):
            given.setdefault(path, []).append(site)
    for finding in sorted(near, key=lambda f: -f.ratio)[:_MOST]:
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
            found[finding.order] = _said(finding, names)
    return found


def _is_near(finding: Finding) -> bool:
    passed = finding.verdict is Verdict.CLOSE and finding.basis == "values" and finding.judged_by == "rounding"
    return passed and finding.ratio >= _NEAR


def _names(one: Table | None, two: Table | None) -> tuple[str, ...]:
    """What the baseline and the target compute, where that is not the same; else empty."""
    if one is None or two is None or not (ours := one.own()):
        return ()
    if two.is_of(ours):
        return ()
    theirs = two.own()
    differ = theirs not in ("", ours) and one.tells(ours, theirs) and two.tells(theirs, ours)
    return (ours, theirs) if differ else ()


def _parts(site: str, sites: Mapping[str, PairResult], given: Mapping[str, Sequence[str]]) -> tuple[PairResult, ...]:
    """What went into a module and what came out; of the gradient of what went in that too, and the other gradient."""
    path = site.rpartition(":")[0]
    out, inputs = f"{path}:out", given.get(path, ())
    if len(inputs) != 1:
        return ()
    names = {out: (inputs[0], out), f"{inputs[0]}.grad": (inputs[0], f"{inputs[0]}.grad", f"{out}.grad")}.get(site, ())
    return tuple(sites[name] for name in names) if all(name in sites for name in names) else ()


def _table(parts: Sequence[Sequence[AssembledTensor]]) -> Table | None:
    """Of one run; None where what went in and what came out do not fit each other."""
    firings = [{_place(whole): whole for whole in wholes} for wholes in parts]
    found: list[list[Array]] = []
    for place, whole in firings[0].items():
        ours = [some.get(place) for some in firings]
        if any(other is None or other.shape != whole.shape or not other.has_values for other in ours):
            return None
        found += _some([other for other in ours if other is not None])
        if sum(len(values[0]) for values in found) >= _ELEMENTS:
            break
    if not found:
        return None
    x, y, *slope = map(np.concatenate, zip(*found, strict=True))
    use = np.isfinite([x, y, *slope]).all(0)
    dtype = next(iter(firings[1].values())).dtype or ""
    return Table(x[use], y[use], slope[0][use] if slope else np.ones(1), dtype) if use.any() else None


def _place(whole: AssembledTensor) -> tuple[object, ...]:
    """Which firing of its site it is."""
    key = whole.records[0].key
    return key.step, key.micro, key.rank, key.occurrence


def _some(wholes: Sequence[AssembledTensor]) -> Iterator[list[Array]]:
    """Some elements of tensors of one shape, the same ones of each."""
    left = _ELEMENTS // 2
    for chunks in zip(*map(chunks_of, wholes), strict=False):
        if left <= 0 or len({part.shape for _, part, _ in chunks}) != 1:
            return
        step = max(1, chunks[0][1].size // left) | 1  # odd, so that no column is left out
        found = [part.ravel()[::step] for _, part, _ in chunks]
        left -= len(found[0])
        yield found


def _said(finding: Finding, names: tuple[str, ...]) -> Finding:
    what = "the gradient of " if finding.site.endswith(".grad") else ""
    note = f"it is {what}{names[0]} of its input in the baseline, and {what}{names[1]} in the target"
    how: dict[str, Any] = {"test": "activation", "added_error_ratio": math.inf, "judged_by": "equality"}
    return structs.replace(finding, verdict=Verdict.DIFFERS, **how, notes=(note, *finding.notes))
