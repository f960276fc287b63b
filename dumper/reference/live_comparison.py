"""LiveComparison: compare the tensors of a running model with a recorded run."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import ConfigError, TapscopeError
from tapscope.core.formatting import finite_or_none, plural
from tapscope.core.observe import RankInfo
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.reference.live_divergence import LiveDivergence
from tapscope.dumper.reference.request_mapping import RequestMapping
from tapscope.dumper.reference.rounding_bound import RoundingBound
from tapscope.dumper.reference.row_comparer import MatchedRows, RowComparer
from tapscope.dumper.reference.stored_tensors import Array
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.kernels.native.aggregate import row_errors
from tapscope.run_format.manifest import HASH_VERSION
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run
from tapscope.sources import open_run

Values = Callable[[], Array]
_log = logging.getLogger("tapscope")
_MAX_LOGGED = 10
_MAX_REASONS = 50
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Hyperparameters of MoE models, in which rounding may route a token to other experts."""


class LiveComparison:
    """Compares the tensors of one rank with a recorded run. Only the constructor and :meth:`open` raise.

    A step is compared up to its first divergence, because later values depend on it.
    """

    def __init__(self, run: Run, info: RankInfo, *, rtol: float | None = None) -> None:
        """Compare with ``run``.

        ``rtol`` is the relative tolerance; None accepts errors within a :class:`.RoundingBound`, and 0 requires equal
        values. Raises ConfigError if the ranks of ``run`` do not correspond to this rank.
        """
        self._run = run
        self._info = info
        self._rtol = rtol
        self._rows = RowComparer(run, info)
        self._requests = RequestMapping.of(run)
        self._step: OpenStep | None = None
        self._is_translated = False
        self._dtypes = [name for name in (info.dtype, str(run.manifest.get("dtype", ""))) if dtypes.is_float(name)]
        self._kinds: dict[tuple[str, ...], tuple[bool, float]] = {}
        config = {**run.model_config, **info.model_config}
        self._bound = RoundingBound(rows_may_move=any(config.get(name, 0) for name in _EXPERTS))
        self._moved: set[int] = set()
        """Slots of token rows in this step that were routed to other experts; their values are not comparable."""
        self._accepted: set[tuple[Any, ...]] = set()
        """Pairs of (live, stored) bytes accepted in this step; they stay acceptable, because the bound only grows."""
        self._has_diverged = False
        self._has_begun = False
        self.first: LiveDivergence | None = None
        """First divergence of the run; None if there is none."""
        self.num_compared = 0
        self.num_steps = 0
        self.num_diverged_steps = 0
        self.skipped: Counter[str] = Counter()
        """Reason why tensors were not compared -> number of tensors."""

    @classmethod
    def open(cls, path: str | Path, info: RankInfo, *, rtol: float | None = None) -> "LiveComparison":
        """Open the run at ``path`` as the reference.

        Raises the errors of :func:`open_run`, and ConfigError if the run has neither values nor hashes, or other ranks.
        """
        run = open_run(path)
        if not any(record.entry is not None or record.hash for record in run.records):
            raise ConfigError(f"against={path}: the run holds neither values nor hashes to compare with")
        return cls(run, info, rtol=rtol)

    @property
    def path(self) -> str:
        """Path of the reference run."""
        return str(self._run.path)

    @property
    def num_skipped(self) -> int:
        """Number of tensors that could not be compared."""
        return self.skipped.total()

    def summary(self) -> dict[str, Any]:
        """Return the outcome so far as a JSON object."""
        first = self.first
        fields = {name: getattr(first, name) for name in first.__struct_fields__} if first is not None else None
        return {
            "against": self.path,
            "verdict": self.verdict,
            "num_steps": self.num_steps,
            "num_compared": self.num_compared,
            "num_skipped": self.num_skipped,
            "num_diverged_steps": self.num_diverged_steps,
            "first_divergence": finite_or_none(fields),
            "skipped": [f"{plural(n, 'tensor')}: {why}" for why, n in self.skipped.most_common(5)],
        }

    @property
    def verdict(self) -> str:
        """``differs``, ``agrees``, or ``unknown`` if no tensor was compared."""
        return "differs" if self.first is not None else "agrees" if self.num_compared else "unknown"

    def __str__(self) -> str:
        compared = f"{plural(self.num_compared, 'tensor')} of {plural(self.num_steps, 'step')} compared"
        more = f", {self.num_skipped:,} not: {self.skipped.most_common(1)[0][0]}" if self.skipped else ""
        if self.first is None:
            return f"{'agrees with' if self.num_compared else 'not compared with'} {self.path} ({compared}{more})"
        steps = f"{self.num_diverged_steps:,} of {plural(self.num_steps, 'step')} diverge"
        return f"differs from {self.path}: {steps}, first step {self.first.step} at {self.first} ({compared}{more})"

    # ---- values

    def check(
        self, port: SitePort, firing: Firing, layout: RecordLayout, values: Values, digest: bytes | None
    ) -> LiveDivergence | None:
        """Compare one tensor; return its divergence if it is the first of the step, else None. Never raises.

        ``values`` returns the tensor as an array in host memory; ``digest`` is its hash, if known.
        """
        try:
            step = firing.step
            if step is not self._step:
                self._begin(step)
            if self._has_diverged or step.skipped:
                return None
            divergence = self._compare(port, firing, layout, values, digest)
            self.num_compared += 1
            if not self._has_begun:
                self._has_begun, self.num_steps = True, self.num_steps + 1
            if divergence is not None:
                self._diverged(divergence)
            return divergence
        except (LookupError, TapscopeError) as error:
            self._skip(str(error.args[0] if error.args else error))
        except Exception as error:  # noqa: BLE001 - an error must not reach the model
            self._skip(f"{type(error).__name__}: {error}")
        return None

    def _begin(self, step: OpenStep) -> None:
        self._step, self._has_diverged, self._has_begun = step, False, False
        self._bound.begin()
        self._moved.clear()
        self._accepted.clear()
        self._is_translated = False

    def _skip(self, reason: str) -> None:
        key = reason if len(self.skipped) < _MAX_REASONS or reason in self.skipped else "other reasons"
        self.skipped[key] += 1

    def _diverged(self, divergence: LiveDivergence) -> None:
        self._has_diverged = True
        self.num_diverged_steps += 1
        self.first = self.first or divergence
        if self.num_diverged_steps <= _MAX_LOGGED:
            last = "; further steps are counted" if self.num_diverged_steps == _MAX_LOGGED else ""
            text = "tapscope: step %d, rank %d: first divergence from %s at %s%s"
            _log.warning(text, divergence.step, divergence.rank, self._run.name, divergence, last)

    def _compare(
        self, port: SitePort, firing: Firing, layout: RecordLayout, values: Values, digest: bytes | None
    ) -> LiveDivergence | None:
        if '"slice":' in layout.members:
            raise LookupError("the rules keep a part of its rows")
        self._translate(firing.step)
        place = port.site, firing.occurrence, firing.micro, firing.pass_
        record = self._rows.record(place)
        if record is not None and digest is not None and self._is_alike(record, layout):
            if record.hash == digest.hex():
                return None
            if record.entry is None and self._rtol == 0.0:
                step_number = firing.step.info.step
                return LiveDivergence(step_number, self._info.rank, port.site, "unequal", error=math.nan, limit=0.0)
        if ".experts." in port.site and not self._bound.is_exact and self._rtol is None:
            raise LookupError("rows of an expert, which follow from rounded scores")
        stored = self._rows.rows(place, layout, record)
        if "mask" in port.site.rpartition(":")[2] and any(one.record.dtype != layout.dtype for one in stored):
            raise LookupError("a mask in another dtype")
        # The same pair of bytes occurs at many sites, because an output is the input of the next module.
        pair = None if digest is None else (digest, layout.members, *(_bytes_of(one.record) for one in stored))
        if pair in self._accepted:
            return None
        rows = self._rows.match(values(), stored, layout)
        divergence = self._judge(port, firing, rows, layout, [one.record.dtype or "" for one in stored])
        if divergence is None and pair is not None:
            self._accepted.add(pair)
        return divergence

    def _is_alike(self, record: Record, layout: RecordLayout) -> bool:
        """Return whether the hash of ``record`` is comparable with that of a whole tensor with this layout."""
        is_whole = record.slice is None and record.hash is not None and self._run.hash_version == HASH_VERSION
        return is_whole and record.dtype == layout.dtype and list(record.shape) == list(layout.shape)

    def _translate(self, step: OpenStep) -> None:
        """Map the requests of a live step to the reference, once per step."""
        if not self._is_translated:
            info = step.info if step.late_rows is None else step.late_rows.info
            self._rows.begin(self._requests.translate(info))
            self._is_translated = True

    # ---- verdict

    def _judge(
        self, port: SitePort, firing: Firing, rows: MatchedRows, layout: RecordLayout, stored: list[str]
    ) -> LiveDivergence | None:
        share, excess = self._bound.share, None
        deviation = rows.deviation(share)
        if not deviation.num_unequal:
            return None
        is_float, unit_roundoff = self._kind((layout.dtype, *stored))
        is_rounding = is_float and not deviation.num_mismatched
        if is_rounding and self._rtol is not None and 0.0 < self._rtol >= deviation.worst:
            return None
        if is_rounding and self._rtol is None:
            if self._moved and rows.live is not None:
                rows = rows.without(self._moved)
                deviation = rows.deviation(share)
                if not rows.num_rows:
                    raise LookupError("all its rows took other experts after rounding")
            excess = self._bound.check(deviation, unit_roundoff)
            if excess is None:
                return None
        # A divergence: measure the rows again, in detail, for the report.
        measures, live = rows.measured(), rows.live
        by: dict[str, Any] = {"step": firing.step.info.step, "rank": self._info.rank, "site": port.site}
        if num_odd := deviation.num_mismatched:
            where = self._row(live, measures.nonfinite_mismatch)
            return LiveDivergence(**by, test="nonfinite", error=float(num_odd), limit=0.0, **where)
        if excess is not None:
            where = {} if excess.test == "scale" else self._row(live, row_errors(measures))
            return LiveDivergence(**by, test=excess.test, error=excess.error, limit=excess.limit, **where)
        if is_float and self._rtol:
            where = self._row(live, row_errors(measures))
            return LiveDivergence(**by, test="tolerance", error=deviation.worst, limit=self._rtol, **where)
        # Rounding may change integers that are chosen by floats, e.g. expert and token ids.
        if self._rtol != 0.0 and not self._bound.is_exact:
            if live is not None:
                self._moved.update(live[measures.width != measures.equal].tolist())
                self._accepted.clear()
            raise LookupError("integers that follow from rounded values")
        where = self._row(live, measures.max_abs)
        return LiveDivergence(**by, test="unequal", error=float(deviation.num_unequal), limit=0.0, **where)

    def _kind(self, names: tuple[str, ...]) -> tuple[bool, float]:
        """Return (whether all dtypes in ``names`` are floating-point, unit roundoff).

        The unit roundoff is that of the coarsest among these dtypes and those of the two models.
        """
        if names not in self._kinds:
            is_float = all(map(dtypes.is_float, names))
            coarsest = max(map(dtypes.epsilon, [*names, *self._dtypes])) if is_float else 0.0
            self._kinds[names] = is_float, coarsest / 2
        return self._kinds[names]

    def _row(self, live: Array | None, ranked: Array) -> dict[str, Any]:
        """Return the request and position of the row with the largest value in ``ranked``; empty if unknown.

        ``live`` are the slots of the token rows.
        """
        if live is None or self._step is None or not len(ranked):
            return {}
        slot = int(live[int(np.argmax(ranked))])
        info = self._step.info if self._step.late_rows is None else self._step.late_rows.info
        for span in info.rows:
            if span.slot <= slot < span.slot + span.count:
                return {"request": span.request, "position": span.position + slot - span.slot}
        return {}


def _bytes_of(record: Record) -> tuple[Any, ...]:
    """Return a key of the stored bytes of a record; records that share a payload have equal keys."""
    assert record.entry is not None
    return record.entry.file, record.entry.offset, record.dtype, record.shape, record.rows
