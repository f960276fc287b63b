"""Amplification of rounding by norms of near-zero rows, sharp softmaxes and casts, in recorded values."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff, findings_by_site
from factories import RunFactory
from msgspec import structs

from tapscope.comparator import CompareOptions, Verdict
from tapscope.comparator.noise_floor.constants import CONDITION_RANGE, DEFAULT_CONDITION
from tapscope.comparator.noise_floor.error_model import ErrorModel
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.inherited_error import InheritedError
from tapscope.comparator.noise_floor.node import Node
from tapscope.comparator.pipeline.detect_reroutes import detect_reroutes
from tapscope.comparator.pipeline.match_runs import match_runs
from tapscope.comparator.pipeline.measure_pairs import measure_pairs
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.verdict.judge import Judge
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

ROWS, WIDTH, KEYS, EXPERTS = 32, 48, 12, 6
_RNG = np.random.default_rng(5)
Array = np.ndarray


def normal(*shape: int) -> Array:
    return _RNG.standard_normal(shape).astype(np.float32)


def noisy(x: Array, error: float, seed: int) -> Array:
    noise = np.random.default_rng(seed).standard_normal(x.shape)
    return (x * (1.0 + error * noise)).astype(np.float32)


def write(path: Path, sites: dict[str, Array], classes: dict[str, str] | None = None, **manifest: object) -> None:
    with RunFactory(path, **manifest) as run:
        run.step(grid=(1, ROWS), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        for site, cls in (classes or {}).items():
            run.site(site, cls)
        for site, values in sites.items():
            run.put(site, values)


def normed(x: Array) -> Array:
    return (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)).astype(np.float32)


@pytest.mark.parametrize(("cls", "agrees"), [("Qwen3NextRMSNormGated", True), ("Linear", False)])
def test_amplification_norm_scales_near_zero_rows_of_pure_rounding(tmp_path: Path, cls: str, agrees: bool) -> None:
    x = normal(1, ROWS, WIDTH)
    x[0, 7] *= 1e-3
    y = (x + 3e-6 * normal(1, ROWS, WIDTH)).astype(np.float32)  # the same absolute error in all rows, as after a sum
    for name, values in (("b", x), ("t", y)):
        sites = {"layers.0.norm:in[hidden_states]": values, "layers.0.norm:out": normed(values)}
        write(tmp_path / name, sites, {"layers.0.norm:out": cls})
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert found["layers.0.norm:in[hidden_states]"].verdict is Verdict.CLOSE
    assert (found["layers.0.norm:out"].verdict is Verdict.CLOSE) is agrees
    assert report.exit_code == (0 if agrees else 1)


def test_amplification_norm_does_not_excuse_full_size_rows(tmp_path: Path) -> None:
    x = normal(1, ROWS, WIDTH)
    y = noisy(x, 1e-6, 1)
    out = normed(y)
    out[0, 9] *= normal(WIDTH) * 0.01 + 1.0
    for name, values, made in (("b", x, normed(x)), ("t", y, out)):
        sites = {"layers.0.norm:in[hidden_states]": values, "layers.0.norm:out": made}
        write(tmp_path / name, sites, {"layers.0.norm:out": "RMSNorm"})
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.norm"


def softmax(scores: Array) -> Array:
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    return (grown / grown.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("scatter", "agrees"), [(24.0, True), (1.0, False)])
def test_amplification_attention_weights_follow_the_error_of_their_scores(
    tmp_path: Path, scatter: float, agrees: bool
) -> None:
    """The same absolute error is within the relative rounding of large scores, but not of small ones."""
    scores = _RNG.standard_normal((1, 2, ROWS, ROWS)) * scatter
    error = 24.0 * 2e-5 * np.random.default_rng(8).standard_normal(scores.shape)
    q = normal(1, ROWS, WIDTH)
    for name, values, weights in (("b", q, softmax(scores)), ("t", noisy(q, 2e-5, 3), softmax(scores + error))):
        write(tmp_path / name, {"layers.0.attn:in[hidden_states]": values, "layers.0.attn:out[1]": weights})
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert found["layers.0.attn:out[1]"].layout == "inferred"
    assert report.exit_code == (0 if agrees else 1)


ROUTER = normal(EXPERTS, WIDTH) / np.sqrt(WIDTH, dtype=np.float32)
EXPERT = normal(EXPERTS, WIDTH, WIDTH) / np.sqrt(WIDTH, dtype=np.float32)


def routed(path: Path, x: Array, *, nudge: float = 0.0, wrong: bool = False) -> None:
    """Write a block of experts whose router returns rows sorted by expert instead of choices per token, like
    JetMoE's."""
    scores = x @ ROUTER.T
    second, third = np.argsort(-scores[4])[1:3]
    scores[4, third] = scores[4, second] - np.float32(1e-6) + np.float32(nudge)
    chosen = np.argsort(-scores, axis=1)[:, :2]
    if wrong:
        chosen[11, 1] = np.argsort(-scores[11])[-1]
    mixed = np.einsum("nd,nkod->no", x, EXPERT[chosen]).astype(np.float32)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    sites = {
        "layers.0.mlp:in[layer_input]": x,
        "layers.0.mlp.router.layer:in[input]": x,
        "layers.0.mlp.router.layer:out": scores,
        "layers.0.mlp.router:out[0]": order,
        "layers.0.mlp.router:out[4]": scores,
        "layers.0.mlp:out": mixed,
        "layers.0:out": x + mixed,
    }
    write(path, sites, model_config={"num_experts": EXPERTS, "num_experts_per_tok": 2})


def test_amplification_router_choice_is_inferred_from_scores(tmp_path: Path) -> None:
    x = normal(ROWS, WIDTH)
    routed(tmp_path / "b", x)
    routed(tmp_path / "t", x, nudge=2e-6)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert report.exit_code == 0
    assert found["layers.0.mlp.router:out[0]"].verdict is Verdict.CLOSE
    assert found["layers.0.mlp:out"].rows.num_compared == ROWS - 1


def test_amplification_router_choice_unexplained_by_scores_is_named(tmp_path: Path) -> None:
    x = normal(ROWS, WIDTH)
    routed(tmp_path / "b", x)
    routed(tmp_path / "t", x, nudge=2e-6, wrong=True)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert found["layers.0.mlp:out"].verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module.startswith("layers.0.mlp")


@pytest.mark.parametrize("casts", [True, False])
def test_amplification_gradient_of_a_cast_copy_is_not_the_tensors_gradient(tmp_path: Path, casts: bool) -> None:
    x, whole, branch = normal(ROWS, WIDTH), normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    for name, given, gradient in (("b", x, whole), ("t", x.astype(np.float16) if casts else x, branch)):
        sites = {
            "layers.0:in[hidden_states]": x,
            "layers.0.norm:in[hidden_states]": given,
            "layers.0.norm:in[hidden_states].grad": gradient,
            "layers.0:in[hidden_states].grad": whole,
        }
        write(tmp_path / name, sites)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert ("layers.0.norm:in[hidden_states].grad" in found) is not casts
    assert report.exit_code == (0 if casts else 1)


@pytest.mark.parametrize(("name", "rows"), [("float8_e4m3fn", 1), ("float8_e4m3fn", ROWS), ("float8_e5m2", 1)])
def test_amplification_detects_rows_cast_through_fp8(tmp_path: Path, name: str, rows: int) -> None:
    """The error alone is within the floor, which a noisy input widens."""
    x, y = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    noise = 1.0 + 0.012 * np.random.default_rng(2).standard_normal((2, *x.shape))
    cast = (y * noise[1]).astype(ml_dtypes.bfloat16)
    cast[:rows] = y[:rows].astype(getattr(ml_dtypes, name)).astype(ml_dtypes.bfloat16)
    for at, given, made in (("b", x, y), ("t", (x * noise[0]).astype(ml_dtypes.bfloat16), cast)):
        sites = {"layers.0.attn:in[hidden_states]": given, "layers.0.attn.o_proj:in[input]": made}
        write(tmp_path / at, sites)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert report.first_divergence is not None
    finding = found["layers.0.attn.o_proj:in[input]"]
    assert (finding.verdict, finding.test) == (Verdict.DIFFERS, "fp8_grid")
    assert ("a row holds" if rows == 1 else f"{rows} rows hold") in finding.notes[0]


def test_amplification_values_coarse_in_both_runs_were_not_cast(tmp_path: Path) -> None:
    """float16 has few significant bits near zero, and some values are inherently integers."""
    x = normal(ROWS, WIDTH)
    tiny, counts = x * 3e-7, np.round(x * 3).astype(np.float32)
    for at, cast in (("b", np.float32), ("t", np.float16)):
        sites = {"layers.0.mlp:out": (x * tiny).astype(cast), "layers.0.counts:out": (counts * 0.5).astype(cast)}
        write(tmp_path / at, {"layers.0.mlp:in[x]": tiny.astype(cast), **sites})
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t"))
    assert all(finding.test != "fp8_grid" for finding in found.values())


@pytest.mark.parametrize("steps", [1, 8])
def test_amplification_one_wrong_element_of_an_fp8_tensor_is_found(tmp_path: Path, steps: int) -> None:
    """Rounding moves any element by one step; eight steps double or halve it."""
    x = normal(ROWS, WIDTH)
    kept = {name: noisy(x, error, 4) for name, error in (("b", 0.0), ("t", 5e-7))}
    for name, values in kept.items():
        out = values.astype(ml_dtypes.float8_e4m3fn)
        if name == "t":
            row, column = np.unravel_index(np.argsort(np.abs(values), axis=None)[-ROWS], values.shape)
            bits = out.view(np.uint8)
            bits[row, column] -= steps
        write(tmp_path / name, {"layers.0.cache:in[x]": values, "layers.0.cache:out": out})
    report = diff(tmp_path / "b", tmp_path / "t")
    found = findings_by_site(report)
    assert found["layers.0.cache:in[x]"].verdict is Verdict.CLOSE
    assert found["layers.0.cache:out"].verdict is (Verdict.DIFFERS if steps > 1 else Verdict.CLOSE)
    assert report.exit_code == (1 if steps > 1 else 0)


@pytest.mark.parametrize(("num_experts", "agrees"), [(8, True), (1, False)])
def test_amplification_row_of_an_expert_gradient_may_be_one_element(
    tmp_path: Path, num_experts: int, agrees: bool
) -> None:
    """A row of an expert weight's gradient, [experts, out, in], may have one term; a row of a linear map's, [out, in],
    has one term per token."""
    x, dy, grad = normal(1, ROWS, WIDTH), normal(1, ROWS, WIDTH), normal(64, WIDTH)
    off, other = noisy(grad, 1e-6, 1), noisy(dy, 1e-6, 2)
    off[5] *= 1 + 4e-5
    other[0, 3, 4] *= 1 + 3e-5
    shape = (num_experts, 64 // num_experts, WIDTH) if num_experts > 1 else grad.shape
    for name, values, gradient in (("b", dy, grad), ("t", other, off)):
        sites = {"mlp.experts:in[x]": x, "mlp.experts:out": x, "mlp.experts:out.grad": values}
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, ROWS), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.site("mlp.experts:out", "Experts", params={"up": shape})
            for site, value in sites.items():
                run.put(site, value)
            run.put("mlp.experts:param[up].grad", gradient.reshape(shape))
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t"))
    assert found["mlp.experts:out.grad"].verdict is Verdict.CLOSE
    assert (found["mlp.experts:param[up].grad"].verdict is Verdict.CLOSE) is agrees


@pytest.mark.parametrize("has_params", [True, False])
def test_amplification_untapped_function_with_parameters_raises_the_floor(has_params: bool) -> None:
    given = Node("layers.0.mamba", "in[x]", True, has_params)
    made = Node("layers.0.mamba.in_proj", "out", True, True)
    graph = Graph([given, made, Node("layers.0.mamba.norm", "in[x]", True, True)])
    assert graph.inputs(2).source == "enclosing_module"
    assert graph.is_of_many(2) is has_params


@pytest.mark.parametrize(
    ("cls", "wrong", "agrees"),
    [("Qwen3RotaryEmbedding", 1.0, True), ("Qwen3RotaryEmbedding", 1.002, False), ("Table", 1.0, False)],
)
def test_amplification_rope_angles_of_late_positions_round_relative_to_themselves(
    tmp_path: Path, cls: str, wrong: float, agrees: bool
) -> None:
    first, num, frequencies = 100_000, 400, 10000.0 ** -(np.arange(8) / 8)
    for name, dtype, factor in (("b", np.float64, 1.0), ("t", np.float32, wrong)):
        angles = np.arange(first, first + num, dtype=dtype)[:, None] * (factor * frequencies).astype(np.float32).astype(
            dtype
        )
        table = np.cos(np.hstack([angles, angles])).astype(np.float32)
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, num), rows=[RowSpan("a", first, num, 0, 0)], token_ids=[0] * num)
            run.site("rotary_emb:out[0]", cls)
            run.put("embed:out", np.ones((1, num, 8), np.float32))
            run.put("rotary_emb:out[0]", table[None])
    assert (diff(tmp_path / "b", tmp_path / "t").exit_code == 0) is agrees


@pytest.mark.parametrize(
    ("cls", "weight", "turned", "counts"),
    [
        ("GELU", (), False, True),
        ("Linear", (WIDTH, WIDTH), False, False),
        ("LlamaRMSNorm", (WIDTH,), False, True),
        ("LlamaRMSNorm", (WIDTH,), True, False),  # the outlier channels of input and output differ
    ],
)
def test_amplification_elementwise_function_inherits_channel_rounding(
    tmp_path: Path, cls: str, weight: tuple[int, ...], turned: bool, counts: bool
) -> None:
    """An elementwise function near zero may amplify the rounding of a channel; a sum over channels reduces it."""
    x = normal(1, 40, WIDTH)
    y = noisy(x, 3e-3, 3)
    for name, values in (("b", x), ("t", y)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, 40), rows=[RowSpan("a", 0, 40, 0, 0)], token_ids=[0] * 40)
            run.site("mlp.act:out", cls, params={"weight": weight} if weight else {})
            run.put("mlp.act:in[input]", values.astype(ml_dtypes.bfloat16))
            run.put("mlp.act:out", (values[..., ::-1] if turned else values).astype(ml_dtypes.bfloat16))
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        matched = match_runs(open_runs(one, two, CompareOptions(), (CorruptRecords(one), CorruptRecords(two))))
        judged = detect_reroutes(measure_pairs(matched)).judged
    graph = Judge(judged, matched.sites).graph
    given, made = judged
    assert given.distribution is not None
    assert 0.0 < abs(given.distribution.channel) < given.distribution.channel_noise
    nodes = [graph.nodes[0], structs.replace(graph.nodes[1], identities=(None, None))]  # computed, not aliased
    model = ErrorModel([given, made], Graph(nodes), [{}, {}])
    found = model.effects[InheritedError].given.channel.tolist()
    assert found == [0.0, abs(given.distribution.channel) if counts else 0.0]


@pytest.mark.parametrize(("dtype", "agrees"), [(ml_dtypes.bfloat16, True), (np.float32, False)])
def test_amplification_float32_value_inherits_gain_of_narrow_inputs(tmp_path: Path, dtype: type, agrees: bool) -> None:
    """Under autocast, norms return float32."""
    x, out = normal(1, 400, WIDTH), normal(1, 400, WIDTH)
    for name, values, made in (("b", x, out), ("t", noisy(x, 4e-3 if agrees else 1e-6, 3), out * 1.0005)):
        sites = {"norm:in[x]": values.astype(dtype), "norm:out": made.astype(np.float32)}
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, 400), rows=[RowSpan("a", 0, 400, 0, 0)], token_ids=[0] * 400)
            run.site("norm:out", "LayerNorm", params={"weight": (WIDTH,)})
            for site, value in sites.items():
                run.put(site, value)
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t"))
    assert (found["norm:out"].verdict is Verdict.CLOSE) is agrees


@pytest.mark.parametrize(("width", "least"), [(1, DEFAULT_CONDITION), (8, CONDITION_RANGE[0])])
def test_amplification_of_narrow_outputs_is_not_learned_from_other_layers(
    tmp_path: Path, width: int, least: float
) -> None:
    """Token rows share a direction. A gate with one output, whose weight is nearly orthogonal to that direction in one
    layer, amplifies errors there by more than 2.5 times the median of the other layers."""
    count, rows = 256, 64
    rng = np.random.default_rng(3)
    common = rng.standard_normal(count)
    share = 0.15 if width == 1 else 1.0
    sides = {"b": 0.0, "t": 5e-3}
    for name, error in sides.items():
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, rows), rows=[RowSpan("a", 0, rows, 0, 0)], token_ids=range(rows))
            for layer in range(4):
                made = np.random.default_rng(layer)
                weight = made.standard_normal((count, width))
                along = common @ weight / (common @ common)
                goal = 0.06 * (share if layer == 2 else 1.0)
                weight += np.outer(common, goal * np.sign(along) - along)
                x = common + 0.4 * made.standard_normal((rows, count))
                noise = np.random.default_rng(9 + layer).standard_normal(x.shape)
                given = (x + error * noise).astype(ml_dtypes.bfloat16)
                run.site(f"layers.{layer}.gate:out", "Linear", params={"weight": (width, count)})
                run.put(f"layers.{layer}.gate:in[input]", given)
                run.put(f"layers.{layer}.gate:out", (given.astype(np.float64) @ weight).astype(ml_dtypes.bfloat16))
    found = findings_by_site(diff(tmp_path / "b", tmp_path / "t", explain_floor=("*gate:out",)))
    one = found["layers.2.gate:out"]
    assert [e.contribution for e in one.floor_effects if e.effect == "condition"] == [least]
    assert one.verdict is Verdict.CLOSE
