"""Why: every hypothesis is found where it was planted, and none where the damage is random."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import Divergence, Report
from tapscope.comparator.explain import sample as samples
from tapscope.comparator.explain.error_region import find_error_region
from tapscope.comparator.explain.explain import choose, hypotheses
from tapscope.comparator.explain.region_text import has_heads
from tapscope.comparator.explain.sample import Sample
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core.observe import RowSpan

Array = np.ndarray[Any, Any]
LENGTHS = {"a": 14, "b": 9, "c": 17}
ROWS = sum(LENGTHS.values())
WIDTH = 64


def values(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> Array:
    """Tokens of unlike sizes, as activations have them."""
    rng = np.random.default_rng(seed)
    rows_, columns = rng.lognormal(0, 0.5, (rows, 1)), rng.lognormal(0, 0.4, (1, width))
    return (rng.standard_normal((rows, width)) * rows_ * columns).astype(np.float32)


def write(path: Path, sites: dict[str, Array], *, mesh: dict[str, int] | None = None, config: Any = None) -> None:
    with RunFactory(path, mesh=mesh or {}, **({"model_config": config} if config else {})) as run:
        rows, slot = [], 0
        for name, count in LENGTHS.items():
            rows.append(RowSpan(name, 0, count, 0, slot))
            slot += count
        run.step(grid=(slot,), rows=rows, token_ids=range(slot))
        for site, value in sites.items():
            run.put(site, value, dims="t h" if value.ndim == 2 else "t")


def diff_sites(path: Path, before: dict[str, Array], after: dict[str, Array], **how: Any) -> Report:
    write(path / "b", before, **how)
    write(path / "t", after, **how)
    return diff(path / "b", path / "t")


def why(
    path: Path, before: Array, after: Array, inputs: Array | None = None, module: str = "layers.1.mlp", **how: Any
) -> Explanation:
    """The explanation of one module's output whose input is equal on both sides."""
    given = values(99, len(before)) if inputs is None else inputs
    sites = [{f"{module}:in[x]": given, f"{module}:out": out} for out in (before, after)]
    found = culprit(diff_sites(path, *sites, **how))
    assert found.module == module
    assert found.explanation is not None
    return found.explanation


def culprit(report: Report) -> Divergence:
    assert report.first_divergence is not None
    return report.first_divergence


def shifted(x: Array, by: int) -> Array:
    out = x.copy()
    start = 0
    for count in LENGTHS.values():
        out[start : start + count] = np.roll(x[start : start + count], by, axis=0)
        start += count
    return out


def blockwise(x: Array, order: list[int]) -> Array:
    return x.reshape(len(x), len(order), -1)[:, order].reshape(x.shape)


def only(columns: slice, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        out = x.copy()
        out[:, columns] = change(x[:, columns])
        return out

    return apply


def swapped(x: Array) -> Array:
    out = x.copy()
    out[0:9], out[14:23] = x[14:23], x[0:9]
    return out


def exchanged(x: Array) -> Array:
    out = x.copy()
    out[[3, 20]] = x[[20, 3]]
    return out


def interleaved(x: Array) -> Array:
    return x.reshape(len(x), -1, 2, 8).swapaxes(2, 3).reshape(x.shape)


def quantized(x: Array) -> Array:
    step = np.abs(x).max() / 7
    return (np.round(x / step) * step).astype(np.float32)


def fp8(x: Array) -> Array:
    scale = np.float32(448 / np.abs(x).max())
    return ((x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale).astype(np.float32)


RNG = np.random.default_rng(3)
CHANNELS, TOKENS = RNG.uniform(0.7, 1.4, (1, WIDTH)), RNG.uniform(0.7, 1.4, (ROWS, 1))
PLANTED: dict[str, tuple[Callable[[Array], Array], str, str]] = {
    "scale": (lambda x: x * 1.041, "scale", "target = 1.041 × baseline"),
    "scale of a head": (only(slice(16, 32), lambda x: x * 1.04), "scale", "in columns 16–31: target = 1.04 × baseline"),
    "channel scale": (lambda x: x * CHANNELS, "channel scale", "a separate factor per channel"),
    "token scale": (lambda x: x * TOKENS, "token scale", "a separate factor per token"),
    "offset": (lambda x: x + 0.31, "offset", "target = baseline + 0.31"),
    "channel offset": (lambda x: x + CHANNELS, "channel offset", "as from a wrong, missing or doubled bias"),
    "zeroed": (lambda x: x * 0, "zeroed", "target is zero"),
    "zeroed block": (only(slice(8, 16), np.zeros_like), "zeroed", "in columns 8–15: target is zero"),
    "sign": (lambda x: -x, "sign", "target = −baseline"),
    "shift": (lambda x: shifted(x, 1), "shift", "target = baseline of 1 token earlier (shifted by +1)"),
    "shift back": (lambda x: shifted(x, -2), "shift", "target = baseline of 2 tokens later (shifted by -2)"),
    "requests": (swapped, "requests", "a holds b's"),
    "two rows": (exchanged, "row order", "the baseline's rows in another order"),
    "one row": (
        lambda x: np.repeat(x[5:6], ROWS, 0),
        "one row",
        "every row of target = baseline of request a, position 5",
    ),
    "two heads": (lambda x: blockwise(x, [0, 2, 1, 3]), "block order", "blocks 1 and 2 of 16 columns swapped"),
    "halves": (lambda x: blockwise(x, [1, 0]), "block order", "the two halves of each row swapped"),
    "grouped": (lambda x: blockwise(x, [0, 2, 4, 6, 1, 3, 5, 7]), "block order", "repeated heads"),
    "copied head": (lambda x: blockwise(x, [0, 1, 1, 3]), "block copies", "baseline's columns 16–31 in columns 32–47"),
    "rope layout": (interleaved, "rope layout", "the pairs of each block of 16 interleaved"),
    "bf16": (lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), "cast", "target = baseline cast through bf16"),
    "fp16": (lambda x: x.astype(np.float16).astype(np.float32), "cast", "target = baseline cast through fp16"),
    "e5m2": (lambda x: x.astype(ml_dtypes.float8_e5m2).astype(np.float32), "cast", "cast through fp8e5"),
    "scaled fp8": (fp8, "cast", "cast through fp8e4 with one scale"),
    "quantized": (quantized, "quantized", "target = baseline rounded to steps of"),
    "clamp": (lambda x: np.clip(x, -1.5, 1.5), "clamp", "target = baseline clamped at -1.5 and at 1.5"),
    "soft cap": (lambda x: 5 * np.tanh(x / 5), "soft cap", "target = 5 × tanh(baseline / 5) (a soft cap)"),
    "reversed": (lambda x: x[:, ::-1], "order", "with its columns reversed"),
    "permuted": (lambda x: x[:, RNG.permutation(WIDTH)], "permuted", ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_explain_finds_a_planted_cause(tmp_path: Path, name: str) -> None:
    change, family, sentence = PLANTED[name]
    before = values()
    found = why(tmp_path, before, np.ascontiguousarray(change(before).astype(np.float32)))
    if family != "permuted":
        assert (found.name, found.share > 0.99) == (family, True), found
    assert sentence in found.text


def sample_of(before: Array, after: Array, name: str = "float32") -> Sample:
    request = np.repeat(np.arange(len(LENGTHS)), list(LENGTHS.values()))[: len(before)]
    position = np.concatenate([np.arange(n) for n in LENGTHS.values()])[: len(before)]
    width = before.shape[1]
    ranks = np.full(width, -1)
    both = before.astype(np.float64), after.astype(np.float64)
    step = np.zeros(len(before), np.int64)
    return Sample(*both, request, position, step, 0, width, len(before), ranks, (name, name), is_integer=False)


def random_damage(seed: int) -> tuple[Array, Array]:
    """Noise of some size and kind on some rows and columns of a tensor of some width."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([8, 16, 48, 64, 96]))
    before = values(seed, int(rng.choice([2, 5, ROWS])), width)
    rows = rng.random(len(before)) < rng.choice([0.1, 0.5, 1.0])
    columns = rng.random(width) < rng.choice([0.3, 1.0])
    rows[rng.integers(len(rows))] = columns[rng.integers(width)] = True
    size = 10.0 ** rng.uniform(-3, 0.5)
    at = np.ix_(rows, columns)
    noise = {
        0: before[at] * rng.standard_normal((rows.sum(), columns.sum())),
        1: rng.standard_normal((rows.sum(), columns.sum())) * np.abs(before).mean(),
        2: values(seed + 10_000, *before.shape)[at],
        3: rng.standard_t(2, (rows.sum(), columns.sum())),
    }[seed % 4]
    after = before.copy()
    after[at] += (size * noise).astype(np.float32)
    if seed % 8 == 2:
        after[at] = noise  # unrelated values of the same kind
    return before, after


def test_explain_never_explains_random_damage() -> None:
    """Its place may be told, since that is a fact; a cause may not."""
    told = []
    for seed in range(250):
        region = find_error_region(sample_of(*random_damage(seed)), 0.0, {"tp": 2}, (16,))
        if region is not None:
            winner, tested = choose(region, hypotheses(region, ("a", "b", "c"), ()))
            told += [(seed, winner)] if winner else []
            assert all(0 <= t.share <= 1 for t in tested)
    assert told == []


def test_explain_does_not_read_a_large_tensor_for_a_sample(tmp_path: Path) -> None:
    before = values(0, ROWS, 1 << 16)
    found = why(tmp_path, before, before * np.float32(1.5))
    assert found.name == "scale"
    assert found.num_rows <= 8


def rope(x: Array, position: Array, theta: float = 10000.0, interleave: bool = False) -> Array:
    heads = x.reshape(len(x), -1, 16)
    angle = position[:, None] * theta ** (-np.arange(0, 16, 2) / 16)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    one, two = (heads[..., 0::2], heads[..., 1::2]) if interleave else np.split(heads, 2, axis=-1)
    parts = one * cos - two * sin, two * cos + one * sin
    out = np.stack(parts, axis=-1) if interleave else np.concatenate(parts, axis=-1)
    return out.reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        (lambda x, p: x, "target is not rotated where baseline is"),
        (lambda x, p: rope(rope(x, p), p), "target is rotated once more than baseline"),
        (lambda x, p: rope(x, p + 1), "as if positions were 1 higher"),
        (lambda x, p: rope(x, p, interleave=True), "rotated in the interleaved layout, baseline in the half one"),
    ],
)
def test_explain_names_the_rotation_of_queries(
    tmp_path: Path, turn: Callable[[Array, Array], Array], sentence: str
) -> None:
    position = np.concatenate([np.arange(n) for n in LENGTHS.values()]).astype(np.float64)
    raw = values()
    config = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000.0}
    found = why(tmp_path, rope(raw, position), turn(raw, position), config=config)
    assert found.name == "rope"
    assert sentence in found.text


@pytest.mark.parametrize(("theta", "factor"), [(500000.0, 1.0), (10000.0, 0.25)])
def test_explain_names_base_and_scale_of_a_cosine_table(tmp_path: Path, theta: float, factor: float) -> None:
    position = np.concatenate([np.arange(n) for n in LENGTHS.values()]).astype(np.float64)

    def table(theta: float, factor: float) -> Array:
        angle = factor * position[:, None] * theta ** (-np.arange(0, 32, 2) / 32)
        return np.tile(np.cos(angle), 2).astype(np.float32)

    found = why(tmp_path, table(10000.0, 1.0), table(theta, factor))
    assert found.name == ("rope theta" if factor == 1.0 else "rope scaling")
    assert f"{theta:.4g} in target" in found.text or f"positions {factor} times" in found.text


def normed(x: Array, eps: float = 1e-6) -> Array:
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)).astype(np.float32)


WEIGHT = RNG.uniform(0.3, 1.7, WIDTH).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda x: normed(x, 0.05) * WEIGHT, "the norm's epsilon is larger by 0.05 (from the mean square"),
        (lambda x: normed(x), "target = RMSNorm of its input without a weight"),
        (lambda x: normed(x) * (WEIGHT - 1), "the weight is too small by 1 (w where 1 + w is meant, RMSNorm)"),
        (lambda x: x, "target = its own input layers.1.norm:in[x], so the module did nothing"),
        (lambda x: normed(x) * WEIGHT + x, "target = baseline + layers.1.norm:in[x] (added once more)"),
    ],
)
def test_explain_norm_from_its_input(tmp_path: Path, make: Callable[[Array], Array], sentence: str) -> None:
    x = values(4)
    assert sentence in why(tmp_path, normed(x) * WEIGHT, make(x), x, "layers.1.norm").text


def test_explain_per_head_norm_epsilon(tmp_path: Path) -> None:
    given = values(4) * np.float32(0.3)
    heads = given.reshape(ROWS, 4, 16)
    before, after = (normed(heads, eps).reshape(ROWS, WIDTH) for eps in (1e-6, 1e-2))
    config = {"num_attention_heads": 4, "head_dim": 16, "hidden_size": 64}
    found = why(tmp_path / "1", before, after, given, module="layers.1.self_attn.q_norm", config=config)
    assert found.sentence == "the norm's epsilon is larger by 0.01 (from the mean square of each head)"
    scaled = (before.reshape(ROWS, 4, 16) * np.float32(0.97)).reshape(ROWS, WIDTH)
    found = why(tmp_path / "2", before, scaled, given, module="layers.1.self_attn.q_norm", config=config)
    assert found.sentence == "target = 0.97 × baseline"


@pytest.mark.parametrize(
    ("module", "cls", "is_norm"),
    [("scale_in", "LlamaRMSNorm", True), ("norm_proj", "Linear", False), ("input_layernorm", "", True)],
)
def test_explain_norm_is_recognised_by_class(tmp_path: Path, module: str, cls: str, is_norm: bool) -> None:
    given = values(4) * np.float32(0.1)
    for name, eps in (("b", 1e-6), ("t", 1e-2)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            for port, out in (("in[x]", given), ("out", normed(given, eps))):
                if cls:
                    run.site(f"layers.1.{module}:{port}", cls)
                run.put(f"layers.1.{module}:{port}", out, dims="t h")
    found = culprit(diff(tmp_path / "b", tmp_path / "t")).explanation
    assert found is not None
    assert (found.name == "epsilon") == is_norm


def test_explain_norm_with_unit_weight_is_not_missing_it(tmp_path: Path) -> None:
    """Without an epsilon, or twice as large, it looks like one that lacks its weight, or has 1 + w."""
    given = values(4) * np.float32(1e-2)
    found = why(tmp_path / "1", normed(given, 1e-6), normed(given, 0.0), given, module="layers.1.norm")
    assert found.name == "epsilon"
    found = why(tmp_path / "2", normed(given), 2 * normed(given), given, module="layers.1.norm")
    assert found.sentence == "target = 2 × baseline"


@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_eps"])
def test_explain_lost_epsilon_of_small_rows_is_not_a_missing_weight(tmp_path: Path, name: str) -> None:
    """Of rows as small as the root of the epsilon, the epsilon scales the values like a weight."""
    given = values(4) * RNG.uniform(1e-3, 1e-2, (ROWS, 1)).astype(np.float32)
    for side, eps in (("b", 1e-5), ("t", 0.0)):
        with RunFactory(tmp_path / side, model_config={name: 1e-5}) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("layers.1.norm:in[x]", given, dims="t h")
            run.put("layers.1.norm:out", normed(given, eps), dims="t h")
    found = culprit(diff(tmp_path / "b", tmp_path / "t")).explanation
    assert found is not None
    assert found.sentence.startswith("the norm's epsilon is smaller by 1e-05")


def test_explain_epsilon_only_for_norms(tmp_path: Path) -> None:
    x = values(4)
    assert "epsilon" not in why(tmp_path, normed(x) * WEIGHT, normed(x, 0.05) * WEIGHT, x).text


def test_explain_names_a_different_activation(tmp_path: Path) -> None:
    x = values(4)
    silu = x / (1 + np.exp(-x))
    quick = x / (1 + np.exp(-1.702 * x))
    assert "target = gelu (quick) of its input, baseline = silu" in why(tmp_path, silu, quick, x).text


def test_explain_names_activations_indistinguishable_by_rounding_together(tmp_path: Path) -> None:
    given = values(7).astype(ml_dtypes.bfloat16)
    x = given.astype(np.float64)
    silu = (x / (1 + np.exp(-x))).astype(ml_dtypes.bfloat16)
    gelu = (0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))).astype(ml_dtypes.bfloat16)
    found = why(tmp_path / "1", silu, gelu, given, module="layers.1.mlp.act_fn")
    assert found.sentence.startswith("target = gelu or gelu (tanh)")
    assert "relu" not in found.sentence


def test_explain_names_swapped_siblings(tmp_path: Path) -> None:
    x, gate, up = values(1), values(2), values(3)
    names = ("layers.1.mlp.gate_proj:in[x]", "layers.1.mlp.gate_proj:out", "layers.1.mlp.up_proj:out")
    report = diff_sites(
        tmp_path, dict(zip(names, (x, gate, up), strict=True)), dict(zip(names, (x, up, gate), strict=True))
    )
    found = culprit(report).explanation
    assert found is not None
    assert found.text == "target = the baseline of layers.1.mlp.up_proj:out (removes 100 % of the error)"


def test_explain_states_the_rows_of_a_partial_cause(tmp_path: Path) -> None:
    before = values()
    after = before.copy()
    after[14:23] *= -1
    assert why(tmp_path / "1", before, after).text.startswith("in request b: target = −baseline")
    after = before.copy()
    for start, count in ((0, 14), (14, 9), (23, 17)):
        after[start + 8 : start + count] *= 1.5
    assert why(tmp_path / "2", before, after).text.startswith("in positions from 8 on: target = 1.5 × baseline")


def test_explain_noise_has_a_region_and_no_cause(tmp_path: Path) -> None:
    before = values()
    after = before.copy()
    after[20, 5:9] += np.float32([3.1, -4.7, 5.3, 2.9])
    found = why(tmp_path, before, after)
    assert (found.name, found.text) == ("", "")
    assert found.extent == "columns 5–8 of request b, position 6"


@pytest.mark.parametrize("hook", ["twice", "one rank", "noise"])
def test_explain_row_parallel_layer_of_two_ranks(tmp_path: Path, hook: str) -> None:
    tables, path = weights(layers=2), "model.layers.1.mlp.down_proj"
    asked = prompts((14, 9))
    Toy(tables).write(tmp_path / "b", asked).close()
    noise = np.random.default_rng(5).standard_normal((23, 64)).astype(np.float32)
    hooks = {"twice": lambda x: 2 * x, "noise": lambda x: x + noise}
    toy = Toy(tables, tp=2, dtype="bfloat16", hooks={f"{path}:out": hooks[hook]} if hook in hooks else {})
    if hook == "one rank":
        toy.alone = path
    toy.write(tmp_path / "t", asked).close()
    found = culprit(diff(tmp_path / "b", tmp_path / "t"))
    assert found.explanation is not None
    text = found.explanation.text
    expected = {
        "twice": "target = 2 × baseline, as if summed over tp=2 once too often",
        "one rank": "target = the partial sum of rank 0 alone: it was not summed over tp",
        "noise": "",
    }
    assert (found.module, text.startswith(expected[hook]), bool(text)) == (path, True, hook != "noise"), text


def of_one_rank(change: Callable[[Array], Array], rank: int) -> Callable[[Array], Array]:
    """What every rank calls in turn, two in all."""
    calls = iter(range(1000))
    return lambda x: change(x) if next(calls) % 2 == rank else x


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: 1.5 * x, "in the partial sum of rank 1: target = 1.5 × baseline"),
        (
            lambda x: np.where(np.arange(64) % 64 == 7, 0.0, x).astype(np.float32),
            "in column 7: the partial sum of rank 1 is zero",
        ),
        (
            lambda x: (x + 2.0).astype(np.float32),
            "target = baseline + 2 (added to one rank's partial sum, or to the sum)",
        ),
        (lambda x: x * np.random.default_rng(3).lognormal(0, 1, x.shape).astype(np.float32), ""),
    ],
)
def test_explain_names_the_rank_of_a_wrong_partial_sum(
    tmp_path: Path, change: Callable[[Array], Array], said: str
) -> None:
    tables, path = weights(layers=2), "model.layers.1.mlp.down_proj"
    asked = prompts((14, 9))
    for name, how in (("b", {}), ("t", {f"{path}.partial:out": of_one_rank(change, 1)})):
        Toy(tables, tp=2, hooks=how).write(tmp_path / name, asked).close()
    found = culprit(diff(tmp_path / "b", tmp_path / "t"))
    assert found.explanation is not None
    assert found.explanation.text.startswith(said)
    assert bool(found.explanation.text) == bool(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: 1.5 * x, "in rank 1: target = 1.5 × baseline"),
        (lambda x: only(slice(8, 16), lambda y: -y)(x), "in columns 8–15 (of rank 1): target = −baseline"),
        (lambda x: x * np.random.default_rng(3).lognormal(0, 1, x.shape).astype(np.float32), ""),
    ],
)
def test_explain_names_the_rank_of_a_wrong_replica(tmp_path: Path, change: Callable[[Array], Array], said: str) -> None:
    before = values()
    for name, other in (("b", before), ("t", change(before))):
        with RunFactory(tmp_path / name, mesh={"tp": 2}) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("layers.1.mlp:in[x]", {0: values(9), 1: values(9)}, dims="t h # tp:replicated")
            run.put("layers.1.mlp:out", {0: before, 1: other}, dims="t h # tp:replicated")
    found = culprit(diff(tmp_path / "b", tmp_path / "t")).explanation
    assert (found.text if found else "").startswith(said)
    assert bool(found and found.text) == bool(said)


def late(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Of the last two tokens of each request alone."""

    def changed(x: Array) -> Array:
        out, start = x.copy(), 0
        for count in LENGTHS.values():
            out[start + count - 2 : start + count] = change(x[start + count - 2 : start + count])
            start += count
        return out

    return changed


def moved(x: Array, columns: list[int], source: list[int]) -> Array:
    out = x.copy()
    out[:, columns] = x[:, source]
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (late(only(slice(7, 8), lambda y: 0 * y)), "target is zero"),
        (late(only(slice(7, 8), lambda y: 0.9 * y)), "target = 0.9 × baseline"),
        (late(lambda x: moved(x, [3, 4, 40, 41], [40, 41, 3, 4])), "target has columns 3–4 and columns 40–41 swapped"),
        (late(lambda x: moved(x, [5, 6, 7, 8], [8, 5, 6, 7])), "target has columns 5–8 rotated by 1"),
        (late(lambda x: moved(x, [5, 6], [20, 33])), "target holds baseline's columns 20 and 33 in columns 5–6"),
    ],
)
def test_explain_accepts_few_values_that_agree_closely(
    tmp_path: Path, change: Callable[[Array], Array], said: str
) -> None:
    assert said in why(tmp_path, values(), change(values())).text


def test_explain_rejects_few_values_that_agree_roughly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rough = late(only(slice(7, 8), lambda y: (y * rng.uniform(0.8, 1.0, y.shape)).astype(np.float32)))
    assert why(tmp_path / "1", values(), rough(values())).text == ""
    copied = late(lambda x: moved(x, [5, 6], [20, 33]) + (0.3 * rng.standard_normal(x.shape)).astype(np.float32))
    assert why(tmp_path / "2", values(), copied(values())).text == ""


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: np.roll(x, 1), lambda x: np.minimum(x, 7)])
def test_explain_integers(tmp_path: Path, change: Callable[[Array], Array]) -> None:
    before = np.concatenate([np.arange(n) + 3 for n in LENGTHS.values()])
    found = culprit(
        diff_sites(tmp_path, {"rotary:in[position_ids]": before}, {"rotary:in[position_ids]": change(before)})
    )
    assert found.explanation is not None
    assert found.explanation.name in ("positions", "shift", "clamp")


def test_explain_values_of_a_narrow_range(tmp_path: Path) -> None:
    before = values() * np.float32(20000)
    with np.errstate(over="ignore"):
        after = before.astype(np.float16).astype(np.float32)
    assert "65504, the range of fp16" in why(tmp_path, before, after).text


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "int64", "bfloat16", "complex64", "float64"]))
@settings(max_examples=40)
def test_explain_raises_nothing_for_any_values(tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 9))
    odd = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 3e38, -3e38, 1, 2**24])
    raw = [rng.choice(odd, (ROWS, width)) if rng.random() < 0.5 else values(seed, ROWS, width) for _ in range(2)]
    with np.errstate(all="ignore"):
        pair = [np.nan_to_num(v) % 99 if kind == "int64" else v for v in raw]
        name = kind if kind != "bfloat16" else ml_dtypes.bfloat16
        before, after = (v.astype(name) for v in pair)
    report = diff_sites(tmp_path_factory.mktemp("any"), {"layers.0.mlp:out": before}, {"layers.0.mlp:out": after})
    json.dumps(list(report.to_json()), default=str)


def test_explain_handles_rows_whose_width_changes_per_step(tmp_path: Path) -> None:
    """A mask looks at other tokens every step, with a sliding window at fewer: its rows have no one width."""
    for name, low in (("b", -3e38), ("t", -6e4)):
        with RunFactory(tmp_path / name) as run:
            for keys in (13, 6):
                run.step()
                mask = np.where(np.tri(2, keys, dtype=bool), 0.0, low).astype(np.float32)[None, None]
                run.put("layers.0:in[attention_mask]", mask)
    found = diff(tmp_path / "b", tmp_path / "t")
    assert all(divergence.explanation is None for divergence in found.divergences)


def test_explain_epsilon_counts_that_of_the_configuration(tmp_path: Path) -> None:
    """Inputs as small as the epsilon: the factor of each token depends on both epsilons."""
    given = values(4) * np.float32(1e-3)
    config = {"rms_norm_eps": 1e-5}
    found = why(tmp_path, normed(given, 1e-5), normed(given, 1e-2), given, module="layers.1.norm", config=config)
    assert found.sentence == "the norm's epsilon is larger by 0.01 (from the mean square of its input)"


def test_explain_epsilon_and_factor_that_fit_alike_are_not_stated(tmp_path: Path) -> None:
    """Inputs far below the epsilon: any factor is that of another epsilon."""
    given = values(4) * np.float32(1e-6)
    config = {"rms_norm_eps": 1e-5}
    found = why(tmp_path, normed(given, 1e-5), normed(given, 1e-1), given, module="layers.1.norm", config=config)
    assert not found.is_clear


def test_explain_names_columns_of_each_head(tmp_path: Path) -> None:
    x = values(5)
    other = x.reshape(ROWS, 8, 8).copy()
    other[..., [0, 2, 3, 5]] *= np.float32(1.5)
    config = {"head_dim": 8, "num_attention_heads": 8}
    found = why(tmp_path, x, other.reshape(x.shape), module="layers.1.self_attn.q_norm", config=config)
    assert found.text.startswith("in columns 0, 2–3 and 5 of each head of 8: target = 1.5 × baseline")


def test_explain_region_has_the_faint_columns_with_the_same_cause(tmp_path: Path) -> None:
    """The slow pairs of a RoPE table have a thousandth of the size of the fast ones."""
    before = values(width=8) * np.tile(10.0 ** -np.arange(4.0), 2).astype(np.float32)
    after = before.copy()
    after[:, [0, 3, 4, 7]] *= -1.0
    found = why(tmp_path, before, after)
    assert (found.extent, found.sentence) == ("columns 0, 3–4 and 7", "target = −baseline")


@pytest.mark.parametrize("is_repeated", [False, True])
def test_explain_order_of_columns_needs_different_rows(tmp_path: Path, is_repeated: bool) -> None:
    """In one row several columns of 16 bits hold nearly the same value."""
    before = values(rows=1, width=48).repeat(ROWS, 0) if is_repeated else values(width=48)
    after = moved(before, list(range(1, 48)), list(range(47)))
    found = why(tmp_path, before, after)
    assert found.is_clear is not is_repeated


def test_explain_two_exchanged_columns_are_a_swap(tmp_path: Path) -> None:
    """Of four columns the outer two are those that a reversal exchanges, too."""
    before = values(width=4)
    found = why(tmp_path, before, before[:, [3, 1, 2, 0]])
    assert found.sentence == "target has column 0 and column 3 swapped"


def test_explain_reads_sites_together_as_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites with one shape key, in several steps."""
    sites = [f"layers.1.part{i}:out" for i in range(5)]

    def record(path: Path, wrong: bool) -> None:
        with RunFactory(path) as run:
            for step in range(4):
                run.step(grid=(6,), rows=[RowSpan("a", 6 * step, 6, 0, 0)], token_ids=range(6 * step, 6 * step + 6))
                given = {site: values(10 * i + step, 6) for i, site in enumerate(sites)}
                for site, value in given.items():
                    run.put(site, given[sites[1]] if wrong and site == sites[3] else value, dims="t h")

    record(tmp_path / "b", wrong=False)
    record(tmp_path / "t", wrong=True)
    batches = []
    original = samples.BatchedPairs.rows_of
    monkeypatch.setattr(samples.BatchedPairs, "rows_of", lambda *how: batches.append(how) or original(*how))
    found = culprit(diff(tmp_path / "b", tmp_path / "t")).explanation
    assert found is not None
    assert (found.name, sites[1] in found.sentence, len(batches)) == ("stand-in", True, 4)
    monkeypatch.setattr(samples, "batched_form", lambda template: None)
    assert culprit(diff(tmp_path / "b", tmp_path / "t")).explanation == found
    assert len(batches) == 4


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("model.layers.0.self_attn.q_proj:out", True),
        ("model.layers.0.self_attn.q_proj:in[input]", False),
        ("model.layers.0.self_attn.o_proj:in[input]", True),
        ("model.layers.0.self_attn.o_proj:out", False),
        ("model.layers.0.self_attn:out[0]", False),
        ("model.layers.0.self_attn:in[hidden_states]", False),
        ("model.layers.0.self_attn.attn:in[key]", True),
        ("decoder.layers.0.self_attention.core_attention:out", True),
        ("decoder.layers.0.self_attention.linear_proj:out", False),
        ("transformer.h.1.attn.c_attn:out", True),
        ("transformer.h.1.attn:out[0]", False),
        ("model.layers.0.mlp.down_proj:in[input]", False),
    ],
)
def test_explain_columns_are_heads_only_before_the_output_projection(site: str, expected: bool) -> None:
    assert has_heads(site) is expected
