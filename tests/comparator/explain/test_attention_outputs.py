"""Attention outputs: a wrong page of the KV cache changes few rows by less than a sharp softmax might."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator.explain.recorded_attention import _NUM_SEARCHED_ROWS
from tapscope.core.observe import RowSpan

Array = np.ndarray[Any, Any]
HEADS, DIM, LENGTHS = 4, 16, (24, 17)
PATH = "model.layers.0.self_attn"
PAGE = slice(8, 12)
OFF = frozenset({"attention_outputs"})


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of one request, [n, heads, d] each."""
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v).reshape(len(q), -1)


def given() -> list[list[Array]]:
    """Queries, keys and values of each request; the scores of some tokens are sharp, as in trained models."""
    rng = np.random.default_rng(0)
    made = [[rng.standard_normal((length, HEADS, DIM)) for _ in range(3)] for length in LENGTHS]
    for query, _, value in made:
        query[::3] *= 6.0
        value += 8.0
    return made


def stale_page(request: int, q: Array, k: Array, v: Array) -> Array:
    """The last three tokens of request 0 read a page of request 1."""
    right = attention(q, k, v)
    if request == 0:
        _, keys, values = given()[1]
        k, v = k.copy(), v.copy()
        k[PAGE], v[PAGE] = keys[PAGE], values[PAGE]
        right[-3:] = attention(q, k, v)[-3:]
    return right


def clean(request: int, q: Array, k: Array, v: Array) -> Array:
    del request
    return attention(q, k, v)


def sharp_where_not_fitted(error: float) -> list[list[Array]]:
    """Only rows that are not used to find the formula have scores that a soft cap changes; ``error``: of the inputs."""
    rng, upstream, parts = np.random.default_rng(2), np.random.default_rng(99), []
    for length in LENGTHS:
        parts.append([rng.standard_normal((length, HEADS, DIM)) for _ in range(3)])
        for values in parts[-1][:2]:
            values *= 1 + error * upstream.standard_normal(values.shape)
    used = np.linspace(0, sum(LENGTHS) - 1, _NUM_SEARCHED_ROWS).astype(int)
    scales = np.where(np.isin(np.arange(sum(LENGTHS)), used), 0.2, 6.0)
    for (query, _, _), scale in zip(parts, np.split(scales, np.cumsum(LENGTHS)[:-1]), strict=True):
        query *= scale[:, None, None]
    return parts


def write(
    folder: Path,
    dtype: Any,
    attend: Callable[..., Array] = clean,
    inputs: Callable[[], list[list[Array]]] = given,
    **manifest: Any,
) -> Path:
    """A run whose queries, keys and values are rounded to ``dtype`` before, and whose attention is after."""
    with RunFactory(folder, model_config={"num_attention_heads": HEADS}, **manifest) as run:
        starts = np.cumsum((0, *LENGTHS))
        spans = [RowSpan(f"r{i}", 0, n, 0, int(starts[i])) for i, n in enumerate(LENGTHS)]
        run.step(grid=(sum(LENGTHS),), rows=spans, token_ids=range(sum(LENGTHS)))
        rounded = [[part.astype(dtype).astype(np.float64) for part in parts] for parts in inputs()]
        for port, parts in zip(("query", "key", "value"), zip(*rounded, strict=True), strict=True):
            flat = np.concatenate(parts).reshape(sum(LENGTHS), -1)
            run.put(f"{PATH}.attn:in[{port}]", flat.astype(dtype), dims="t h")
        made = np.concatenate([attend(i, *parts) for i, parts in enumerate(rounded)])
        run.put(f"{PATH}.attn:out", made.astype(dtype), dims="t h")
    return folder


@pytest.mark.parametrize("is_swapped", [False, True])
def test_attention_outputs_stale_page_in_few_rows_is_named(tmp_path: Path, is_swapped: bool) -> None:
    runs = write(tmp_path / "good", np.float32), write(tmp_path / "stale", ml_dtypes.bfloat16, stale_page)
    report = diff(*(runs[::-1] if is_swapped else runs))
    assert report.first_divergence is not None
    assert report.first_divergence.module.startswith(PATH)
    finding = report.first_divergence.finding
    assert finding.test == "attention"
    assert finding.notes[0].startswith("stale's values are not the attention of its own queries, keys and values")
    assert {each.place.request for each in report.first_divergence.tokens} == {"r0"}
    assert diff(*runs, disabled=OFF).exit_code == 0, "the floor alone finds it: this example does not test the detector"


@pytest.mark.parametrize("dtypes", [(np.float32, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, np.float16)])
def test_attention_outputs_rounding_is_close(tmp_path: Path, dtypes: tuple[Any, Any]) -> None:
    report = diff(write(tmp_path / "b", dtypes[0]), write(tmp_path / "t", dtypes[1]))
    assert report.exit_code == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_attention_outputs_with_a_soft_cap_by_chance_are_close(tmp_path: Path, dtype: Any) -> None:
    """The formula that fits a bfloat16 baseline best has a soft cap, which the sharp rows of the target contradict."""
    runs = [
        write(tmp_path / name, kind, clean, partial(sharp_where_not_fitted, error))
        for name, kind, error in (("b", ml_dtypes.bfloat16, 0.0), ("t", dtype, 0.02))
    ]
    assert diff(*runs).exit_code == 0


def test_attention_outputs_the_same_in_both_runs_is_close(tmp_path: Path) -> None:
    """What neither run's inputs give is another formula, not a bug of one of them."""
    runs = [write(tmp_path / name, dtype, stale_page) for name, dtype in (("b", np.float32), ("t", ml_dtypes.bfloat16))]
    assert diff(*runs).exit_code == 0


def test_attention_outputs_of_a_narrow_cache_have_their_floor_only(tmp_path: Path) -> None:
    """The recorded keys and values are those before the cache rounds them."""
    target = write(tmp_path / "t", ml_dtypes.bfloat16, stale_page, kv_cache_dtype="fp8")
    assert diff(write(tmp_path / "b", np.float32), target).exit_code == 0
