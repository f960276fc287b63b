"""RunReport: the content of `tapscope info`, for both text and JSON."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.formatting import count, plural, size
from tapscope.core.site import compact_ranges, layer_of, module_of
from tapscope.render.anomalies import Anomaly, anomalous, anomaly_of
from tapscope.render.run_report_lines import AnomalousSite, EventLine, MetricSummary
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.run_format.sketch import NBYTES

_MAX_RANGES = 8
"""Maximum number of step ranges printed per phase."""
MAX_LINES = 12
"""Maximum number of anomalous sites and of events printed as text; the rest is counted, and --json prints all."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The content of `tapscope info`."""

    run: str
    manifest: dict[str, Any]
    ranks: tuple[int, ...]
    world_size: int
    phases: dict[str, list[int]]
    """Phase -> step numbers."""
    num_sites: int
    layers: tuple[int, ...]
    num_records: int
    num_with_values: int
    num_sketches: int
    """Number of records with a sketch instead of values."""
    num_non_tensors: int
    """Number of records of non-tensor values (numbers, strings, …)."""
    nbytes: int
    """Payload bytes on disk; shared payloads count once."""
    shared_bytes: int
    """Bytes saved by deduplication of identical payloads."""
    metrics: list[MetricSummary]
    events: list[EventLine]
    anomalies: list[AnomalousSite]
    complete: bool
    missing: list[str]
    """Sentences of the completeness report."""

    @property
    def fine(self) -> bool:
        """True if no data are missing and no anomaly was found."""
        return self.complete and not self.anomalies

    def facts(self) -> dict[str, Any]:
        """Return the fields for JSON, without lists of metrics, events and anomalies."""
        names: tuple[str, ...] = (
            "run",
            "manifest",
            "ranks",
            "world_size",
            "phases",
            "num_sites",
            "layers",
            "num_records",
        )
        names += ("num_with_values", "num_sketches", "num_non_tensors", "nbytes", "shared_bytes")
        return {name: getattr(self, name) for name in names}

    def sections(self) -> list[tuple[str, list[str]]]:
        """Return (heading, lines) for text output."""
        no_anomaly = ["none: no site holds NaN, infinity or only zeros"] if self.num_records else []
        return [
            ("run", [self.run]),
            ("captured", [self._captured()]),
            ("steps", [self._steps()]),
            ("sites", [self._sites()]),
            ("records", [self._records()]),
            ("metrics", _first_lines(self.metrics, "metric")),
            ("events", _first_lines(self.events, "event")),
            ("anomalies", _first_lines(self.anomalies, "site") or no_anomaly),
            ("complete", ["; ".join(["yes" if self.complete else "NO", *self.missing])]),
        ]

    def _captured(self) -> str:
        mesh = " ".join(f"{axis}{num}" for axis, num in (self.manifest.get("mesh") or {}).items())
        facts = [str(self.manifest.get(name) or "") for name in ("framework", "model")]
        dtype, kept = self.manifest.get("dtype"), self.manifest.get("kv_cache_dtype")
        facts += [dtypes.short(dtype) if dtype else "", f"KV cache {kept}" if kept and kept != dtype else "", mesh]
        facts += [f"{len(self.ranks)} of {plural(self.world_size, 'rank')}", str(self.manifest.get("created") or "")]
        return " · ".join(fact for fact in facts if fact)

    def _steps(self) -> str:
        total = sum(map(len, self.phases.values()))
        parts = [f"{len(steps)} {phase} ({_abbreviated(steps)})" for phase, steps in self.phases.items()]
        return f"{count(total)}: {', '.join(parts)}" if parts else "none yet"

    def _sites(self) -> str:
        layers = f", layers {compact_ranges(self.layers)}" if self.layers else ""
        return f"{count(self.num_sites)}{layers}"

    def _records(self) -> str:
        if not self.num_records:
            return "none yet"
        stats_only = self.num_records - self.num_with_values - self.num_sketches - self.num_non_tensors
        shared = f", {size(self.shared_bytes)} saved by deduplication" if self.shared_bytes else ""
        parts = [f"{count(self.num_with_values)} with values ({size(self.nbytes)}{shared})"]
        if self.num_sketches:
            parts.append(f"{count(self.num_sketches)} with sketches ({size(self.num_sketches * NBYTES)})")
        parts += [f"{count(stats_only)} statistics only"] if stats_only else []
        parts += [f"{count(self.num_non_tensors)} non-tensors"] if self.num_non_tensors else []
        return f"{count(self.num_records)}: {', '.join(parts)}"


def _abbreviated(steps: list[int]) -> str:
    """Format step numbers as ranges; of many ranges only the first ones and the last."""
    ranges = compact_ranges(steps).split(",")
    return ",".join(ranges if len(ranges) <= _MAX_RANGES else [*ranges[: _MAX_RANGES - 1], "…", ranges[-1]])


def run_report(run: Run) -> RunReport:
    """Collect the report of an open run."""
    ledger = run.ledger()
    phases: dict[str, list[int]] = defaultdict(list)
    for step, by_rank in run.steps.items():
        phases[by_rank[min(by_rank)].info.phase].append(step)
    records = run.records
    sites = records.distinct_sites()
    layers = sorted({n for site in sites if (n := layer_of(module_of(site))) is not None})
    num_with_values, nbytes, with_shared = payload_sizes(records)
    return RunReport(
        run=str(run.path),
        manifest=run.manifest,
        ranks=run.ranks,
        world_size=run.world_size,
        phases=dict(phases),
        num_sites=len(sites),
        layers=tuple(layers),
        num_records=len(records),
        num_with_values=num_with_values,
        num_sketches=sum(records[at].sketch is not None for at in records.irregular_places),
        num_non_tensors=len(records.which(lambda kind: kind.dtype is None)),
        nbytes=nbytes,
        shared_bytes=with_shared - nbytes,
        metrics=_metrics(run),
        events=_events(run),
        anomalies=_anomalies(records),
        complete=ledger.complete,
        missing=ledger.sentences(),
    )


def payload_sizes(records: Records) -> tuple[int, int, int]:
    """Return the number of records with values, their bytes on disk, and their bytes without deduplication."""
    files: dict[tuple[int, str], int] = {}
    file = records.of_kinds(lambda k: -1 if k.file is None else files.setdefault((k.rank, k.file), len(files)))
    kept = file >= 0
    columns = file[kept], records.nbytes[kept], records.offset[kept]
    order = np.lexsort(columns)
    is_first = np.ones(len(order), bool)
    is_first[1:] = False
    for column in columns:
        here = column[order]
        is_first[1:] |= here[1:] != here[:-1]
    return len(order), _total(columns[1][order[is_first]]), _total(columns[1])


def _total(numbers: np.ndarray[Any, Any]) -> int:
    """Return the exact sum of nonnegative int64 values, which may exceed 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _events(run: Run) -> list[EventLine]:
    """Return events in order; each configuration is relative to the rank's previous one, the first relative to the
    manifest."""
    begun = run.manifest.get("config")
    configs: dict[int, dict[str, Any]] = {}
    lines = []
    for event in run.events():
        before = configs.setdefault(event.rank, dict(begun) if isinstance(begun, dict) else {})
        if event.kind not in ("open", "close"):
            lines.append(EventLine(event, dict(before) if event.kind == "config" else {}))
        if event.kind == "config":
            before |= event.fields
    return lines


def _metrics(run: Run) -> list[MetricSummary]:
    """Summarize each metric over the lowest rank that reports it: ranks mostly report equal values."""
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric in run.metrics():
        values[metric.name][metric.rank].append(metric.value)
    summaries = []
    for name, by_rank in values.items():
        rank = min(by_rank)
        series = by_rank[rank]
        finite = [value for value in series if math.isfinite(value)] or [math.nan]
        mean = sum(finite) / len(finite)
        summaries.append(MetricSummary(name, rank, len(series), mean, min(finite), max(finite), series[-1]))
    return summaries


def _anomalies(records: Records) -> list[AnomalousSite]:
    """Return anomalous sites in order of their first anomalous record."""
    first: dict[tuple[str, str], tuple[Record, Anomaly]] = {}
    amount: Counter[tuple[str, str]] = Counter()
    for record in sorted(anomalous(records), key=lambda r: (r.key.step, r.key.rank, r.seq)):
        oddity = anomaly_of(record)
        if oddity is not None:
            first.setdefault((record.key.site, oddity.kind), (record, oddity))
            amount[record.key.site, oddity.kind] += 1
    return [AnomalousSite(k[0], o, amount[k], r.key.step, r.key.rank) for k, (r, o) in first.items()]


def _first_lines(items: list[Any], noun: str) -> list[str]:
    lines = [str(item) for item in items[:MAX_LINES]]
    if len(items) > MAX_LINES:
        lines.append(f"and {plural(len(items) - MAX_LINES, f'more {noun}')}; --json lists all")
    return lines
