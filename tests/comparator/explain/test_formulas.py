"""Causes read off what was recorded beside the culprit: updates of optimizers, positions, weights of other norms."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import compare
from tapscope.comparator.explain.casts import missing
from tapscope.comparator.explain.clamping import clamps_of_tokens, uncapped
from tapscope.comparator.explain.dropout import dropout_rate
from tapscope.comparator.explain.error_region import find_error_region, fitted_columns
from tapscope.comparator.explain.explain import choose
from tapscope.comparator.explain.input_columns import chosen, has_alternatives
from tapscope.comparator.explain.input_ranges import equal_summands
from tapscope.comparator.explain.norm_weights import weight_of
from tapscope.comparator.explain.optimizer import Trajectory, explained
from tapscope.comparator.explain.position_ids import explain_position_ids
from tapscope.comparator.explain.region_text import describe
from tapscope.comparator.explain.rope_tables import explain_rope_table as explain_table
from tapscope.comparator.explain.router import RouterOutput, best, explain_choice, explain_weights
from tapscope.comparator.explain.sample import Sample
from tapscope.comparator.explain.scale import constants, scales
from tapscope.comparator.explain.token_slots import TokenSlots
from tapscope.core.observe import RowSpan

torch = pytest.importorskip("torch")
Array = np.ndarray[Any, Any]
SIZE, STEPS = 400, 3


def trained(
    make: Callable[[list[Any]], Any], *, forget: int = -1, couple: float = 0.0, frozen: bool = False
) -> Trajectory:
    """What torch's own optimizer does to one parameter with given gradients."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = make([parameter])
    values, gradients = [], []
    for step in range(STEPS):
        gradient = torch.randn(SIZE, generator=generator) * 0.01
        gradients.append(gradient.double().numpy())
        parameter.grad = gradient + couple * parameter.detach()
        if step == forget:
            optimizer.state.clear()
        if not frozen:
            optimizer.step()
        values.append(parameter.detach().double().numpy().copy())
    return Trajectory(values, gradients)


def adamw(lr: float = 1e-3, **how: Any) -> Callable[[list[Any]], Any]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **({"weight_decay": 0.1} | how))


def sgd(lr: float = 0.05, momentum: float = 0.9, **how: Any) -> Callable[[list[Any]], Any]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=0.1, **how)


@pytest.mark.parametrize(
    ("baseline", "target", "at", "said"),
    [
        (trained(adamw()), trained(adamw(betas=(0.999, 0.9))), 1, "Adam's betas are swapped"),
        (trained(adamw()), trained(adamw(), forget=2), 2, "Adam's moments are lost before step 2"),
        (trained(adamw()), trained(adamw(weight_decay=0.0), couple=0.01), 1, "adds weight decay to the gradient"),
        (trained(adamw()), trained(adamw(lr=2e-3)), 1, "the learning rate is 2 × baseline's"),
        (trained(adamw()), trained(adamw(), frozen=True), 1, "the parameter is not updated"),
        (trained(sgd()), trained(sgd(momentum=0.0)), 1, "momentum is not kept"),
        (trained(sgd()), trained(sgd(nesterov=True)), 1, "Nesterov's momentum"),
        (trained(sgd()), trained(sgd(lr=0.1)), 1, "the learning rate is 2 × baseline's"),
        (trained(adamw()), trained(adamw()), 1, ""),
        (trained(adamw()), trained(sgd()), 1, ""),
    ],
)
def test_formula_update_names_its_optimizer_rule(baseline: Trajectory, target: Trajectory, at: int, said: str) -> None:
    found = explained(baseline, target, at)
    assert said in found
    assert bool(said) == bool(found)


def sample(before: Array, after: Array, site: str, name: str) -> Sample:
    rows, width = before.shape
    request = np.repeat([0, 1], [rows // 2, rows - rows // 2])
    position = np.concatenate([np.arange(rows // 2), np.arange(rows - rows // 2)])
    places = request, position, np.zeros(rows, np.int64)
    return Sample(before, after, *places, 0, width, rows, np.full(width, -1), (name, name), name == "int64", site)


def test_region_without_requests_names_steps_not_rows_of_all_steps() -> None:
    before = np.random.default_rng(0).standard_normal((12, 6))
    for off, said in (([9, 10, 11], "step 3"), ([5, 7], "2 of 12 rows"), (range(6, 12), "steps from 2 on")):
        after = before.copy()
        after[off] *= 2
        whole = sample(before, after, "mlp:out", "float32")
        several = replace(whole, request=np.full(12, -1), position=np.tile(np.arange(3), 4), step=np.arange(12) // 3)
        region = find_error_region(several, 0.0, {}, ())
        assert region is not None
        assert describe(region, (), frozenset()) == said


def test_formula_positions_state_their_offset() -> None:
    before = np.concatenate([np.arange(6), np.arange(8)])[:, None].astype(np.float64)
    one = explain_position_ids(sample(before, before + 1, ":in[position_ids]", "int64"), ("a", "b"))
    assert one is not None
    assert "1 higher (+1)" in one.sentence
    each = explain_position_ids(
        sample(before, before + np.repeat([2, 5], [7, 7])[:, None], ":in[position_ids]", "int64"), ("a", "b")
    )
    assert each is not None
    assert "2 higher in request a, 5 higher in request b" in each.sentence
    assert explain_position_ids(sample(before, before * 2, ":in[position_ids]", "int64"), ("a", "b")) is None


def test_formula_norm_weight_is_named() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((30, 16)), rng.uniform(0.2, 3.0, 16)
    at = np.arange(30)

    def slots(values: Array) -> TokenSlots:
        return TokenSlots(at, at, at, at, at, values)

    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True)) * weight
    found = weight_of(slots(x), slots(y))
    assert found is not None
    np.testing.assert_allclose(found, weight, rtol=1e-6)
    assert weight_of(slots(x), slots(rng.standard_normal((30, 16)))) is None


def test_formula_missing_softcap_is_named() -> None:
    value = np.random.default_rng(0).standard_normal((20, 30)) * 10
    assert "30 × tanh" in uncapped(value, 30 * np.tanh(value / 30), 1e-6)
    assert uncapped(value, value * 0.9, 1e-6) == ""


def test_formula_map_of_few_patterns_is_not_a_factor_per_channel() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 1)) + 0.05 * rng.standard_normal((40, 32))
    before, after = x @ rng.standard_normal((32, 24)), x @ rng.standard_normal((32, 24))
    region = find_error_region(sample(before, after, "lm_head:out", "float32"), 0.0, {}, ())
    assert region is not None
    assert choose(region, scales(region))[0] is None


def test_formula_two_columns_are_not_a_pattern() -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal((40, 32))
    for count, said in ((2, "columns 4 and 7"), (3, "every third column from 4 to 10")):
        after = before.copy()
        after[:, 4 : 4 + 3 * count : 3] *= 3
        region = find_error_region(sample(before, after, "mlp:out", "float32"), 0.0, {}, ())
        assert region is not None
        assert describe(region, ("a", "b"), frozenset()) == said


def test_formula_wrong_weight_columns_are_found_from_the_input() -> None:
    rng = np.random.default_rng(0)
    x, wrong = rng.standard_normal((60, 200)), rng.standard_normal((3, 48))
    assert chosen(x, x[:, [5, 17, 90]] @ wrong, 1e-9) == [5, 17, 90]
    assert chosen(x, rng.standard_normal((60, 48)), 1e-3) == []


def test_formula_weight_columns_are_known_only_where_no_others_explain_the_error() -> None:
    rng = np.random.default_rng(0)
    changed, wrong = [3, 8, 21, 22, 40, 61], rng.standard_normal((6, 48))
    inputs = rng.standard_normal((60, 64))
    for rank, is_known in ((60, True), (6, False)):  # inputs of rank 6: any 6 columns give any of the others
        left, size, right = np.linalg.svd(inputs, full_matrices=False)
        x = (left[:, :rank] * size[:rank]) @ right[:rank] + 1e-3 * rng.standard_normal((60, 64))
        error = x[:, changed] @ wrong
        floor = 0.02 * float(np.sqrt((error**2).sum()))
        found = chosen(x, error, floor)
        assert found
        assert has_alternatives(x, error, found, floor) is not is_known
        assert (found == changed) is is_known


def table(frequency: Array, position: Array) -> Array:
    return np.tile(np.cos(position[:, None] * frequency[None, :]), 2).astype(np.float32).astype(np.float64)


PLAIN = 10000.0 ** (-np.arange(8) / 8)


@pytest.mark.parametrize(
    ("frequency", "move", "said"),
    [
        (PLAIN.astype(ml_dtypes.bfloat16).astype(np.float64), 0, "inverse frequencies are rounded to bf16"),
        (500000.0 ** (-np.arange(8) / 8), 0, "RoPE with theta 5e+05 in target against 1e+04 in baseline"),
        (PLAIN * 0.25, 0, "RoPE at positions 0.25 times those of baseline"),
        (PLAIN, 1, "positions are 1 higher in target's table"),
        (np.where(np.arange(8) == 2, 0.05, PLAIN), 0, "RoPE's frequencies of 1 pair (2) are 0.5 × baseline's"),
    ],
)
def test_formula_rope_table_states_frequencies_and_positions(frequency: Array, move: int, said: str) -> None:
    position = np.tile(np.arange(40), 2).astype(np.float64)
    some = sample(table(PLAIN, position), table(frequency, position + move), "rotary_emb:out[0]", "float32")
    region = find_error_region(replace(some, position=position.astype(np.int64)), 0.0, {}, ())
    assert region is not None
    found = explain_table(region, (10000.0,), ("a", "b"), frozenset())
    assert found is not None
    assert said in found.sentence


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.1])
def test_formula_rope_table_in_bf16_states_the_factor_of_positions(factor: float) -> None:
    position = np.tile(np.arange(40), 2).astype(np.float64)
    rounded = [table(PLAIN * times, position).astype(ml_dtypes.bfloat16).astype(np.float64) for times in (1.0, factor)]
    some = replace(sample(*rounded, "rotary_emb:out[0]", "bfloat16"), position=position.astype(np.int64))
    region = find_error_region(some, 0.0, {}, ())
    assert region is not None
    found = explain_table(region, (10000.0,), ("a", "b"), frozenset())
    assert found is not None
    assert f"RoPE at positions {factor:g} times those of baseline" in found.sentence


def router(weights: Callable[[Array], Array], count: int = 3, bias: Any = None, groups: Any = None) -> RouterOutput:
    logits = np.random.default_rng(0).standard_normal((60, 8))
    chosen = best(logits, count, bias, groups)
    scores = 1.0 / (1.0 + np.exp(-logits))
    return RouterOutput(logits, weights(np.take_along_axis(scores, chosen, 1)), chosen, BIAS)


BIAS = np.random.default_rng(1).standard_normal(8)


def normal(scores: Array) -> Array:
    return 1.5 * scores / scores.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scores: 1.5 * scores, "not normalized, they do not sum to 1"),
        (lambda scores: normal(scores) / 1.5, "0.6667 × baseline's: the scaling factor 1.5 is missing"),
        (
            lambda scores: np.where(np.arange(3) == 0, 1.5, 0.0) + 0 * scores,
            "all go to one expert in target (top-1, not 3)",
        ),
        (lambda scores: 0.5 + 0 * scores, "all equal"),
        (lambda scores: normal(scores)[:, ::-1], "in reverse order"),
    ],
)
def test_formula_router_weights_name_the_cause(change: Callable[[Array], Array], said: str) -> None:
    one, two = router(normal), router(change)
    some = sample(one.weights, two.weights, "mlp.gate:out[1]", "float32")
    region = find_error_region(some, 0.0, {}, ())
    assert region is not None
    found = explain_weights(region, one, two)
    assert found is not None
    assert said in found.sentence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: np.where(np.arange(3) == 2, 0.0, w), "weight of the last chosen expert is zero"),
        (lambda w: np.where(np.arange(len(w))[:, None] < 20, w, 0.5 * w), "0.5 × baseline's"),
        (
            lambda w: np.where(np.arange(3) < 3, 1.1 * w.mean(1, keepdims=True), w),
            "all equal in target, 1.1 × the mean",
        ),
    ],
)
def test_formula_router_weights_use_differing_rows_with_all_columns(
    change: Callable[[Array], Array], said: str
) -> None:
    one = router(normal)
    two = one._replace(weights=change(one.weights))
    region = find_error_region(sample(one.weights, two.weights, "mlp.gate:out[1]", "float32"), 0.0, {}, ())
    assert region is not None
    found = explain_weights(region, one, two)
    assert found is not None
    assert said in found.sentence


@pytest.mark.parametrize(("rows", "is_known"), [(8, True), (3, False)])
def test_formula_router_with_one_expert_needs_few_rows(rows: int, is_known: bool) -> None:
    """Weights of top-1 are one number a row: of few rows they must agree to more digits than chance would give."""
    one = router(normal, 1)
    off = np.arange(len(one.weights))[:, None] < rows
    two = one._replace(weights=np.where(off, 0.5 * one.weights, one.weights))
    noise = 0.0 if is_known else 0.05
    two = two._replace(weights=two.weights * (1.0 + noise * off * np.cos(np.arange(len(off)))[:, None]))
    region = find_error_region(sample(one.weights, two.weights, "mlp.gate:out[1]", "float32"), 0.0, {}, ())
    assert region is not None
    assert len(region.rows) == rows
    found = explain_weights(region, one, two)
    assert (found is not None and "0.5 × baseline's" in found.sentence) is is_known


@pytest.mark.parametrize(("site", "name"), [("mlp.gate:out[1]", "scale"), ("mlp.down_proj:out", "all-reduce")])
def test_scale_of_a_router_is_no_sum_over_ranks(site: str, name: str) -> None:
    before = np.random.default_rng(0).standard_normal((40, 16))
    region = find_error_region(sample(before, 0.5 * before, site, "float32"), 0.0, {"tp": 2}, ())
    assert region is not None
    winner, _ = choose(region, [*constants(region), *scales(region)])
    assert winner is not None
    assert winner.name == name


@pytest.mark.parametrize(
    ("change", "noise", "dtype"),
    [
        pytest.param((110.0, 0.3, 0.9, 1.1, 1.02), 0.0, "float32", id="factors-of-very-unequal-size"),
        pytest.param((3.0, 1.3, 0.8, 1.1, 0.9), 0.06, "bfloat16", id="factors-near-the-scatter"),
    ],
)
def test_fitted_columns_are_all_those_with_a_factor(change: tuple[float, ...], noise: float, dtype: str) -> None:
    """Over many rows a factor is known better than a single value is."""
    rng = np.random.default_rng(4)
    before = rng.standard_normal((60, 64))
    after = before * (1.0 + noise * rng.standard_normal(before.shape))
    after[:, : len(change)] *= change
    region = find_error_region(sample(before, after, "input_layernorm:out", dtype), noise, {}, ())
    assert region is not None
    found = fitted_columns(region, is_scaled=True, is_offset=False)
    assert found.columns.tolist() == list(range(len(change)))
    assert describe(found, (), frozenset()).startswith("at least columns 0–4" if noise else "columns 0–4")


def test_fitted_columns_leave_out_errors_that_rows_share() -> None:
    """Rows whose inputs differ alike have the same rounding error: its mean over rows is not smaller."""
    rng = np.random.default_rng(2)
    before = rng.standard_normal((90, 32)) + 2.0 * rng.standard_normal(32)
    shared = 0.02 * rng.standard_normal(32) * np.abs(before).mean(axis=0)
    after = before + shared + 0.002 * rng.standard_normal(before.shape)
    after[:, [3, 4, 20]] += (0.9, -0.7, 1.2)
    region = find_error_region(sample(before, after, "attn.c_proj:out", "bfloat16"), 0.015, {}, ())
    assert region is not None
    assert fitted_columns(region, is_scaled=False, is_offset=True).columns.tolist() == [3, 4, 20]


def test_formula_one_remaining_expert_is_not_all_of_one_expert() -> None:
    one = router(normal, 2)
    two = one._replace(weights=np.where(np.arange(2) == 1, 0.0, one.weights))
    region = find_error_region(sample(one.weights, two.weights, "mlp.gate:out[1]", "float32"), 0.0, {}, ())
    assert region is not None
    found = explain_weights(region, one, two)
    assert found is not None
    assert found.sentence == "the router's weight of the last chosen expert is zero in target"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"bias": None, "groups": (4, 2)}, "the router's bias is not used"),
        ({"bias": BIAS, "groups": None}, "admits all groups of experts in target, baseline 2 of 4"),
        ({"bias": BIAS, "groups": (4, 2)}, ""),
        ({"bias": -BIAS, "groups": (2, 1)}, ""),
    ],
)
def test_formula_router_choice_names_its_rule(how: dict[str, Any], said: str) -> None:
    one = router(normal, bias=BIAS, groups=(4, 2))
    found = explain_choice(one, router(normal, **how), (4, 2), np.arange(len(one.chosen)))
    assert said in found
    assert bool(said) == bool(found)


def test_formula_dropped_attention_weights_state_the_rate() -> None:
    rng = np.random.default_rng(0)
    before = rng.dirichlet(np.ones(12), 80)
    kept = rng.random(before.shape) > 0.2
    assert dropout_rate(before, before * kept / 0.8).startswith("2")
    assert dropout_rate(before, before * kept) == ""


def test_formula_non_finite_values_are_named_when_all_others_agree() -> None:
    before = np.random.default_rng(0).standard_normal((20, 8))
    after = before.copy()
    after[3:7, 2] = np.nan
    assert missing(before, after, 1e-6).startswith("target is NaN")
    assert missing(before, after * 2, 1e-6) == ""


def rotation(factor: Array | float, since: int = 0) -> Array:
    """[60, 16] cosines of two requests of 30 tokens, 8 pairs; ``factor`` of each pair's angles from a position on."""
    position = np.tile(np.arange(30.0), 2)[:, None]
    own = 10000.0 ** (-np.arange(8) / 8)[None, :]
    angle = position * own * np.where(position >= since, factor, 1.0)
    return np.tile(np.cos(angle), (1, 2)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("factor", "since", "said"),
    [
        (2.0, 0, "RoPE at positions 2 times those of baseline (theta 1e+04)"),
        (0.5, 12, "RoPE at positions 0.5 times those of baseline (theta 1e+04)"),
        (
            np.where(np.arange(8) < 2, 1.25, 1.0),
            0,
            "RoPE's frequencies of 2 pairs (0, 1) are 1.25 × baseline's in target",
        ),
        (
            np.where(np.arange(8) == 0, 4.0, 1.0),
            0,
            "RoPE's frequencies of 1 pair (0) are different from baseline's in target",
        ),
    ],
)
def test_formula_rope_table_names_the_pairs_and_the_factor(factor: Any, since: int, said: str) -> None:
    region = find_error_region(
        sample(rotation(1.0), rotation(factor, since), "rotary_emb:out[0]", "float32"), 0.0, {}, ()
    )
    assert region is not None
    found = explain_table(region, (), ("a", "b"), frozenset())
    assert found is not None
    assert found.sentence.startswith(said)
    assert found.extent == ("" if not since else "positions from 12 on")


def test_formula_equal_summands_finds_the_shifted_input_weights() -> None:
    x = np.random.default_rng(0).standard_normal((40, 64))
    for columns in (np.arange(8, 24), np.arange(1, 31, 3), np.array([17]), np.arange(64)):
        found = equal_summands(x, -0.02 * x[:, columns].sum(axis=1), 1e-6)
        assert found is not None
        assert (found[0].tolist(), round(found[1], 6)) == (columns.tolist(), -0.02)
    assert equal_summands(x, np.random.default_rng(1).standard_normal(40), 1e-6) is None
    twice = np.concatenate([x[:, :32], x[:, :32]], axis=1)
    assert equal_summands(twice, twice[:, 8:16].sum(axis=1), 1e-6) is None, "two ranges give the same"


def test_formula_token_clamps_need_values_at_each_limit() -> None:
    before = np.random.default_rng(0).standard_normal((20, 64))
    limit = np.linspace(0.4, 0.9, 20)[:, None]
    region = find_error_region(sample(before, np.clip(before, -limit, limit), "mlp:out", "float32"), 0.0, {}, ())
    assert region is not None
    assert [one.sentence for one in clamps_of_tokens(region)] == [
        "target = baseline clamped at a limit of each token (0.4 to 0.9)"
    ]
    scaled = find_error_region(sample(before, 0.5 * before, "mlp:out", "float32"), 0.0, {}, ())
    assert scaled is not None
    assert list(clamps_of_tokens(scaled)) == []


def test_formula_router_choice_names_the_differing_rank() -> None:
    one = router(normal, bias=BIAS)
    chosen = one.chosen.copy()
    chosen[:, 0] = (chosen[:, -1] + 1) % 8
    rows = np.flatnonzero(~(np.sort(chosen, axis=1) == np.sort(one.chosen, axis=1)).all(axis=1))
    found = explain_choice(one, one._replace(chosen=chosen), None, rows)
    assert found == "the router's first chosen expert differs in target, the others are the same"


def test_formula_router_bias_that_differs_is_named() -> None:
    other = BIAS.copy()
    other[[2, 5]] = BIAS[[5, 2]]
    one = router(normal, bias=BIAS)
    two = router(normal, bias=other)._replace(bias=other)
    rows = np.arange(len(one.chosen))
    assert explain_choice(one, two, None, rows) == "the router's correction bias differs for experts 2 and 5"


def test_formula_router_weights_of_other_experts_state_no_factor() -> None:
    one = router(normal, bias=BIAS)
    two = router(normal, bias=None)
    region = find_error_region(sample(one.weights, two.weights, "mlp.gate:out[1]", "bfloat16"), 0.0, {}, ())
    assert region is not None
    assert explain_weights(region, one, two) is None


def test_formula_router_weights_do_not_depend_on_errors_of_its_input() -> None:
    """They are computed from the target's own scores, however far these are from the baseline's."""
    one = router(normal, 2)
    two = one._replace(weights=one.weights[:, ::-1])
    region = find_error_region(sample(one.weights, two.weights, "mlp.gate:out[1]", "bfloat16"), 0.1, {}, ())
    assert region is not None
    found = explain_weights(region, one, two)
    assert found is not None
    assert found.sentence == "the router's weights are in reverse order in target"


def test_formula_rope_table_of_zeros_names_only_the_pairs_that_show_it() -> None:
    """In bf16 the cosines of slow pairs are 1 either way."""
    position = np.tile(np.arange(30.0), 2)[:, None]
    angle = position * (5e8 ** (-np.arange(8) / 8))[None, :]
    sides = [np.tile(np.cos(angle * kept), (1, 2)) for kept in (1.0, np.arange(8) > 3)]
    rounded = [side.astype(ml_dtypes.bfloat16).astype(np.float64) for side in sides]
    region = find_error_region(sample(*rounded, "rotary_emb:out[0]", "bfloat16"), 0.0, {}, ())
    assert region is not None
    found = explain_table(region, (5e8,), ("a", "b"), frozenset())
    assert found is not None
    assert found.sentence == "the angles of pairs 0–2 of 8 are zero in target's table: these are not rotated"


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (np.full(8, 0.9573), "RoPE at positions 0.9573 times those of baseline (theta 5e+08)"),
        (np.zeros(8), "all angles are zero in target's table: nothing is rotated"),
        (np.where(np.arange(8) == 3, 8.0, 1.0), "RoPE's frequencies of 1 pair (3) are 8.0"),
    ],
)
def test_formula_rope_tables_of_sines_show_slow_pairs(tmp_path: Path, factor: Array, said: str) -> None:
    """In bf16 the cosines of slow pairs are 1 either way."""
    position = np.arange(30)
    for name, times in (("b", 1.0), ("t", factor)):
        angle = np.tile(position[:, None] * (5e8 ** (-np.arange(8) / 8) * times)[None, :], (1, 2))
        with RunFactory(tmp_path / name, model_config={"rope_theta": 5e8}) as run:
            run.step(grid=(30,), rows=[RowSpan("a", 0, 30, 0, 0)], token_ids=range(30))
            run.put("model.rotary_emb:in[position_ids]", position, dims="t")
            run.put("model.rotary_emb:out[0]", np.cos(angle).astype(ml_dtypes.bfloat16), dims="t d")
            run.put("model.rotary_emb:out[1]", np.sin(angle).astype(ml_dtypes.bfloat16), dims="t d")
    first = compare(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert first.explanation is not None
    assert said in first.explanation.sentence
