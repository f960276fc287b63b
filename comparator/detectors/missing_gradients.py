"""Missing gradients: gradients that only one run recorded, although both runs recorded the value.

A tensor that no gradient reaches (a frozen weight, a detached branch) has no gradient, which is equivalent to zeros.
Suppose that both runs were configured to record the same sites, and the run without this gradient recorded others of
its kind. A nonzero gradient in the other run is then a difference. The exception is a gradient whose tensor the run
does not have: one run may return its logits cast to another dtype after the loss, and the other the logits of the loss
itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from tapscope.comparator.detectors.cast_gradients import has_one_dtype, series_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.facts import Side
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import Series, content_id
from tapscope.core.site import module_of, port_of
from tapscope.run_format.run import Run

_SELECTING = ("keep", "rules", "filter", "mode", "grads", "params", "buffers", "capture_steps", "network")
"""Dumper settings that determine the recorded sites."""
_GRAD = ".grad"


class MissingGradients(Detector):
    """Detects gradients that one run lacks although it recorded the values."""

    name = "missing_gradients"
    stage = Stage.EXPECT

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        return structs.replace(evidence, missing_gradients=missing_gradients(evidence.judged, evidence.runs))


def missing_gradients(examined: Sequence[PairResult], runs: tuple[Run, Run]) -> dict[str, str]:
    """Return site -> note for each gradient that one run should have but lacks."""
    settings = [_selection_settings(run) for run in runs]
    if settings[0] is None or settings[0] != settings[1]:
        return {}
    matched = {one.site for one in examined if one.baseline is not None and one.target is not None and not one.problem}
    paired = {one.site: one for one in examined if one.site in matched}
    fired = {module_of(site) for site in matched if not _is_state(site)}
    kinds = {_kind(site) for site in matched if site.endswith(_GRAD)}
    sentences = {}
    for one in examined:
        side = _only_side(one)
        if side is None or not one.site.endswith(_GRAD) or _kind(one.site) not in kinds or _is_cast_later(one, paired):
            continue
        value, path = one.site.removesuffix(_GRAD), module_of(one.site)
        if (value in matched or (_is_state(value) and path in fired)) and path in fired and not _is_zero(one):
            lacking = runs[1 if one.baseline is not None else 0].name
            sentences[one.site] = f"{lacking} recorded the value and no gradient: frozen, detached or cut off"
    return sentences


def _is_cast_later(result: PairResult, paired: Mapping[str, PairResult]) -> bool:
    """Return whether both runs recorded the gradient at another site.

    In the run that has this gradient, the other site is the same tensor; in the run that lacks it, a tensor in another
    dtype.
    """
    value, has = paired.get(result.site.removesuffix(_GRAD)), 0 if result.baseline is not None else 1
    gradient = content_id(series_of(result, has))
    if value is None or gradient is None:
        return False
    for site, other in paired.items():
        if site.endswith(_GRAD) and content_id(series_of(other, has)) == gradient:
            source = paired.get(site.removesuffix(_GRAD))
            if source is not None and has_one_dtype(source, value, has) and not has_one_dtype(source, value, 1 - has):
                return True
    return False


def _selection_settings(run: Run) -> Mapping[str, Any] | None:
    """Return the settings that determine the recorded sites of a run; None if they are unknown or gradients are off."""
    config = run.manifest.get("config")
    if not isinstance(config, Mapping) or not config.get("grads"):
        return None
    return {"framework": run.manifest.get("framework")} | {name: config.get(name) for name in _SELECTING}


def _only_side(result: PairResult) -> Side | None:
    """Return the side of the only run that has the site; None if both runs have it."""
    return (result.baseline or result.target) if result.baseline is None or result.target is None else None


def _kind(site: str) -> str:
    """Return the kind of port that a gradient belongs to: ``in``, ``out``, ``param`` or ``tap``."""
    return port_of(site).partition("[")[0].removesuffix(_GRAD)


def _is_state(site: str) -> bool:
    return _kind(site) in ("param", "buffer")


def _is_zero(result: PairResult) -> bool:
    """Return whether all recorded values are zero."""
    series: Series | None = result.pair.baseline or result.pair.target
    records = [record for firing in series.firings for record in firing.records] if series is not None else []
    return all(record.stats is not None and record.stats.absmax == 0.0 for record in records)
