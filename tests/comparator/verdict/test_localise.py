"""The culprit is named: two runs of one small decoder, one of which is damaged in one place."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparator_toy import LAYERS, Toy, damaged, prompts, weights
from compare_runs import diff
from factories import RunFactory
from msgspec import structs
from soak_cases import mostly_soak

from tapscope.comparator import Report, Verdict
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.node import Inputs, Node
from tapscope.comparator.pair_analysis.pair_result import PairMeta, PairResult
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.localise import localise
from tapscope.core.observe import RowSpan

TABLES = weights()
PROMPTS = prompts()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "fp32"
    Toy(TABLES).write(path, PROMPTS).close()
    return path


def diff_toy(baseline: Path, toy: Toy, path: Path, **kwargs: Any) -> Report:
    return diff(baseline, toy.write(path, PROMPTS, **kwargs))


def bad_sites(report: Report) -> list[str]:
    return [f"{f.site} {f.ratio:.2f}" for f in report.findings if f.verdict.is_bad]


def test_localise_fp32_and_bf16_are_close_everywhere(base: Path, tmp_path: Path) -> None:
    report = diff_toy(base, Toy(TABLES, dtype="bfloat16"), tmp_path / "t")
    assert bad_sites(report) == []
    assert report.exit_code == 0
    assert report.max_ratio_finding is not None
    assert report.max_ratio_finding.ratio < 0.8


def test_localise_packed_padded_and_sharded_runs_are_the_same(base: Path, tmp_path: Path) -> None:
    report = diff_toy(base, Toy(TABLES, padded=True, annotate=False), tmp_path / "padded")
    assert report.exit_code == 0
    assert {f.verdict for f in report.findings} == {Verdict.SAME}
    assert {f.layout for f in report.findings} == {"inferred"}
    report = diff_toy(base, Toy(TABLES, tp=2), tmp_path / "tp2")
    assert bad_sites(report) == []
    assert report.exit_code == 0


HOWS = ("noise", "zeroed", "scaled")
NAMES = ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("name", "how"),
    mostly_soak(product(NAMES, HOWS), default=[*product(NAMES, HOWS[:1]), *product(NAMES[:1], HOWS[1:])]),
)
def test_localise_names_a_damaged_weight_in_bf16_against_fp32(base: Path, tmp_path: Path, name: str, how: str) -> None:
    path = f"model.layers.2.{name}"
    report = diff_toy(base, Toy(damaged(TABLES, path, how), dtype="bfloat16"), tmp_path / "t")
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.inputs) == (path, "close")
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("layer", "how"),
    mostly_soak(product(range(LAYERS), HOWS), default=[*product(range(LAYERS), HOWS[:1]), *product([1], HOWS[1:])]),
)
def test_localise_names_a_damaged_weight_within_one_dtype(base: Path, tmp_path: Path, layer: int, how: str) -> None:
    path = f"model.layers.{layer}.self_attn.v_proj"
    report = diff_toy(base, Toy(damaged(TABLES, path, how)), tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.module == path
    first = next(f for f in report.findings if f.verdict.is_bad)
    assert first.role == "producer"
    assert {f.role for f in report.findings if f.verdict.is_bad and f is not first} == {"downstream"}


def test_localise_names_a_row_parallel_weight_by_its_partial_sums(base: Path, tmp_path: Path) -> None:
    path = "model.layers.2.mlp.down_proj"
    report = diff_toy(base, Toy(damaged(TABLES, path, "noise"), dtype="bfloat16", tp=2, padded=True), tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.module == path
    assert report.first_divergence.site == f"{path}.partial:out"
    assert report.first_divergence.finding.matched_by == "partial sum"


def test_localise_distinguishes_a_broken_all_reduce_from_a_damaged_weight(base: Path, tmp_path: Path) -> None:
    path = "model.layers.1.self_attn.o_proj"
    report = diff_toy(base, Toy(TABLES, tp=2, hooks={f"{path}:out": lambda x: 2 * x}), tmp_path / "t")
    divergence = report.first_divergence
    assert divergence is not None
    assert divergence.site == f"{path}:out"
    assert next(f for f in report.findings if f.site == f"{path}.partial:out").verdict is not Verdict.DIFFERS


def test_localise_blames_the_enclosing_module_for_functions_between_modules(base: Path, tmp_path: Path) -> None:
    def shift(x: np.ndarray) -> np.ndarray:
        return np.roll(x, 1, axis=0)

    report = diff_toy(base, Toy(TABLES, hooks={"model.layers.1.self_attn": shift}), tmp_path / "t")
    divergence = report.first_divergence
    assert divergence is not None
    assert divergence.module == "model.layers.1.self_attn"
    assert divergence.site == "model.layers.1.self_attn.o_proj:in[input]"
    assert "v_proj" in divergence.evidence


def test_localise_uses_preceding_sites_without_captured_inputs(tmp_path: Path) -> None:
    path = "model.layers.2.mlp.down_proj"
    report = diff(
        Toy(TABLES, inputs=False).write(tmp_path / "b", PROMPTS),
        Toy(damaged(TABLES, path, "noise"), inputs=False, dtype="bfloat16").write(tmp_path / "t", PROMPTS),
    )
    assert report.first_divergence is not None
    assert report.first_divergence.module == path
    assert report.first_divergence.inputs == "not captured"


def test_localise_lists_two_independent_faults(base: Path, tmp_path: Path) -> None:
    attention = "model.layers.1.self_attn"
    hooks = {f"{attention}.{name}:out": lambda x: x * 1.1 for name in ("q_proj", "v_proj")}
    report = diff_toy(base, Toy(TABLES, hooks=hooks), tmp_path / "t")
    assert [d.module for d in report.divergences] == [f"{attention}.q_proj", f"{attention}.v_proj"]


def test_localise_places_a_fault_in_its_step(tmp_path: Path) -> None:
    def late(x: np.ndarray) -> np.ndarray:
        return x * 1.2 if len(x) <= 8 else x

    hooks = {"model.layers.3.mlp.gate_proj:out": late}
    report = diff(
        Toy(TABLES).write(tmp_path / "b", PROMPTS),
        Toy(TABLES, hooks=hooks).write(tmp_path / "t", PROMPTS, steps=(20, 25)),
    )
    divergence = report.first_divergence
    assert divergence is not None
    assert divergence.module == "model.layers.3.mlp.gate_proj"
    assert divergence.step >= 1
    assert divergence.place is not None
    assert divergence.place.baseline_step == 0
    assert divergence.place.position is not None
    assert divergence.place.position >= 20


def test_localise_places_a_wrong_shard_on_its_rank(base: Path, tmp_path: Path) -> None:
    def right_half(x: np.ndarray) -> np.ndarray:
        x[:, x.shape[1] // 2 :] *= 1.1
        return x

    report = diff_toy(base, Toy(TABLES, tp=2, hooks={"model.layers.2.mlp.gate_proj:out": right_half}), tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.rank == 1


def test_localise_two_outputs_of_one_module_are_one_culprit(tmp_path: Path) -> None:
    ones = np.ones((6, 16), np.float32)
    for name, factor in (("b", 1), ("t", 1.3)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(6,), rows=[RowSpan("a", 0, 6, 0, 0)], token_ids=range(6))
            run.put("rotary_emb:in[x]", ones, dims="t h")
            for port in ("out[0]", "out[1]"):
                run.put(f"rotary_emb:{port}", ones * np.float32(factor), dims="t h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert [(d.module, d.site) for d in report.divergences] == [("rotary_emb", "rotary_emb:out[0]")]
    assert [f.role for f in report.findings] == ["", "producer", "producer"]


def test_localise_backward_input_is_the_gradient_of_the_output(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sites = [f"layers.{i}.fc:{port}" for i in (2, 1, 0) for port in ("out.grad", "in[x].grad")]
    values = {site: rng.standard_normal((6, 16)).astype(np.float32) for site in sites}
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(6,), rows=[RowSpan("a", 0, 6, 0, 0)], token_ids=range(6))
            for site, value in values.items():
                run.site(site, params={"weight": (16, 16)})
                spoiled = name == "t" and sites.index(site) >= sites.index("layers.1.fc:in[x].grad")
                run.put(site, value * np.float32(1.3) if spoiled else value, dims="t h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert [d.site for d in report.divergences] == ["layers.1.fc:in[x].grad"]
    assert report.divergences[0].module == "layers.1.fc"


@pytest.mark.parametrize(("error", "named"), [(0.02, "a"), (0.006, "b")])
def test_localise_names_a_near_culprit_upstream_that_explains_the_others(error: float, named: str) -> None:
    """A module may amplify the upstream error by up to 4."""
    graph = Graph([Node("a", "in[x]", True), Node("a", "out", True, True), Node("b", "out", True, True)])
    inputs = [Inputs((), ""), Inputs((0,), "captured"), Inputs((1,), "captured")]
    before, near, culprit = (PairResult(Pair(None, None), site, PairMeta()) for site in ("a:in[x]", "a:out", "b:out"))
    how = {"judged_by": "rounding", "test": "median_row", "inputs": "captured"}
    findings = [
        Finding(before, Verdict.CLOSE),
        Finding(near, Verdict.CLOSE, order=1, error=error, floor=error / 0.7, added_error_ratio=0.7),
        Finding(culprit, Verdict.DIFFERS, order=2, error=0.036, floor=0.03, added_error_ratio=1.2),
    ]
    findings[1:] = [structs.replace(finding, **how) for finding in findings[1:]]
    _, (found,) = localise(findings, range(3), graph, inputs)
    assert (found.module, found.finding.site) == (named, "b:out")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_localise_places_a_wrong_partial_sum_on_its_rank(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    given = rng.standard_normal((12, 16)).astype(np.float32)
    parts = [rng.standard_normal((12, 16)).astype(np.float32) for _ in range(2)]
    for name in ("b", "t"):
        with RunFactory(tmp_path / name, mesh={"tp": 2}) as run:
            run.step(grid=(12,), rows=[RowSpan("a", 0, 12, 0, 0)], token_ids=range(12))
            run.put("layers.0.o_proj:in[input]", {0: given, 1: given}, dims="t h # tp:replicated")
            off = [1.1 if name == "t" and rank in ranks else 1.0 for rank in range(2)]
            held = {rank: np.float32(off[rank]) * parts[rank] for rank in range(2)}
            run.put("layers.0.o_proj.partial:out", held, dims="t h[tp:partial]")
    first = diff(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert first.module == "layers.0.o_proj"
    assert first.place is not None
    assert first.place.rank == (ranks[0] if len(ranks) == 1 else None)


def test_localise_input_that_already_differs_blames_the_module_around(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hidden, error = rng.standard_normal((2, 12, 16)).astype(np.float32)
    weight = rng.standard_normal((16, 16)).astype(np.float32) / 4
    for name, factor in (("b", 0.0), ("t", 0.1)):
        given = hidden + np.float32(factor) * error
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(12,), rows=[RowSpan("a", 0, 12, 0, 0)], token_ids=range(12))
            run.put("model.embed_tokens:out", hidden, dims="t h")
            run.put("model.layers.0:in[hidden_states]", given, dims="t h")
            run.put("model.layers.0:out", given + given @ weight, dims="t h")
            run.put("model:out", 2 * (given + given @ weight), dims="t h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert [(d.module, d.site) for d in report.divergences] == [("model", "model.layers.0:in[hidden_states]")]


def test_localise_gradient_of_a_submodule_does_not_explain_an_output() -> None:
    """With equal weights for all chosen experts, the output of the layer is wrong, and so is the router's gradient."""
    nodes = [Node("mlp", "in[x]", True), Node("mlp", "out", True), Node("mlp.gate", "param[weight].grad", True)]
    inputs = [Inputs((), ""), Inputs((0,), "captured"), Inputs((), "")]
    same, *wrong = (PairResult(Pair(None, None), f"{node.path}:{node.port}", PairMeta()) for node in nodes)
    findings = [Finding(same, Verdict.SAME)]
    findings += [
        Finding(pair, Verdict.DIFFERS, order=i, error=0.5, floor=0.01, added_error_ratio=50.0)
        for i, pair in enumerate(wrong, 1)
    ]
    _, found = localise(findings, range(3), Graph(nodes), inputs)
    assert [(each.module, each.site) for each in found] == [
        ("mlp", "mlp:out"),
        ("mlp.gate", "mlp.gate:param[weight].grad"),
    ]
