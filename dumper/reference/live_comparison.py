"""LiveComparison: compares what a model computes with a recorded run, while it runs."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct

from tapscope.core import dims, dtypes
from tapscope.core.errors import ConfigError, DimsError, TapscopeError
from tapscope.core.formatting import number, plural
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import local_tensor
from tapscope.dumper.reference.request_mapping import RequestMapping
from tapscope.dumper.reference.rounding_bound import RoundingBound
from tapscope.dumper.reference.stored_tensors import Array, StoredRows, StoredTensors, num_token_axes, rank_of
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.kernels.native.aggregate import row_errors
from tapscope.kernels.native.compare import compare_rows
from tapscope.kernels.native.measure import RowMeasures
from tapscope.run_format.manifest import HASH_VERSION
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run
from tapscope.sources import open_run

Digest = Callable[[], bytes | None]
_log = logging.getLogger("tapscope")
_MAX_LOGGED = 10
_MAX_REASONS = 50
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Hyperparameters of models whose tokens may take other experts after rounding."""


class LiveDivergence(Struct, frozen=True):
    """The first site of a step that differs from the reference by more than rounding explains."""

    step: int
    rank: int
    site: str
    test: str
    """``median_row``, ``worst_row`` or ``scale`` (a common factor) for errors beyond rounding, ``tolerance``,
    ``nonfinite`` or ``unequal``."""
    error: float
    limit: float
    request: str | None = None
    """With ``position``: the token row with the largest error."""
    position: int | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f"; worst in request {self.request}, position {self.position}"
        return f"{self.site}: {self._what()}{where}"

    def _what(self) -> str:
        if self.test == "nonfinite":
            return f"{plural(int(self.error), 'value')} not finite in one run only"
        if self.test == "unequal":
            return "not equal" if math.isnan(self.error) else f"{plural(int(self.error), 'element')} not equal"
        if self.test == "scale":
            return f"a common scale off by {self.error:.1%}, rounding explains {self.limit:.2%}"
        if self.test == "tolerance":
            return f"error {number(self.error)}, tolerance {number(self.limit)}"
        return f"error {number(self.error)}, rounding explains {number(self.limit)}"


class _Rows(NamedTuple):
    """A live tensor compared with the reference."""

    measures: RowMeasures
    live: Array | None
    """Token row of each measured row; None if rows are not tokens."""

    def without(self, slots: set[int]) -> "_Rows":
        """The rows that are not in ``slots``."""
        assert self.live is not None
        kept = np.flatnonzero(~np.isin(self.live, list(slots)))
        measures = RowMeasures(self.measures.floats[:, kept], self.measures.integers[:, kept])
        return _Rows(measures, self.live[kept])


class LiveComparison:
    """Compares the tensors of one rank with those of a recorded run. No method but :meth:`open` raises.

    A step is compared up to its first divergence: what follows depends on it.
    """

    def __init__(self, run: Run, info: RankInfo, *, rtol: float | None = None) -> None:
        """Raises ConfigError if the ranks of ``run`` do not correspond to this one."""
        self._run = run
        self._info = info
        self._rtol = rtol
        self._stored = StoredTensors(run, rank_of(run, info, "against"))
        self._requests = RequestMapping.of(run)
        self._step: OpenStep | None = None
        self._translated: StepInfo | None = None
        self._same_step: int | None = None
        self._slots: Array = np.empty(0, np.int64)
        """Slots of the token rows of the step."""
        self._holds_all = False
        """Whether these are all slots of its grid, in order."""
        self._dims: dict[str, str | None] = {}
        """Members of a layout -> its dims."""
        self._dtypes = [name for name in (info.dtype, str(run.manifest.get("dtype", ""))) if dtypes.is_float(name)]
        config = {**run.model_config, **info.model_config}
        self._bound = RoundingBound(rows_may_move=any(config.get(name, 0) for name in _EXPERTS))
        self._moved: set[int] = set()
        """Token rows of the step that took other experts after rounding: their values are not comparable."""
        self._has_diverged = False
        self._has_begun = False
        self.first: LiveDivergence | None = None
        """The first divergence of the run."""
        self.num_compared = 0
        self.num_steps = 0
        self.num_diverged_steps = 0
        self.skipped: Counter[str] = Counter()
        """Why tensors were not compared -> how many."""

    @classmethod
    def open(cls, path: str | Path, info: RankInfo, *, rtol: float | None = None) -> "LiveComparison":
        """The comparison with the run at ``path``; raises as :func:`open_run`, and ConfigError."""
        run = open_run(path)
        if not any(record.entry is not None or record.hash for record in run.records):
            raise ConfigError(f"against={path}: the run holds neither values nor hashes to compare with")
        return cls(run, info, rtol=rtol)

    @property
    def path(self) -> str:
        """The reference run."""
        return str(self._run.path)

    @property
    def num_skipped(self) -> int:
        """Tensors that could not be compared."""
        return self.skipped.total()

    def summary(self) -> dict[str, Any]:
        """The outcome so far, as JSON types."""
        first = self.first
        fields = {name: getattr(first, name) for name in first.__struct_fields__} if first is not None else None
        return {
            "against": self.path,
            "verdict": self.verdict,
            "num_steps": self.num_steps,
            "num_compared": self.num_compared,
            "num_skipped": self.num_skipped,
            "num_diverged_steps": self.num_diverged_steps,
            "first_divergence": None if fields is None else {k: _finite(v) for k, v in fields.items()},
            "skipped": [f"{plural(n, 'tensor')}: {why}" for why, n in self.skipped.most_common(5)],
        }

    @property
    def verdict(self) -> str:
        """``differs``, ``agrees`` or, if nothing was compared, ``unknown``."""
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
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, digest: Digest
    ) -> LiveDivergence | None:
        """Compare one tensor, whose hash ``digest()`` returns if it is known. Never raises.

        Returns the divergence if it is the first of its step.
        """
        try:
            step = firing.step
            if step is not self._step:
                self._begin(step)
            if self._has_diverged or step.skipped:
                return None
            found = self._compare(port, firing, tensor, layout, digest)
            self.num_compared += 1
            if not self._has_begun:
                self._has_begun, self.num_steps = True, self.num_steps + 1
            if found is not None:
                self._diverged(found)
            return found
        except (LookupError, TapscopeError) as error:
            self._skip(str(error.args[0] if error.args else error))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._skip(f"{type(error).__name__}: {error}")
        return None

    def _begin(self, step: OpenStep) -> None:
        self._step, self._has_diverged, self._has_begun = step, False, False
        self._bound.begin()
        self._moved.clear()
        self._translated = None

    def _skip(self, reason: str) -> None:
        key = reason if len(self.skipped) < _MAX_REASONS or reason in self.skipped else "other reasons"
        self.skipped[key] += 1

    def _diverged(self, found: LiveDivergence) -> None:
        self._has_diverged = True
        self.num_diverged_steps += 1
        self.first = self.first or found
        if self.num_diverged_steps <= _MAX_LOGGED:
            last = "; further steps are counted" if self.num_diverged_steps == _MAX_LOGGED else ""
            text = "tapscope: step %d, rank %d: first divergence from %s at %s%s"
            _log.warning(text, found.step, found.rank, self._run.name, found, last)

    def _compare(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, digest: Digest
    ) -> LiveDivergence | None:
        if '"slice":' in layout.members:
            raise LookupError("the rules keep a part of its rows")
        step, place = self._info_of(firing.step), (port.site, firing.occurrence, firing.micro, firing.pass_)
        record = None if self._same_step is None else self._stored.record(place, self._same_step)
        if record is not None and self._is_alike(record, layout) and (known := digest()) is not None:
            if record.hash == known.hex():
                return None
            if record.entry is None and self._rtol == 0.0:
                step_number = firing.step.info.step
                return LiveDivergence(step_number, self._info.rank, port.site, "unequal", error=math.nan, limit=0.0)
        if ".experts." in port.site and not self._bound.is_exact and self._rtol is None:
            raise LookupError("rows of an expert, which follow from rounded scores")
        if not self._stored.has(port.site):
            raise LookupError("the reference has no values of the site")
        whole = self._whole(place, step, layout)
        if whole is None and not step.rows:
            raise LookupError("the reference does not have this step, or has it with another shape")
        found = [whole] if whole is not None else self._stored.rows(place, step)
        if "mask" in port.site.rpartition(":")[2] and any(one.record.dtype != layout.dtype for one in found):
            raise LookupError("a mask in another dtype")
        live = _array(local_tensor(tensor).cpu(), layout.dtype)
        rows = self._measure(port, live, found, step, layout)
        return self._judge(port, firing, rows, layout, [one.record.dtype or "" for one in found])

    def _is_alike(self, record: Record, layout: RecordLayout) -> bool:
        """Whether the hash of the record is one of all bytes of a tensor with this layout."""
        is_whole = record.slice is None and record.hash is not None and self._run.hash_version == HASH_VERSION
        return is_whole and record.dtype == layout.dtype and list(record.shape) == list(layout.shape)

    def _info_of(self, step: OpenStep) -> StepInfo:
        """The step under the reference's names."""
        if self._translated is None:
            info = step.info if step.late_rows is None else step.late_rows.info
            self._translated = found = self._requests.translate(info)
            self._same_step = self._stored.same_step(found)
            spans = [np.arange(span.slot, span.slot + span.count) for span in found.rows]
            self._slots = np.concatenate(spans) if spans else np.empty(0, np.int64)
            self._holds_all = np.array_equal(self._slots, np.arange(math.prod(found.grid)))
        return self._translated

    def _whole(self, place: Any, step: StepInfo, layout: RecordLayout) -> StoredRows | None:
        """The record of the same step, if it has the same layout."""
        record = None if self._same_step is None else self._stored.record(place, self._same_step)
        if record is None or record.entry is None or record.slice is not None:
            return None
        grid = (sum(n for _, n in layout.rows),) if layout.rows is not None else step.grid
        axes = num_token_axes(layout.shape, grid)
        if step.rows and axes is not None and layout.rows is None and record.rows is None:
            return StoredRows(record, self._slots, self._slots, axes)
        return StoredRows(record, None, None)

    def _measure(
        self, port: SitePort, live: Array, found: list[StoredRows], step: StepInfo, layout: RecordLayout
    ) -> _Rows:
        parts, slots = list[RowMeasures](), list[Array]()
        for one in found:
            stored = self._run.array(one.record)
            if one.live is None or one.stored is None:
                stored = self._shard(port, stored, live.shape, 0, layout)
                return _Rows(compare_rows(_matrix(stored), _matrix(live)), None)
            axes = num_token_axes(live.shape, step.grid)
            if axes is None or layout.rows is not None:
                raise LookupError("its rows are not the tokens of the step")
            flat = stored.reshape(-1, *stored.shape[one.num_token_axes :])
            rows = live.reshape(-1, *live.shape[axes:])
            flat = self._shard(port, flat, rows.shape, 1, layout, axes)
            here, there = np.asarray(one.live, np.int64), np.asarray(one.stored, np.int64)
            if one.live is self._slots and self._holds_all:
                parts.append(compare_rows(_matrix(flat, 1), _matrix(rows, 1)))
            else:
                parts.append(compare_rows(_matrix(flat, 1), _matrix(rows, 1), there, here))
            slots.append(here)
        if not parts:
            raise LookupError("its tokens are not those of the reference")
        return _Rows(parts[0] if len(parts) == 1 else RowMeasures.concat(parts), np.concatenate(slots))

    def _shard(
        self,
        port: SitePort,
        stored: Array,
        shape: tuple[int, ...],
        first: int,
        layout: RecordLayout,
        num_token_axes: int = 0,
    ) -> Array:
        """This rank's shard of a whole stored tensor, by the dims of the live one; axes before ``first`` are rows."""
        text = self._dims_of(layout)
        if self._is_partial(text):
            raise LookupError("a partial sum of one rank")
        if stored.shape[first:] == shape[first:]:
            return stored
        misfit = f"shape {_shape(shape)}, recorded {_shape(stored.shape)}"
        if text is None or stored.ndim != len(shape):
            raise LookupError(misfit)
        try:
            parsed = dims.parse(text)
        except DimsError as error:
            raise LookupError(str(error)) from None
        skew = parsed.ndim - len(shape)  # the token grid of two axes is one here
        for axis, shard in parsed.shards():
            at, dim = axis - skew, parsed.dims[axis]
            if dim.sections or dim.groups or shard.order or at < first:
                raise LookupError(f"sharded as {dim}, which is not compared live")
            size, place = self._info.mesh.get(shard.axis, 1), self._info.coords.get(shard.axis, 0)
            if stored.shape[at] != size * shape[at]:
                raise LookupError(misfit)
            part = [slice(None)] * stored.ndim
            part[at] = slice(place * shape[at], (place + 1) * shape[at])
            stored = stored[tuple(part)]
        if stored.shape[first:] != shape[first:]:
            raise LookupError(misfit)
        return np.ascontiguousarray(stored)

    def _dims_of(self, layout: RecordLayout) -> str | None:
        if layout.members not in self._dims:
            self._dims[layout.members] = json.loads(f"{{{layout.members[1:]}}}").get("dims")
        return self._dims[layout.members]

    def _is_partial(self, text: str | None) -> bool:
        """Whether dims name a sum of which this rank has a part, and the reference all."""
        if text is None or len(self._run.ranks) > 1:
            return False
        try:
            partial = [shard.axis for _, shard in dims.parse(text).shards() if shard.partial]
        except DimsError:
            return False
        return any(self._info.mesh.get(axis, 1) > 1 for axis in partial)

    # ---- verdict

    def _judge(
        self, port: SitePort, firing: Firing, rows: _Rows, layout: RecordLayout, stored: list[str]
    ) -> LiveDivergence | None:
        measures = rows.measures
        by: dict[str, Any] = {"step": firing.step.info.step, "rank": self._info.rank, "site": port.site}
        if num_odd := int(measures.nonfinite_mismatch.sum()):
            return LiveDivergence(**by, test="nonfinite", error=float(num_odd), limit=0.0, **self._row(rows, None))
        num_unequal = int((measures.width - measures.equal).sum())
        if not num_unequal:
            return None
        is_float = dtypes.is_float(layout.dtype) and all(map(dtypes.is_float, stored))
        if self._rtol == 0.0 or not is_float:
            # Rounding may change integers that were chosen by floats: expert and token ids.
            if self._rtol != 0.0 and not self._bound.is_exact:
                if rows.live is not None:
                    self._moved.update(rows.live[measures.width != measures.equal].tolist())
                raise LookupError("integers that follow from rounded values")
            return LiveDivergence(
                **by, test="unequal", error=float(num_unequal), limit=0.0, **self._row(rows, measures.max_abs)
            )
        if self._rtol is not None:
            errors = row_errors(measures)
            worst = float(errors.max())
            if worst <= self._rtol:
                return None
            return LiveDivergence(**by, test="tolerance", error=worst, limit=self._rtol, **self._row(rows, errors))
        if self._moved and rows.live is not None:
            rows = rows.without(self._moved)
            measures = rows.measures
            if not len(measures):
                raise LookupError("all its rows took other experts after rounding")
        names = [layout.dtype, *stored, *self._dtypes]
        excess = self._bound.check(measures, max(map(dtypes.epsilon, names)) / 2)
        if excess is None:
            return None
        row = {} if excess.test == "scale" else self._row(rows, excess.errors)
        return LiveDivergence(**by, test=excess.test, error=excess.error, limit=excess.limit, **row)

    def _row(self, rows: _Rows, errors: Array | None) -> dict[str, Any]:
        """Request and position of the row with the largest error, or with values that are not finite."""
        ranked = rows.measures.nonfinite_mismatch if errors is None else errors
        if rows.live is None or self._step is None or not len(ranked):
            return {}
        slot = int(rows.live[int(np.argmax(ranked))])
        info = self._step.info if self._step.late_rows is None else self._step.late_rows.info
        for span in info.rows:
            if span.slot <= slot < span.slot + span.count:
                return {"request": span.request, "position": span.position + slot - span.slot}
        return {}


def _array(tensor: torch.Tensor, dtype: str) -> Array:
    """A tensor in host memory as an array, without a copy if it is contiguous."""
    dense = tensor.contiguous()
    if dense.numel() == 0:
        return np.empty(tuple(dense.shape), dtypes.numpy_dtype(dtype))
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    return raw.view(dtypes.numpy_dtype(dtype)).reshape(tuple(dense.shape))


def _matrix(array: Array, num_axes: int | None = None) -> Array:
    """As [rows, width]: the leading ``num_axes``, or all but the last, are rows."""
    if array.ndim == 0:
        return array.reshape(1, 1)
    if num_axes is None:
        return array.reshape(-1, array.shape[-1])
    return np.ascontiguousarray(array).reshape(array.shape[0], -1)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0 else value


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"
