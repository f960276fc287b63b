"""Means over rows: how attention propagates errors of a few rows, of sharp weights, and of a narrow KV cache."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff, findings_by_site
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import CompareOptions, Verdict
from tapscope.comparator.metrics.error_distribution import QUANTILES, root_mean_square
from tapscope.comparator.noise_floor.error_model import ErrorModel
from tapscope.comparator.noise_floor.inherited_error import InheritedError
from tapscope.comparator.noise_floor.kv_cache_error import kv_cache_epsilon, stored_error
from tapscope.comparator.pipeline.detect_reroutes import detect_reroutes
from tapscope.comparator.pipeline.match_runs import match_runs
from tapscope.comparator.pipeline.measure_pairs import measure_pairs
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.verdict.judge import Judge
from tapscope.core.dtypes import epsilon
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

ROWS, WIDTH = 64, 48
Array = np.ndarray


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def softmax(scores: Array) -> Array:
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    return (grown / grown.sum(-1, keepdims=True)).astype(np.float32)


def write(path: Path, sites: dict[str, Array], cls: str = "ToyAttention", **manifest: object) -> None:
    with RunFactory(path, **manifest) as run:
        run.step(grid=(1, ROWS), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.site("layers.0.mixer:out[0]", cls)
        for site, values in sites.items():
            run.put(site, values)


def attended(states: Array, values: Array, weights: Array, *, tells: bool = False) -> dict[str, Array]:
    """Return the sites of an attention module without a tap on the function between v and o."""
    made = (weights @ values).astype(np.float32)
    sites = {
        "layers.0.mixer:in[hidden_states]": states[None],
        "layers.0.mixer.v:in[x]": states[None],
        "layers.0.mixer.v:out": values[None],
        "layers.0.mixer.o:in[x]": made[None],
    }
    return (
        sites
        | {"layers.0.mixer:out[0]": made[None]}
        | ({"layers.0.mixer:out[1]": weights[None, None]} if tells else {})
    )


@pytest.mark.parametrize(("cls", "mixes"), [("ToyAttention", True), ("ToyMLP", False)])
def test_attention_error_of_few_rows_spreads_to_attending_rows(tmp_path: Path, cls: str, mixes: bool) -> None:
    states, values = normal(1, ROWS, WIDTH), normal(2, ROWS, WIDTH)
    weights = softmax(normal(3, ROWS, ROWS))
    error = np.full((ROWS, 1), 1e-6, np.float32)
    error[::5] = 4e-5  # affects the typical row of the means, but not that of the values
    write(tmp_path / "b", attended(states, values, weights), cls)
    write(tmp_path / "t", attended(states, values * (1.0 + error * normal(4, ROWS, WIDTH)), weights), cls)
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        matched = match_runs(open_runs(one, two, CompareOptions(), (CorruptRecords(one), CorruptRecords(two))))
        judged = detect_reroutes(measure_pairs(matched)).judged
    judge = Judge(judged, matched.sites)
    model = ErrorModel(judged, judge.graph, [{}] * len(judged))
    inherited = model.effects[InheritedError]
    at = next(row for row, one in enumerate(judged) if one.site == "layers.0.mixer.o:in[x]")
    made = judged[at].distribution
    assert made is not None
    assert made.errors[0] > 5.0 * inherited.typical[at]
    given = inherited.given.errors[0, at]
    assert bool(given > 0.7 * made.errors[0]) is mixes
    assert given <= inherited.given.errors[-1, at]


@pytest.mark.parametrize(("scatter", "agrees"), [(24.0, True), (1.0, False)])
@pytest.mark.parametrize("teller", ["b", "t"])
def test_attention_weights_of_one_run_give_the_sharpness_of_both(
    tmp_path: Path, scatter: float, agrees: bool, teller: str
) -> None:
    states, values, scores = normal(1, ROWS, WIDTH), normal(2, ROWS, WIDTH), scatter * normal(3, ROWS, ROWS)
    other = scores + 24.0 * 2e-5 * normal(4, ROWS, ROWS)  # an absolute error that does not depend on the scores
    noisy = states * (1.0 + 1e-5 * normal(5, ROWS, WIDTH))
    for name, x, z in (("b", states, scores), ("t", noisy, other)):
        write(tmp_path / name, attended(x, values, softmax(z), tells=name == teller))
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t"))
    assert found["layers.0.mixer:out[1]"].verdict in (Verdict.ONLY_BASELINE, Verdict.ONLY_TARGET)
    assert (found["layers.0.mixer.o:in[x]"].verdict is Verdict.CLOSE) is agrees


def test_attention_wrong_value_in_a_row_of_sharp_weights_is_found(tmp_path: Path) -> None:
    states, values, weights = normal(1, ROWS, WIDTH), normal(2, ROWS, WIDTH), softmax(24.0 * normal(3, ROWS, ROWS))
    sites = attended(states, values, weights, tells=True)
    write(tmp_path / "b", sites)
    wrong = sites["layers.0.mixer.o:in[x]"].copy()
    wrong[0, 11] = wrong[0, 12]
    write(tmp_path / "t", sites | {"layers.0.mixer.o:in[x]": wrong})
    assert findings_by_site(diff(tmp_path / "b", tmp_path / "t"))["layers.0.mixer.o:in[x]"].verdict is Verdict.DIFFERS


@pytest.mark.parametrize("kept", [("fp8_e4m3", True), ("auto", False), ("", False)])
def test_attention_fp8_kv_cache_raises_the_floor_of_values(tmp_path: Path, kept: tuple[str, bool]) -> None:
    states, values, weights = normal(1, ROWS, WIDTH), normal(2, ROWS, WIDTH), softmax(normal(3, ROWS, ROWS))
    other = values * (1.0 + 1e-6 * normal(4, ROWS, WIDTH))
    noisy = states * (1.0 + 1e-6 * normal(5, ROWS, WIDTH))
    for name, x, v in (("b", states, values), ("t", noisy, other)):
        cached = v.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        sites = attended(x, v, weights) | {"layers.0.mixer.o:in[x]": (weights @ cached)[None]}
        write(tmp_path / name, sites, dtype="float32", kv_cache_dtype=kept[0])
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t"))
    assert found["layers.0.mixer.v:out"].verdict is Verdict.CLOSE
    assert (found["layers.0.mixer.o:in[x]"].verdict is Verdict.CLOSE) is kept[1]


@settings(max_examples=40)
@given(st.floats(1e-4, 0.05), st.sampled_from(["float8_e4m3fn", "float8_e5m2", "bfloat16"]), st.integers(0, 99))
def test_attention_stored_error_matches_two_roundings_to_one_format(error: float, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = np.exp2(draw.uniform(-3.0, 3.0, round(max(40_000, 60 / error))))  # small errors rarely change the rounded value
    y = x * (1.0 + error * draw.standard_normal(len(x)))
    kind = getattr(ml_dtypes, name)
    apart = (y.astype(kind).astype(np.float64) - x.astype(kind).astype(np.float64)) / x
    said = stored_error(np.array(error), epsilon(name))
    assert 0.7 < np.sqrt((apart**2).mean()) / said < 1.3


@settings(max_examples=60)
@given(st.floats(0.0, 0.5), st.integers(0, 999), st.floats(1e-9, 1e3))
def test_attention_root_mean_square_of_quantiles_approximates_the_rows(scatter: float, seed: int, size: float) -> None:
    errors = size * np.exp(scatter * np.random.default_rng(seed).standard_normal(4000))
    quantiles = np.quantile(errors, QUANTILES)[:, None]
    (found,) = root_mean_square(quantiles).tolist()
    assert quantiles[0] <= found * (1 + 1e-12) <= quantiles[-1] * (1 + 1e-9)
    assert 0.95 < found / np.sqrt((errors**2).mean()) < 1.6


@pytest.mark.parametrize(
    ("dtypes", "kept", "expected"),
    [
        (("float32", "bfloat16"), ("fp8_e4m3", "fp8"), 2.0**-3),
        (("bfloat16", "bfloat16"), ("fp8_e5m2", "float8_e5m2"), 2.0**-2),
        (("float32", "bfloat16"), ("bfloat16", "auto"), 2.0**-7),
        (("bfloat16", "bfloat16"), ("auto", ""), 0.0),  # the compute dtype
        (("bfloat16", "bfloat16"), ("fp8_e4m3", "auto"), 0.0),  # the formats differ
        (("bfloat16", "bfloat16"), ("int8", "int8"), 0.0),
        (("", ""), ("fp8", "fp8"), 0.0),
    ],
)
def test_attention_kv_cache_format_must_agree_in_both_runs(
    dtypes: tuple[str, str], kept: tuple[str, str], expected: float
) -> None:
    manifests = [{"dtype": dtype, "kv_cache_dtype": cache} for dtype, cache in zip(dtypes, kept, strict=True)]
    assert kv_cache_epsilon(manifests) == expected


HEADS, HEAD_DIM = 4, 12


def fused_attention(path: Path, states: Array, scale: float, roll: int = 0) -> None:
    """Write an attention module whose kernel writes no weights, with queries and keys that sharpen its softmax.

    The module returns the output of its projection, rolled by ``roll`` columns.
    """
    query, key, value = (states @ normal(seed, WIDTH, WIDTH) for seed in (1, 2, 3))
    query, key = 2.0 * query, 2.0 * key
    q, k, v = (side.reshape(ROWS, HEADS, HEAD_DIM).transpose(1, 0, 2) for side in (query, key, value))
    scores = np.where(np.tri(ROWS, dtype=bool), scale * (q @ k.transpose(0, 2, 1)), -np.inf)
    made = (softmax(scores) @ v).transpose(1, 0, 2).reshape(ROWS, WIDTH)
    ones = np.ones((1, ROWS, HEAD_DIM), np.float32)
    module = "layers.0.self_attn"
    with RunFactory(path, model_config={"num_attention_heads": HEADS, "head_dim": HEAD_DIM}) as run:
        run.step(grid=(1, ROWS), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.site(f"{module}:out[0]", "ToyAttention")
        run.put(f"{module}:in[hidden_states]", states[None])
        run.put(f"{module}:in[position_embeddings.0]", ones)
        run.put(f"{module}:in[position_embeddings.1]", 0.0 * ones)
        for name, side in (("q", query), ("k", key), ("v", value)):
            run.put(f"{module}.{name}_proj:out", side[None])
        run.put(f"{module}.o_proj:in[input]", made[None].astype(np.float32))
        out = made.astype(np.float32) @ normal(4, WIDTH, WIDTH)
        run.put(f"{module}.o_proj:out", out[None])
        run.put(f"{module}:out[0]", np.roll(out, roll, axis=1)[None])


@pytest.mark.parametrize(
    ("scale", "disabled", "exit_code"),
    [
        pytest.param(1.0, (), 0, id="reproduced-by-the-inputs"),
        pytest.param(1.0, ("inherited_attention",), 1, id="beyond-the-floor-without-them"),
        pytest.param(1.02, (), 1, id="another-scale-of-scores"),
    ],
)
@pytest.mark.parametrize("swaps", [False, True])
def test_attention_output_of_a_fused_kernel_may_inherit_more_than_its_condition(
    tmp_path: Path, scale: float, disabled: tuple[str, ...], exit_code: int, swaps: bool
) -> None:
    states = normal(0, ROWS, WIDTH)
    fused_attention(tmp_path / "base", states, HEAD_DIM**-0.5)
    fused_attention(tmp_path / "target", states * (1.0 + 3e-6 * normal(9, ROWS, WIDTH)), scale * HEAD_DIM**-0.5)
    left, right = ("target", "base") if swaps else ("base", "target")
    report = diff(tmp_path / left, tmp_path / right, disabled=frozenset(disabled))
    assert report.exit_code == exit_code
    one = findings_by_site(report)["layers.0.self_attn.o_proj:in[input]"]
    assert one.verdict.is_bad is bool(exit_code)
    assert any("attention of its own queries" in note for note in one.notes) is (scale == 1.0)


def test_attention_output_of_the_projection_is_not_excused_by_the_attention(tmp_path: Path) -> None:
    states = normal(0, ROWS, WIDTH)
    fused_attention(tmp_path / "base", states, HEAD_DIM**-0.5)
    fused_attention(tmp_path / "target", states * (1.0 + 3e-6 * normal(9, ROWS, WIDTH)), HEAD_DIM**-0.5, roll=1)
    report = diff(tmp_path / "base", tmp_path / "target")
    assert [each.finding.site for each in report.divergences] == ["layers.0.self_attn:out[0]"]
