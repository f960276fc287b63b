"""Suggester: find dims that would explain a site that could not be assembled, by trying them on the pair itself."""

import math
import re
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct, field, structs

from tapscope.comparator.alignment.align import JoinPlan
from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.pieces import leaves
from tapscope.comparator.matching.concatenated import FLAG, num_rows
from tapscope.comparator.matching.fused_tensors import annotate_parts
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import WidthError, measure
from tapscope.comparator.pair_analysis.candidates import candidates, fused_candidates, permuted_candidates
from tapscope.comparator.pair_analysis.replicas import check_replicas
from tapscope.comparator.runs.derived_tensor import FusedPart
from tapscope.comparator.runs.hints import Hints
from tapscope.comparator.runs.mesh_coords import Coords, varying_axes
from tapscope.comparator.runs.series import Series
from tapscope.core.axes import STAGES, Dims
from tapscope.core.errors import DataError, DimsError
from tapscope.core.site import is_parameter
from tapscope.run_format.record import Record

MAX_EQUAL_ERROR = 0.05
"""Maximum relative error at which values count as equal to the other run's; wrong dims give about 1."""
_BOUNDS = (1e-5, 0.01)
MIN_WRONG_ERROR = 0.3
"""Minimum relative error at which shards are suspected of being joined incorrectly."""
_MAX_VAIN_TRIES = 6
_MAX_CANDIDATES = 64
"""Maximum number of candidates tried for one side of a site."""
_SITES = 24
"""Maximum number of sites tried in one comparison; sites that differ only in numbers share the first result."""
_MAX_ROWS_READ = 128
"""Maximum number of rows read to check whether values agree."""
_MAX_ELEMENTS_READ = 1 << 22
_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")


class _Tried(Struct, frozen=True):
    """The result of trying one candidate."""

    dims: str
    error: float
    """Relative error of the leading rows; NaN if there are no values to compare."""


class Suggester(Struct):
    """Suggests dims for the pairs of one comparison."""

    preparer: PairPreparer
    _known: dict[str, str] = field(default_factory=dict)
    """Site of the target with ``*`` for each layer number -> suggestion."""
    _vain: int = 0
    """Number of sites that differ although no tried dims explain them, and which are therefore likely faults."""

    def suggest(self, pair: Pair, *, broken: bool) -> str:
        """Return a sentence with dims that would make the pair's sides match; empty if there are none.

        ``broken``: shards could not be assembled; the sentence then also says so if no dims fit.
        """
        baseline, target = pair.sides
        if not self.preparer.row_map.known and not broken and (sentence := _as_many_rows(baseline, target)):
            return sentence
        kind = _LAYER.sub("*", target.site)
        if kind not in self._known:
            self._known[kind] = self._try(pair, broken) if len(self._known) < _SITES else ""
        return self._known[kind]

    def check_layout(self, pair: Pair, ready: PreparedPair, error: float) -> str:
        """Return a warning if values differ so much that shards may be joined incorrectly, and other dims give the
        other side's values; otherwise empty."""
        sides = ready.left[0], ready.right[0]
        if (
            error < MIN_WRONG_ERROR
            or self._vain >= _MAX_VAIN_TRIES
            or all(w.piece is None or len(list(leaves(w.piece))) < 2 for w in sides)
        ):
            return ""
        sentence = self.suggest(pair, broken=False)
        self._vain += not sentence
        return f"its shards may be joined incorrectly: {sentence}" if sentence else ""

    def _try(self, pair: Pair, broken: bool) -> str:
        sentences = []
        for side, (series, other) in enumerate((pair.sides, pair.sides[::-1])):
            if series.first.shape and (series.derivation is None or isinstance(series.derivation, FusedPart)):
                sentences.append(self._try_side(pair, side, series, other))
        fits = next((text for text in sentences if "fit" in text), "")
        return fits or (next((text for text in sentences if text), "") if broken else "")

    def _try_side(self, pair: Pair, side: int, series: Series, other: Series) -> str:
        recorded = series.sources[0] if series.sources else series
        places = self._places(side, recorded)
        axes = [axis for axis in varying_axes(places) if axis != "rank" and axis not in STAGES]
        choices = candidates(series, other, places, axes)
        if isinstance(series.derivation, FusedPart):
            choices = fused_candidates(recorded, other, places, axes, series.derivation.fused.axis)
        trials = [
            tried
            for dims in islice(choices, _MAX_CANDIDATES)
            if (tried := self._measured(pair, side, dims)) is not None
        ]
        name, every = ("baseline", "target")[side], _LAYER.sub("*", recorded.site)
        agreeing = [t for t in trials if t.error <= MAX_EQUAL_ERROR]
        unlikely = "moe_" if "attn" in recorded.site else "attn_"  # ranks may have coordinates on both kinds of axes
        best = min(agreeing, key=lambda t: ("=" in t.dims, t.error, unlikely in t.dims, len(t.dims)), default=None)
        if best is not None:
            return f"'{best.dims}' would fit ({_describe_error(best.error)}): --dims '{name}:{every}={best.dims}'"
        unread = [t.dims for t in trials if math.isnan(t.error)]
        if unread:
            return f"of its shape, {' or '.join(map(repr, unread[:3]))} would fit: --dims '{name}:{every}=...'"
        if sentence := self._try_turned(pair, side, series, other, places, axes):
            return sentence
        over = " and ".join(axes)
        return f"no sharding, sum or replication over {over} gives the {_other_run(name)}'s values" if axes else ""

    def _places(self, side: int, recorded: Series) -> list[Coords]:
        """Return the coordinates of the ranks in the first firing, limited to one row table if ranks have different
        ones."""
        records, rows = list(recorded.firings[0].records), self.preparer.rows_of(side)
        if not is_parameter(recorded.site):
            groups: dict[int, list[Record]] = {}
            for record in records:
                groups.setdefault(id(rows.of(record)), []).append(record)
            records = max(groups.values(), key=_num_elements)
        coords = self.preparer.mesh_coords[side].coords
        return [coords[record.key.rank] for record in records]

    def _try_turned(
        self, pair: Pair, side: int, series: Series, other: Series, places: Sequence[Coords], axes: Sequence[str]
    ) -> str:
        """Return a suggestion with permuted axes; both sides need dims then, because names identify axes."""
        if series.derivation is not None or other.derivation is not None:
            return ""
        names = ("baseline", "target")[side], ("baseline", "target")[1 - side]
        for dims, theirs in islice(permuted_candidates(series, other, places, axes), _MAX_CANDIDATES):
            tried = self._measured(pair, side, dims, theirs)
            if tried is not None and tried.error <= MAX_EQUAL_ERROR:
                flag = f"--dims '{names[0]}:{_LAYER.sub('*', series.site)}={tried.dims}'"
                flag += f" --dims '{names[1]}:{_LAYER.sub('*', other.site)}={theirs}'" if theirs else ""
                return (
                    f"its axes are in another order, '{tried.dims}' would fit ({_describe_error(tried.error)}): {flag}"
                )
        return ""

    def _measured(self, pair: Pair, side: int, dims: Dims, theirs: str | None = None) -> _Tried | None:
        """Try the dims for one side, and ``theirs`` for the other; return None if they do not make the sides match."""
        text = str(dims)
        hints = Hints(mesh=self.preparer.mesh_coords[side].sizes)
        changed = [
            _first_with(one, text if i == side else theirs, hints) for i, one in enumerate((pair.baseline, pair.target))
        ]
        try:
            ready = self.preparer.prepare(structs.replace(pair, baseline=changed[0], target=changed[1]))
        except DimsError:
            return None
        if ready.problem or not ready.plan.joins:
            return None
        if not all(w.has_values for w in ready.joined_firings):
            return _Tried(text, math.nan)
        try:
            total = measure(LazyPair(_some_rows(ready))).total
            replicas = (
                math.prod(ready.left[0].shape) <= _MAX_ELEMENTS_READ and check_replicas(ready.joined_firings).problem
            )
        except (WidthError, DataError):
            return None
        return None if replicas else _Tried(text, total.rel_l2)


def _num_elements(records: Sequence[Record]) -> int:
    return math.prod(records[0].shape)


def _as_many_rows(baseline: Series, target: Series) -> str:
    """Return advice if both sides hold equally many rows in total, split into different steps; otherwise empty."""
    counts = num_rows(baseline), num_rows(target)
    if None in counts or counts[0] != counts[1] or max(len(one.firings) for one in (baseline, target)) < 2:
        return ""
    shapes = [[firing.records[0].shape for firing in one.firings] for one in (baseline, target)]
    return f"both hold {counts[0]:,} rows in all, in different steps: {FLAG}" if shapes[0] != shapes[1] else ""


def _describe_error(error: float) -> str:
    """Return a relative error in words, rounded so that similar sites get the same sentence."""
    bound = next((bound for bound in _BOUNDS if error <= bound), MAX_EQUAL_ERROR)
    return f"relative error below {bound:g}" if error else "equal values"


def _other_run(name: str) -> str:
    return "target" if name == "baseline" else "baseline"


def _first_with(series: Series | None, dims: str | None, hints: Hints) -> Series:
    """Return the series reduced to its first firing, with other dims; for a part of a fused tensor, dims of the fused
    tensor."""
    assert series is not None
    if series.sources:
        sources = tuple(_first_with(one, dims, hints) for one in series.sources)
        if isinstance(series.derivation, FusedPart):
            sources = tuple(annotate_parts(one, series.derivation.fused, hints) for one in sources)
        return structs.replace(series, sources=sources, firings=sources[0].firings)
    firing = series.firings[0]
    if dims is not None:
        firing = structs.replace(firing, records=tuple(r._replace(dims=dims) for r in firing.records))
    return structs.replace(series, firings=(firing,))


def _some_rows(ready: PreparedPair) -> PreparedPair:
    join = ready.plan.joins[0]
    few = [
        rows[:_MAX_ROWS_READ] if not isinstance(rows, slice) else _head(rows)
        for rows in (join.baseline_rows, join.target_rows)
    ]
    pairs = None if join.pairs is None else join.pairs[:_MAX_ROWS_READ]
    return structs.replace(
        ready, plan=JoinPlan((RowJoin(join.baseline, join.target, few[0], few[1], pairs, aligned=False),))
    )


def _head(rows: slice) -> slice:
    start = rows.start or 0
    return slice(start, start + _MAX_ROWS_READ if rows.stop is None else min(rows.stop, start + _MAX_ROWS_READ))
