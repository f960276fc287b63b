"""Random pairs of runs: sites of several dtypes that are equal, off by rounding, damaged, scaled or non-finite."""

import ml_dtypes
import numpy as np
from factories import RunFactory
from hypothesis import strategies as st

from tapscope.core.observe import RowSpan

SITES = ("model.embed:out", "model.layers.0.mlp:out", "model.layers.1.mlp:out", "lm_head:out")
DTYPES = ("float32", "float16", "int32", "uint8")
MORE_DTYPES = (*DTYPES, "bfloat16", "float8_e4m3fn", "float64", "int64")


@st.composite
def pairs(draw, dtypes=DTYPES):
    """Draw [steps] pairs of arrays per site; the target gets no change, noise, a value, NaN, or a factor."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns, steps = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    found = {}
    for site in SITES:
        dtype = draw(st.sampled_from(dtypes))
        scale = 10.0 ** draw(st.integers(-4, 4 if dtype not in ("uint8", "float8_e4m3fn") else 2))
        base = [np.clip(rng.standard_normal((rows, columns)) * scale, -6e4, 6e4) for _ in range(steps)]
        kind = draw(st.sampled_from(["same", "noise", "spoiled", "nan", "scaled"]))
        target = [_changed(values, kind, rng) for values in base]
        found[site] = [(_cast(a, dtype), _cast(b, dtype)) for a, b in zip(base, target, strict=True)]
    return rows, found


def _changed(values, kind, rng):
    values = values.copy()
    if kind == "noise":
        values *= 1 + 1e-3 * rng.standard_normal(values.shape)
    elif kind == "spoiled":
        values[-1, -1] += 3 * np.abs(values).max() + 1
    elif kind == "nan":
        values[0, 0] = np.nan
    elif kind == "scaled":
        values *= 1.5
    return values


def _cast(values, dtype):
    if "int" in dtype:
        values = np.nan_to_num(values).clip(0 if dtype == "uint8" else -1e6, 255 if dtype == "uint8" else 1e6)
    with np.errstate(over="ignore"):  # beyond the range of fp16
        return values.astype(getattr(ml_dtypes, dtype, dtype))


def write_pair(root, rows, sites, metrics=()):
    """Write the runs ``base`` and ``target`` below ``root``; ``metrics`` are those of each step."""
    for side, name in enumerate(("base", "target")):
        with RunFactory(root / name) as run:
            for step in range(len(next(iter(sites.values())))):
                run.step(rows=[RowSpan("0", 0, rows, step * rows, 0)], token_ids=range(rows), grid=(rows,))
                for site, values in sites.items():
                    run.put(site, values[step][side], dims="t h")
                for name, value in metrics[step].items() if metrics else ():
                    run.writers[0].line({"type": "metric", "step": step, "name": name, "value": value})
