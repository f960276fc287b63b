"""Absent gradients: those that autograd gave a value in one run alone, though both hold the value.

A tensor that nothing flows back to has no gradient, which is as good as one of zeros: a frozen weight, a branch that
was detached. So where both runs were told to record the same sites, and the one without it did record gradients of that
kind, a gradient that is not zero differs from none at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.facts import Side
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import Series
from tapscope.run_format.run import Run

_SELECTING = ("keep", "rules", "filter", "mode", "grads", "params", "buffers", "capture_steps", "network")
"""What of a dumper's configuration says which sites are recorded."""
_GRAD = ".grad"


class MissingGradients(Detector):
    """Finds gradients that one run lacks though it recorded the values."""

    name = "missing_gradients"
    stage = Stage.EXPECT

    def detect(self, evidence: Evidence) -> Evidence:
        """See :class:`.Detector`."""
        return structs.replace(evidence, missing_gradients=absent_gradients(evidence.judged, evidence.runs))


def absent_gradients(examined: Sequence[PairResult], runs: tuple[Run, Run]) -> dict[str, str]:
    """Site of each gradient that one run lacks and should have -> what to say of it."""
    told = [_told(run) for run in runs]
    if told[0] is None or told[0] != told[1]:
        return {}
    met = {one.site for one in examined if one.baseline is not None and one.target is not None and not one.problem}
    fired = {site.rpartition(":")[0] for site in met if not _is_state(site)}
    kinds = {_kind(site) for site in met if site.endswith(_GRAD)}
    found = {}
    for one in examined:
        side = _alone(one)
        if side is None or not one.site.endswith(_GRAD) or _kind(one.site) not in kinds:
            continue
        value, path = one.site.removesuffix(_GRAD), one.site.rpartition(":")[0]
        if (value in met or (_is_state(value) and path in fired)) and path in fired and not _is_zero(one):
            lacking = runs[1 if one.baseline is not None else 0].name
            found[one.site] = f"{lacking} recorded the value and no gradient: frozen, detached or cut off"
    return found


def _told(run: Run) -> Mapping[str, Any] | None:
    """What says which sites a run records; None where it does not tell."""
    config = run.manifest.get("config")
    if not isinstance(config, Mapping) or not config.get("grads"):
        return None
    return {"framework": run.manifest.get("framework")} | {name: config.get(name) for name in _SELECTING}


def _alone(one: PairResult) -> Side | None:
    """What the only run holds that has the site; None where both do."""
    return (one.baseline or one.target) if one.baseline is None or one.target is None else None


def _kind(site: str) -> str:
    """``in``, ``out``, ``param`` or ``tap``: where a gradient is taken."""
    return site.rpartition(":")[2].partition("[")[0].removesuffix(_GRAD)


def _is_state(site: str) -> bool:
    return _kind(site) in ("param", "buffer")


def _is_zero(one: PairResult) -> bool:
    """Whether nothing is known of it but zeros."""
    series: Series | None = one.pair.baseline or one.pair.target
    records = [record for firing in series.firings for record in firing.records] if series is not None else []
    return all(record.stats is not None and record.stats.absmax == 0.0 for record in records)
