"""Measurements of a pair of sites, through real runs."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tapscope.cli import main
from tapscope.comparator import Finding, Report, Verdict
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.batched_pairs import BatchedPairs
from tapscope.comparator.metrics.detail import Detail, Histogram, distances
from tapscope.comparator.metrics.ranking import divergence
from tapscope.comparator.report.table import render
from tapscope.core import dtypes
from tapscope.core.observe import RowSpan

ROWS = 6


def write(path: Path, values: dict[str, Any], keep: str = "full", mesh: dict[str, int] | None = None) -> Path:
    """Write a run of one step; a site is an array, or (dims, one array per rank)."""
    with RunFactory(path, mesh=mesh) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("chat", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        for site, value in values.items():
            dims, arrays = value if isinstance(value, tuple) else ("t h", {0: value})
            run.put(site, arrays, dims=dims, keep=keep)
    return path


def report(baseline: Path, target: Path, **options: Any) -> Report:
    return diff(baseline, target, **options)


def finding(tmp_path: Path, baseline: Any, target: Any, keep: str = "full", **options: Any) -> Finding:
    """Return the finding on a single site."""
    one = write(tmp_path / "base", {"a:out": baseline}, keep)
    two = write(tmp_path / "target", {"a:out": target}, keep)
    return report(one, two, **options).findings[0]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_measure_rel_is_that_of_sglang(tmp_path: Path) -> None:
    a, b = normal(ROWS, 32), normal(ROWS, 32) * np.float32(1.25)
    numbers = finding(tmp_path, a, b).metrics
    assert numbers is not None
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert numbers.rel == pytest.approx(1 - 2 * (x * y).sum() / (x * x + y * y).sum(), rel=1e-6)
    assert numbers.rel == pytest.approx(0.25**2 / (1 + 1.25**2), rel=1e-6)


# ---- digests


@pytest.mark.parametrize("keep", ["full", "stats"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
def test_measure_permuted_elements_never_pass(tmp_path: Path, keep: str, dtype: Any) -> None:
    value = (normal(ROWS, 8) * 100).astype(dtype)
    swapped = value.copy()
    swapped[[1, 4]] = value[[4, 1]]
    found = finding(tmp_path, value, swapped, keep)
    assert found.verdict is Verdict.DIFFERS
    assert found.notes[0] == "permuted: the same elements in another order"


def test_measure_permutation_within_the_floor_is_not_rounding(tmp_path: Path) -> None:
    value = normal(ROWS, 64)
    value[2, 10] = value[2, 11] * np.float32(1 + 2**-20)
    swapped = value.copy()
    swapped[2, [10, 11]] = value[2, [11, 10]]
    found = finding(tmp_path, value, swapped)
    assert (found.verdict, found.test) == (Verdict.DIFFERS, "permuted")


def test_measure_neighbours_that_one_rounding_exchanges_are_close(tmp_path: Path) -> None:
    """Router weights of nearly equal size: rounding may exchange them, so that both runs contain the same elements."""
    value = np.float32(0.25) + normal(ROWS, 2) * np.float32(1e-3)
    value[0, 1] = np.nextafter(value[0, 0], np.float32(1))
    swapped = value.copy()
    swapped[0] = value[0, ::-1]
    assert finding(tmp_path, value, swapped).verdict is Verdict.CLOSE


def test_measure_multiset_hashes_add_up_over_shards(tmp_path: Path) -> None:
    value = normal(ROWS, 8)
    turned = value[:, ::-1]
    one = write(tmp_path / "base", {"a:out": value})
    shards = {0: turned[:, :4], 1: turned[:, 4:]}
    two = write(tmp_path / "target", {"a:out": ("t h[tp]", shards)}, mesh={"tp": 2})
    found = report(one, two).findings[0]
    assert found.verdict is Verdict.DIFFERS
    assert found.notes[0].startswith("permuted")


def test_measure_rounding_is_not_a_permutation(tmp_path: Path) -> None:
    value = normal(ROWS, 64)
    found = finding(tmp_path, value, value * np.float32(1 + 2**-23))
    assert found.verdict is Verdict.CLOSE
    assert not any("permuted" in note for note in found.notes)


def test_measure_integers_known_by_unequal_hashes_do_not_pass(tmp_path: Path) -> None:
    value = np.arange(ROWS)[:, None] * np.ones(4, np.int64)
    moved = value.copy()
    moved[0, :2] += (1, 0)
    moved[1, :2] -= (1, 0)
    moved[2, 2], moved[2, 3] = moved[2, 2] + 3, moved[2, 3] - 3
    assert moved.sum() == value.sum()
    assert finding(tmp_path, value, moved, "stats").verdict is Verdict.DIFFERS


def test_measure_equal_statistics_with_unequal_hashes_are_close(tmp_path: Path) -> None:
    value = normal(ROWS, 8)
    moved = value.copy()
    moved[0, 0], moved[0, 1] = np.nextafter(value[0, 0], np.float32(9)), value[0, 1]
    found = finding(tmp_path, value, moved, "stats")
    assert found.verdict is Verdict.CLOSE
    assert finding(tmp_path / "same", value, value, "stats").verdict is Verdict.SAME


# ---- threads


def test_measure_report_is_independent_of_thread_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [8, 70_000, 16, 90_000, 80_000, 8]
    values = {f"layers.{i}:out": normal(ROWS, size, seed=i) for i, size in enumerate(sizes)}
    spoiled = {site: value * np.float32(1.5 if "3" in site else 1 + 2**-22) for site, value in values.items()}
    spoiled["layers.4:out"] = spoiled["layers.4:out"][:, :-1]
    one, two = write(tmp_path / "base", values), write(tmp_path / "target", spoiled)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=threads: set(range(n)), raising=False)
        found.append(list(report(one, two).to_json()))
    assert found[0] == found[1]
    assert sum(line.get("verdict") == "differs" for line in found[0]) == 1


# ---- on demand


def detail(tmp_path: Path, baseline: Any, target: Any) -> Detail:
    found = finding(tmp_path, baseline, target, detail=True).detail
    assert found is not None
    return found


def test_measure_detail_on_demand_of_unequal_values_only(tmp_path: Path) -> None:
    value = normal(ROWS, 8)
    assert finding(tmp_path / "0", value, value * 2).detail is None
    assert finding(tmp_path / "1", value, value, detail=True).detail is None
    assert finding(tmp_path / "2", value, value * 2, detail=True).detail is not None


def test_measure_percentiles_and_histogram_match_numpy(tmp_path: Path) -> None:
    one, two = normal(ROWS, 3000), normal(ROWS, 3000, seed=1)
    two[:, :500] = one[:, :500]
    found = detail(tmp_path, one, two)
    difference = np.abs(one.astype(np.float64) - two)
    for share, value in found.percentiles:
        assert value == pytest.approx(np.quantile(difference, share, method="inverted_cdf"), rel=0.04, abs=1e-300)
    counts = dict(found.histogram)
    assert counts.pop(None) == ROWS * 500
    exponents = np.frexp(difference[difference > 0])[1] - 1
    assert counts == dict(zip(*(x.tolist() for x in np.unique(exponents, return_counts=True)), strict=True))


def test_measure_ulps_in_the_coarser_dtype(tmp_path: Path) -> None:
    value = normal(ROWS, 64)
    one = finding(tmp_path / "f32", value, np.nextafter(value, np.float32(np.inf)), detail=True).detail
    assert one is not None
    assert (one.ulp_dtype, one.ulp_max, one.ulp_p99) == ("float32", 1.0, 1.0)
    rounded = value.astype(ml_dtypes.bfloat16)
    mixed = detail(tmp_path / "mixed", value, rounded)
    assert (mixed.ulp_dtype, mixed.ulp_max) == ("bfloat16", 0.0)
    moved = rounded.view(np.uint16).copy()
    moved[0, 0] += 3
    one_off = detail(tmp_path / "off", rounded, moved.view(ml_dtypes.bfloat16))
    assert (one_off.ulp_dtype, one_off.ulp_max, one_off.ulp_p99) == ("bfloat16", 3.0, 0.0)


def test_measure_ulps_across_zero() -> None:
    tiny = np.array([2.0**-149, 0.0, -0.0, 1.0, np.inf, np.nan], np.float32)
    other = np.array([-(2.0**-149), -0.0, 2.0**-149, np.nextafter(np.float32(1), np.float32(0)), np.inf, 1], np.float32)
    assert distances(tiny, other, "float32").tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_measure_ulps_of_neighbouring_values_are_one(dtype: str) -> None:
    kind = dtypes.numpy_dtype(dtype)
    word = np.uint8 if kind.itemsize == 1 else np.uint16
    values = np.arange(0, np.iinfo(word).max // 2 + 1, dtype=word).view(kind)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = values[np.isfinite(values.astype(np.float64))]
    assert (distances(values[:-1], values[1:], dtype) == 1).all()
    assert (distances(-values[:-1], -values[1:], dtype) == 1).all()


def test_measure_lists_the_worst_channel_first(tmp_path: Path) -> None:
    one = normal(ROWS, 40)
    two = one * np.float32(1 + 1e-6)
    two[:, 17] *= np.float32(1.5)
    worst = detail(tmp_path, one, two).channels[0]
    assert (worst.index, worst.rel_l2) == (17, pytest.approx(0.5, rel=1e-4))


def test_measure_logits_by_rank_and_kl_divergence(tmp_path: Path) -> None:
    one = normal(ROWS, 50) * np.float32(3)
    two = one + normal(ROWS, 50, seed=2) * np.float32(0.1)
    two[2, int(one[2].argmin())] = one[2].max() + 1
    shards = {0: two[:, :20], 1: two[:, 20:]}
    base = write(tmp_path / "base", {"lm_head:out": one})
    target = write(tmp_path / "target", {"lm_head:out": ("t v[tp]", {0: shards[0], 1: shards[1]})}, mesh={"tp": 2})
    found = report(base, target, detail=True).findings[0].detail
    assert found is not None
    assert found.logits is not None
    assert found.logits.rows == ROWS
    assert found.logits.top1 == pytest.approx(np.mean(one.argmax(1) == two.argmax(1)))
    x, y = one.astype(np.float64), two.astype(np.float64)
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (x, y))
    assert found.logits.kl_mean == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-9)
    assert found.logits.kl_max == pytest.approx((p * np.log(p / q)).sum(1).max(), rel=1e-9)


def test_measure_kl_divergence_handles_large_and_masked_logits() -> None:
    one = np.array([[1000.0, 998.0, -np.inf], [0.0, -2000.0, 0.0]])
    assert divergence(one, one - 5000).tolist() == [0.0, 0.0]
    assert divergence(one, np.array([[1000.0, -np.inf, 0.0], [0.0, 0.0, 0.0]]))[0] == np.inf


def test_measure_router_lists_rerouted_tokens(tmp_path: Path) -> None:
    scores = np.tile(np.arange(8, dtype=np.float32), (ROWS, 1))
    other = scores.copy()
    other[3, [5, 6]] = [6.5, 5.5]
    other[4, 0] += np.float32(0.7)
    paths = []
    for name, value in (("base", scores), ("target", other)):
        with RunFactory(tmp_path / name, model_config={"num_experts_per_tok": 2}) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("chat", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("model.layers.0.mlp.gate:out", value, dims="t e")
        paths.append(tmp_path / name)
    found = report(*paths, detail=True).findings[0].detail
    assert found is not None
    assert found.router is not None
    assert (found.router.k, found.router.num_flips, found.router.flips, found.router.num_exposed) == (2, 1, (3,), 2)
    assert (found.router.margin, found.router.rows) == (1.0, ROWS)


def test_measure_detail_is_in_the_report_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "base", {"lm_head:out": normal(ROWS, 40)})
    two = write(tmp_path / "target", {"lm_head:out": normal(ROWS, 40, seed=1)})
    assert main(["diff", str(one), str(two), "--detail"]) == 1
    out = capsys.readouterr().out
    assert "detail    lm_head:out: |Δ| p1 " in out
    assert "float32 ULP p99" in out
    assert "channels with the largest errors (relative): " in out
    assert "top-1 equal in " in out
    assert main(["diff", str(one), str(two), "--detail", "--json"]) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[1])
    assert line["detail"]["logits"]["rows"] == ROWS
    assert len(line["detail"]["channels"]) == 5


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=60), st.integers(0, 60))
def test_measure_histograms_merge(values: list[float], cut: int) -> None:
    whole, parts = Histogram(), (Histogram(), Histogram())
    whole.add(np.array(values))
    parts[0].add(np.array(values[:cut]))
    parts[1].add(np.array(values[cut:]))
    parts[0].merge(parts[1])
    assert (parts[0].octaves(), parts[0].largest, parts[0].count) == (whole.octaves(), whole.largest, len(values))
    for share in (0.0, 0.5, 0.99, 1.0):
        expected = float(np.quantile(values, share, method="inverted_cdf"))
        assert whole.percentile(share) == pytest.approx(expected, rel=0.04, abs=1e-300)


# ---- very many findings


def _called(finding: Finding, site: str) -> Finding:
    return structs.replace(finding, result=structs.replace(finding.result, site=site))


@pytest.fixture
def many(tmp_path: Path) -> Report:
    one = write(tmp_path / "base", {"a:out": normal(ROWS, 8)})
    two = write(tmp_path / "target", {"a:out": normal(ROWS, 8, seed=1)})
    found = report(one, two)
    sites = (f"model.layers.{i}.mlp:out" for i in range(5_000))
    return structs.replace(found, findings=tuple(_called(found.findings[0], site) for site in sites))


@pytest.mark.parametrize("top", [12, None])
def test_measure_large_report_is_streamed(many: Report, top: int | None) -> None:
    tracemalloc.start()
    try:
        lines = sum(1 for _ in render(many, width=100, top=top))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines > (len(many.findings) if top is None else 12)
    assert peak < 1 << 20


def test_measure_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    sites = {f"layers.{i}.mlp:out": normal(ROWS, 8, seed=i) for i in range(120)}
    one, two = write(tmp_path / "base", sites), write(tmp_path / "target", {s: v * 2 for s, v in sites.items()})
    command = [sys.executable, "-m", "tapscope", "diff", str(one), str(two), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_pairs_read_in_a_batch_are_not_assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = {f"layers.{i}:out": rng.standard_normal((ROWS, 8)).astype(np.float32) for i in range(3)}
    paths = write(tmp_path / "b", base), write(tmp_path / "t", {k: v * np.float32(1 + 2e-7) for k, v in base.items()})
    assembled: list[Pair] = []
    for_pair = PreparedPair.for_pair

    def counting(ready: PreparedPair, pair: Pair) -> PreparedPair:
        assembled.append(pair)
        return for_pair(ready, pair)

    monkeypatch.setattr(PreparedPair, "for_pair", counting)
    assert [finding.verdict for finding in diff(*paths).findings] == [Verdict.CLOSE] * 3
    assert not assembled, "this makes an object of every record"


def test_pairs_read_in_a_batch_are_judged_as_pairs_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs span several segments, with a scaled channel and rows with nonfinite values."""
    factor = np.ones(64, np.float32)
    factor[5] = 1.01
    for name, factors in (("base", np.ones(64, np.float32)), ("target", factor)):
        rng = np.random.default_rng(0)
        with RunFactory(tmp_path / name, segment_bytes=1 << 14) as run:
            for step in range(12):
                run.step()
                for layer in range(3):
                    values = rng.standard_normal((ROWS, 64)).astype(np.float32)
                    values[0, 1] = np.inf if step == layer else 1.0
                    run.put(f"layers.{layer}:out", values * factors)
    assert len([*(tmp_path / "base").rglob("*.safetensors")]) > 1
    together = [*report(tmp_path / "base", tmp_path / "target").to_json()]
    monkeypatch.setattr(BatchedPairs, "stored_rows", lambda self, pairs: None)
    assert [*report(tmp_path / "base", tmp_path / "target").to_json()] == together
    tests = [line["test"] for line in together if line.get("type") == "finding"]
    assert tests == ["channel"] * 3
