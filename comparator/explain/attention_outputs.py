"""Attention outputs: find outputs that only one run's own queries, keys and values reproduce.

A sharp softmax amplifies the rounding of its inputs, so that the floor of an attention output may be large. A wrong KV
cache page, mask, score scale or RoPE in one run may change a few rows by less than that. Attention recomputed from the
recorded inputs of the same run does not have that error, only its own rounding.

The recomputation assumes the usual formula: causal mask, scores scaled by 1 / √d and possibly capped, softmax, RoPE by
the recorded tables. Attention that this formula does not reproduce in the baseline (windows, sinks, other scales) is
judged by its floor only. The same holds beyond the first :data:`_MAX_VALUES` values.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.explain.attention_output import path_of
from tapscope.comparator.explain.error_region import rounding_noise
from tapscope.comparator.explain.recomputed_attention import Recomputed, recomputed
from tapscope.comparator.explain.recorded_attention import SOFT_CAPS, SiteReader
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.run_format.run import Run

_MAX_ROUNDINGS = 12.0
"""Maximum distance of a recorded output from the recomputed one, in roundings of its inputs. Without a bug it was at
most 7, where a kernel also rounds scores to 16 bits (fitted)."""
_MAX_VALUES = 1 << 22
"""Maximum number of output values that are recomputed, starting with the first layer: half a second of CPU time."""
_MIN_RUN_RATIO = 3.0
"""Minimum ratio of the wrong run's distance to that of the correct run."""


def first_unexplained(
    findings: Sequence[Finding], judged: Sequence[PairResult], preparer: PairPreparer
) -> Finding | None:
    """Return the first finding whose attention output only one run's own inputs reproduce, changed to ``differs``.

    Only findings before the first failing site are considered, because later ones may inherit an error. None if there
    is no such finding.
    """
    runs = preparer.baseline, preparer.target
    suspects = [one for one in takewhile(lambda one: not one.verdict.is_bad, findings) if _may_hide_a_bug(one)]
    if any(map(_has_narrow_cache, runs)):
        return None
    sites, left = SiteReader(preparer, judged), _MAX_VALUES
    for finding in suspects:
        left -= finding.metrics.num_elements if finding.metrics is not None else 0
        if left < 0:
            break
        for caps in ((), SOFT_CAPS):  # the cap that fits a 16-bit baseline best may be chance: all must fail
            sides = recomputed(judged[finding.order], sites, preparer, searches=False, caps=caps)
            if sides is None or not _is_of_one_only(sides):
                break
        else:
            assert sides is not None
            bad = max((0, 1), key=lambda side: sides[side].ratio)
            row = sides[bad].worst
            limit = _MAX_ROUNDINGS * float(sides[bad].noise[row])
            return _as_different(finding, runs[bad].name, float(sides[bad].errors[row]), limit)
    return None


def _is_of_one_only(sides: tuple[Recomputed, Recomputed]) -> bool:
    """Return whether one run's inputs reproduce its output, and the other run's inputs do not."""
    good, bad = sorted(side.ratio for side in sides)
    return bad > _MAX_ROUNDINGS and good * _MIN_RUN_RATIO <= min(_MAX_ROUNDINGS, bad)


def _may_hide_a_bug(finding: Finding) -> bool:
    """Return whether a finding agrees although one row has an error too large for the rounding of one attention."""
    if finding.verdict is not Verdict.CLOSE or finding.judged_by != "rounding" or finding.basis != "values":
        return False
    errors, names = finding.result.distribution, finding.result.dtypes
    return (
        errors is not None
        and errors.errors[-1] > _MAX_ROUNDINGS * rounding_noise(names)
        and bool(path_of(finding.site))
    )


def _has_narrow_cache(run: Run) -> bool:
    """Return whether the KV cache dtype rounds keys and values, so that attention reads other values than the recorded
    ones."""
    stored = str(run.manifest.get("kv_cache_dtype", ""))
    return stored not in ("", "auto", str(run.manifest.get("dtype", "")))


def _as_different(finding: Finding, name: str, error: float, limit: float) -> Finding:
    note = (
        f"{name}'s values are not the attention of its own queries, keys and values, as the other run's are: look at "
        "its mask, scale, RoPE and KV cache"
    )
    by: Mapping[str, Any] = {"test": "attention", "error": error, "floor": limit, "row_floor": limit}
    ratio = error / limit if limit > 0.0 else math.inf
    return structs.replace(
        finding, verdict=Verdict.DIFFERS, added_error_ratio=ratio, **by, notes=(note, *finding.notes)
    )
