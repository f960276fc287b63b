"""Recomputed activations: compares the values recomputed by activation checkpointing with the forward of the same run.

The same code computes both from the same inputs and parameters. They are therefore equal, or differ by a few roundings
if a kernel sums in varying order. If they differ by more in exactly one run, the gradients of that run belong to
another function: the random state was not restored, a buffer changed in between, or only one of the passes had a cast.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.formatting import number
from tapscope.run_format.record import FORWARD, RECOMPUTE, Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run

MAX_EPSILONS = 8.0
"""Maximum distance between the two values, in epsilons of the dtype, relative to the norm of the forward's value."""


class Mismatch(Struct, frozen=True):
    """An activation whose recomputation differs from the forward."""

    record: Record
    """The first record that differs."""
    error: float
    """L2 distance from the forward's value, relative to the norm of that value."""


class RecomputedActivations(Detector):
    """Detects activations that checkpointing recomputed differently from the forward, in one run only."""

    name = "recomputed_activations"
    stage = Stage.REVIEW

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        findings = with_recomputed(evidence.findings, evidence.runs, evidence.records)
        return structs.replace(evidence, findings=findings)


def recomputed(run: Run, records: Records) -> dict[tuple[str, str], Mismatch]:
    """Return (model, site) -> mismatch with the forward; values are read only if hashes differ."""
    again = records.which(lambda kind: kind.pass_ == RECOMPUTE)
    if not len(again):
        return {}
    sites = set(records.take(again).distinct_sites())
    forward = {record.key: record for record in records.of(sites=sites) if record.key.pass_ == FORWARD}
    mismatches: dict[tuple[str, str], Mismatch] = {}
    for record in records.take(again):
        first, name = forward.get(record.key._replace(pass_=FORWARD)), (record.key.model, record.key.site)
        if first is not None and name not in mismatches and (error := _error(run, first, record)) > _allowed(first):
            mismatches[name] = Mismatch(record, error)
    return mismatches


def with_recomputed(
    findings: Sequence[Finding], runs: tuple[Run, Run], records: tuple[Records, Records]
) -> list[Finding]:
    """Return the findings, with ``differs`` for sites that were recomputed differently in one run only."""
    reviewed = list(findings)
    sides = [recomputed(run, some) for run, some in zip(runs, records, strict=True)]
    if not any(sides):
        return reviewed
    for finding in _of_pass(findings, RECOMPUTE) + _of_pass(findings, FORWARD):
        names = [(one.group[0], one.site) for one in (finding.result.pair.baseline, finding.result.pair.target) if one]
        if len(names) < 2:
            continue
        found = [side.pop(name, None) for side, name in zip(sides, names, strict=True)]
        wrong = next((i for i, one in enumerate(found) if one is not None and found[1 - i] is None), None)
        if wrong is not None and (one := found[wrong]) is not None:
            reviewed[finding.order] = _with_mismatch(finding, one, runs[wrong].name)
    return reviewed


def _of_pass(findings: Sequence[Finding], pass_: str) -> list[Finding]:
    pairs = ((finding, finding.result.pair.baseline or finding.result.pair.target) for finding in findings)
    return [finding for finding, series in pairs if series is not None and series.group[1] == pass_]


def _with_mismatch(finding: Finding, mismatch: Mismatch, name: str) -> Finding:
    key = mismatch.record.key
    note = (
        f"{name}: the activation recomputed for the backward is not that of the forward, at step {key.step} of rank "
        f"{key.rank} by {number(mismatch.error)} of its size: gradients are those of another function"
    )
    if finding.verdict.is_bad:  # the recomputed value already differs from the other run's
        return structs.replace(finding, notes=(*finding.notes, note))
    allowed = _allowed(mismatch.record)
    members = {"test": "recompute", "judged_by": "equality", "error": mismatch.error, "floor": allowed}
    return structs.replace(finding, verdict=Verdict.DIFFERS, **members, notes=(note, *finding.notes))


def _allowed(record: Record) -> float:
    """Return the maximum relative distance that rounding explains; 0 for integers."""
    name = record.dtype or ""
    if not name.startswith(("float", "bfloat")):
        return 0.0
    return MAX_EPSILONS * float(ml_dtypes.finfo(dtypes.numpy_dtype(name)).eps)


def _error(run: Run, first: Record, again: Record) -> float:
    """Return the relative distance of two records; 0 if they are equal or cannot be compared."""
    if first.dtype is None or again.dtype is None or (first.hash is not None and first.hash == again.hash):
        return 0.0
    if first.shape != again.shape or first.dtype != again.dtype:
        return math.inf
    if first.entry is None or again.entry is None:
        return 0.0  # statistics differ by rounding and show little
    try:
        one, two = (np.asarray(run.array(record)).astype(_wide(record)) for record in (first, again))
    except DataError:  # unreadable bytes are a separate finding
        return 0.0
    if np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    size = float(np.linalg.norm(one))
    error = float(np.linalg.norm(two - one))
    return error / size if size > 0.0 and math.isfinite(error) else math.inf


def _wide(record: Record) -> type[np.generic]:
    name = record.dtype or ""
    return np.complex128 if name.startswith("complex") else np.float64
