"""Oracle: whether a bug is observable in the recorded values. Computed in float64, independent of the comparator.

It compares four runs of one setup: without the bug (``clean``), with it (``bugged``), without it in the coarser dtype
of both sides (``narrow``), and without it in a dtype with negligible rounding (``wide``). All have the same layout, so
rows match by index. ``bugged - clean`` is the effect of the bug on a row, ``narrow - wide`` the effect of rounding.
"""

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapscope import open_run
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

OBSERVABLE = 10.0
"""A bug must be reported if effect / rounding of some row reaches this value."""
INVISIBLE = 3.0
"""A bug need not be reported below this effect / rounding."""
_LEAST = 2.0**-25
"""Lower bound on the relative rounding of a row: half of float32's epsilon."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """Observability of a bug."""

    here: float
    """Largest effect / rounding over the output rows of the faulty module."""
    anywhere: float
    """Largest effect / rounding over all sites."""
    rounding: float
    """Relative rounding of the row with ``here``."""
    steps: tuple[int, ...]
    """Steps with an effect above :data:`INVISIBLE`, up to the first one above :data:`OBSERVABLE`."""
    first: str
    """The first site that the bug changes."""
    is_expected: bool
    """Whether ``first`` belongs to the faulty module."""

    @property
    def is_observable(self) -> bool:
        """Whether the bug must be reported."""
        return self.here >= OBSERVABLE

    @property
    def is_invisible(self) -> bool:
        """Whether the bug's effect is indistinguishable from rounding."""
        return self.here < INVISIBLE


@dataclass(frozen=True, slots=True)
class Noise:
    """Two runs whose difference, times ``scale``, is the rounding error."""

    narrow: Path
    wide: Path
    scale: float = 1.0


def observe(clean: Path, bugged: Path, noise: Noise, expect: Sequence[str]) -> Observed:
    """Compare all records of the four runs."""
    with open_run(clean) as one, open_run(bugged) as two, open_run(noise.narrow) as low, open_run(noise.wide) as high:
        return _observe(one, two, _by_key(low), low, _by_key(high), high, noise.scale, expect)


def is_finite(run: Path) -> bool:
    """Return whether every recorded float of a token row is finite; masks may hold infinities."""
    with open_run(run) as opened:
        for record in opened.records:
            values = _floats(opened, record)
            if values is not None and "mask" not in record.key.site and not np.isfinite(values).all():
                return False
    return True


def _observe(
    one: Run,
    two: Run,
    low_keys: dict[Any, Record],
    low: Run,
    high_keys: dict[Any, Record],
    high: Run,
    scale: float,
    expect: Sequence[str],
) -> Observed:
    bugged, effects, first = _by_key(two), [], None
    for record in sorted(one.records, key=lambda r: (r.key.step, r.seq)):
        other = bugged.get(record.key)
        if record.dtype is None or (other is not None and record.hash is not None and other.hash == record.hash):
            continue
        rows = _valid(one, record)
        if rows is None:
            continue
        before, after = _values(one, record, rows), None if other is None else _values(two, other, rows)
        if after is not None and after.shape == before.shape and np.array_equal(before, after, equal_nan=True):
            continue
        is_output = not record.key.site.rpartition(":")[2].startswith("in[")
        first = first or (record.key.site if is_output else None)
        narrow, wide = low_keys.get(record.key), high_keys.get(record.key)
        known = narrow is not None and wide is not None and narrow.shape == wide.shape == record.shape
        noise = _values(low, narrow, rows) - _values(high, wide, rows) if known else None  # type: ignore[arg-type]
        ratio, rounding = _ratio(before, after, noise, scale)
        effects.append((record.key.site, record.key.step, ratio, rounding))
    fitting = _nearest(expect, {site.rpartition(":")[0] for site, *_ in effects})
    here = [e for e in effects if _is_of(e[0], fitting) and not e[0].rpartition(":")[2].startswith("in[")]
    best = max(here, key=lambda e: e[2], default=("", 0, 0.0, 0.0))
    return Observed(
        here=best[2],
        anywhere=max((e[2] for e in effects), default=0.0),
        rounding=best[3],
        steps=_steps(here),
        first=first or "",
        is_expected=first is not None and any(_is_of(first, (glob,)) for glob in expect),
    )


def _by_key(run: Run) -> dict[Any, Record]:
    return {record.key: record for record in run.records}


def _floats(run: Run, record: Record) -> Array | None:
    if record.dtype is None or record.entry is None or record.dtype.startswith(("int", "uint", "bool")):
        return None
    return np.asarray(run.array(record)).astype(np.float64)


def _values(run: Run, record: Record, rows: Array | slice) -> Array:
    """Return the rows of a record that belong to requests, [rows, features], as float64."""
    values = np.asarray(run.array(record)).astype(np.float64)
    values = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    return values[rows]


def _valid(run: Run, record: Record) -> Array | slice | None:
    """Return the non-padding rows of a record; None if unknown."""
    line = run.steps.get(record.key.step, {}).get(record.key.rank)
    if line is None or record.entry is None:
        return None
    grid, size = tuple(line.info.grid), math.prod(line.info.grid)
    slots = np.concatenate([np.arange(r.slot, r.slot + r.count) for r in line.info.rows] or [np.zeros(0, int)])
    if len(slots) == size:
        return slice(None)
    shape = record.shape
    if len(grid) == 2 and shape[:2] == grid[::-1] and (record.dims or "").startswith("s "):  # Megatron's order
        slots = slots % grid[1] * grid[0] + slots // grid[1]
    elif len(shape) < 2 or (shape[: len(grid)] != grid and shape[0] != size):
        return None
    each = math.prod(shape[:-1]) // size  # heads of one token are adjacent
    return np.asarray(slots[:, None] * each + np.arange(each)).ravel()


def _ratio(before: Array, after: Array | None, noise: Array | None, scale: float) -> tuple[float, float]:
    """Return (largest effect / rounding over rows, relative rounding of that row)."""
    if after is None or after.shape != before.shape:
        return math.inf, 0.0
    if not len(before):
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        if (np.isfinite(before) != np.isfinite(after)).any():
            return math.inf, 0.0
        size = np.maximum(np.linalg.norm(before, axis=1), 1e-300)
        effect = np.nan_to_num(np.linalg.norm(after - before, axis=1))
        moved = np.full(len(before), np.inf) if noise is None else np.linalg.norm(noise, axis=1) * scale
        typical = np.nanmedian(moved / size)
        floor = np.maximum(moved, max(typical if np.isfinite(typical) else 0.0, _LEAST) * size)
        ratios = np.where(effect > 0, effect / floor, 0.0)
    at = int(np.nanargmax(ratios))
    return float(ratios[at]), float(floor[at] / size[at])


def _nearest(expect: Sequence[str], recorded: set[str]) -> tuple[str, ...]:
    """Return the faulty modules that were recorded, or their nearest recorded ancestor."""
    found = tuple(glob for glob in expect if any(_is_of(f"{path}:out", (glob,)) for path in recorded))
    if found:
        return found
    around = expect[0].rpartition(".")[0]
    return _nearest((around,), recorded) if around else ()


def _is_of(site: str, globs: Sequence[str]) -> bool:
    """Return whether a site belongs to one of these modules or their submodules."""
    path = site.rpartition(":")[0]
    return any(fnmatch.fnmatchcase(path, glob) or path.startswith(f"{glob}.") for glob in globs)


def _steps(effects: Sequence[tuple[str, int, float, float]]) -> tuple[int, ...]:
    return tuple(_until(sorted((step, ratio) for _, step, ratio, _ in effects)))


def _until(ratios: Sequence[tuple[int, float]]) -> Iterator[int]:
    end = min((step for step, ratio in ratios if ratio >= OBSERVABLE), default=math.inf)
    yield from sorted({step for step, ratio in ratios if ratio >= INVISIBLE and step <= end})
