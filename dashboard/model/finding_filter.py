"""Filter of findings, such as ``is:differs ratio:>10 layer:0..3``."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tapscope.comparator import Finding, Verdict
from tapscope.core.site import layer_of, module_of
from tapscope.dashboard.model.filter import ChoiceField, Field, NumberField, dtype_names, matching

Array = np.ndarray[Any, Any]


def rank_of(finding: Finding) -> int | None:
    """Return the target rank with the largest error of a finding; None if all ranks are equal or the finding is
    ``same``."""
    return finding.worst.rank if finding.worst is not None and finding.verdict is not Verdict.SAME else None


def matching_findings(findings: Sequence[Finding], text: str) -> Array | bool:
    """Return [findings] bool: whether each finding matches a filter, see :mod:`.model.filter`. Raises ConfigError."""

    def numbers(of: Callable[[Finding], float]) -> NumberField:
        return NumberField(lambda: np.array([of(finding) for finding in findings], np.float64))

    def choice(of: Callable[[Finding], Iterable[str]], names: tuple[str, ...] = ()) -> ChoiceField:
        return ChoiceField(lambda name: np.array([name in of(finding) for finding in findings], bool), names)

    fields: dict[str, Field] = {
        "is": choice(_marks, (*_VERDICTS, "bad", "cause", "downstream")),
        "ratio": numbers(lambda finding: finding.ratio if finding.floor > 0.0 else math.nan),
        "max": numbers(metric_of("max_abs", math.nan)),
        "rel_l2": numbers(metric_of("rel_l2", math.nan)),
        "layer": numbers(_layer),
        "rank": numbers(_rank),
        "dtype": choice(_dtypes),
    }
    return matching(text, lambda test: np.array([any(map(test, _names(f))) for f in findings], bool), fields)


def _names(finding: Finding) -> set[str]:
    return {finding.site, *(side.site for side in (finding.baseline, finding.target) if side)}


def _dtypes(finding: Finding) -> list[str]:
    return [name for side in (finding.baseline, finding.target) if side for name in dtype_names(side.dtype)]


def metric_of(name: str, missing: float) -> Callable[[Finding], float]:
    """Return a function that reads a metric of a finding by name; it returns ``missing`` if nothing was measured."""
    return lambda finding: float(getattr(finding.metrics, name)) if finding.metrics else missing


def share_equal(finding: Finding) -> float:
    """Return the share of equal elements; inf if nothing was compared."""
    metrics = finding.metrics
    return metrics.num_equal / metrics.num_elements if metrics and metrics.num_elements else math.inf


def _marks(finding: Finding) -> Iterable[str]:
    """Yield the names that ``is:`` matches."""
    yield str(finding.verdict).replace(" ", "-")
    if finding.verdict.is_bad:
        yield "bad"
    if finding.role:
        yield "cause" if finding.role == "producer" else finding.role


def _layer(finding: Finding) -> float:
    layer = layer_of(module_of(finding.site))
    return math.nan if layer is None else layer


def _rank(finding: Finding) -> float:
    rank = rank_of(finding)
    return math.nan if rank is None else rank


_VERDICTS = tuple(str(verdict).replace(" ", "-") for verdict in Verdict)
