"""Weights that differ are told by what they leave in the outputs: of one expert, of some inputs, without a bias."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator.explain.experts import columns_apart, common_expert, exchanged
from tapscope.comparator.explain.input_ranges import explained_inputs
from tapscope.core.observe import RowSpan

Array = np.ndarray[Any, Any]
LENGTHS = {"a": 14, "b": 9, "c": 17}
ROWS, WIDTH, HIDDEN, EXPERTS, TOP = sum(LENGTHS.values()), 24, 40, 6, 2
RNG = np.random.default_rng(7)
GIVEN = RNG.standard_normal((ROWS, WIDTH))
CHOSEN = np.argsort(RNG.standard_normal((ROWS, EXPERTS)), axis=1)[:, :TOP]
SHARES = RNG.dirichlet(np.ones(TOP), ROWS)
UP = RNG.standard_normal((EXPERTS, HIDDEN, WIDTH)) / 5
DOWN = RNG.standard_normal((EXPERTS, WIDTH, HIDDEN)) / 5


def experts(up: Array = UP, down: Array = DOWN) -> Array:
    """What a mixture of experts makes of every row."""
    each = np.stack([np.tanh(GIVEN @ up[e].T) @ down[e].T for e in range(EXPERTS)], axis=1)
    return (np.take_along_axis(each, CHOSEN[:, :, None], axis=1) * SHARES[:, :, None]).sum(axis=1)


def stated(path: Path, module: str, sides: tuple[dict[str, Array], dict[str, Array]]) -> str:
    """The cause that is stated of two runs of one module, whose sites are by port."""
    for name, ports in zip(("b", "t"), sides, strict=True):
        with RunFactory(path / name) as run:
            rows, slot = [], 0
            for request, count in LENGTHS.items():
                rows.append(RowSpan(request, 0, count, 0, slot))
                slot += count
            run.step(grid=(slot,), rows=rows, token_ids=range(slot))
            for port, values in ports.items():
                run.put(f"{module}:{port}", values, dims="t h")
    first = diff(path / "b", path / "t").first_divergence
    assert first is not None
    assert first.module == module
    return "" if first.explanation is None else first.explanation.text


def of_experts(path: Path, after: Array) -> str:
    sides = [
        {"in[hidden_states]": GIVEN.astype(np.float32), "in[top_k_index]": CHOSEN, "out": out.astype(np.float32)}
        for out in (experts(), after)
    ]
    return stated(path, "layers.1.mlp.experts", (sides[0], sides[1]))


def changed(weights: Array, expert: int, rows: slice) -> Array:
    found = weights.copy()
    found[expert, rows] = found[expert, rows][::-1] + 0.1
    return found


def test_weights_of_one_wrong_expert_are_named(tmp_path: Path) -> None:
    said = of_experts(tmp_path, experts(up=changed(UP, 3, slice(8, 12))))
    count = int((CHOSEN == 3).any(axis=1).sum())
    assert (
        said
        == f"the weights of expert 3 differ, or what it computes: all {count} rows that chose it are off, and no other"
    )


def test_weights_wrong_columns_of_an_expert_are_rows_of_its_down_projection(tmp_path: Path) -> None:
    said = of_experts(tmp_path, experts(down=changed(DOWN, 1, slice(4, 7))))
    assert said.startswith("the down projection of expert 1 differs in its rows 4–6: all ")


def test_weights_of_two_experts_are_named(tmp_path: Path) -> None:
    both = changed(changed(UP, 3, slice(8, 12)), 4, slice(0, 8))
    count = int(((CHOSEN == 3) | (CHOSEN == 4)).any(axis=1).sum())
    assert of_experts(tmp_path / "two", experts(up=both)) == (
        "the weights of experts 3 and 4 differ (gate, up or down), or what they compute: "
        f"all {count} rows that chose either are off, and no other"
    )
    three = changed(both, 0, slice(0, 8))
    assert "expert" not in of_experts(tmp_path / "three", experts(up=three))
    after = experts()
    after[RNG.permutation(ROWS)[:9]] += RNG.standard_normal((9, WIDTH))
    assert "expert" not in of_experts(tmp_path / "rows", after)


def test_weights_of_an_expert_chosen_by_nearly_all_rows_are_not_named() -> None:
    error = np.full(20, 1e-6)
    error[:6] = 0.5
    chosen = np.where(np.arange(20) < 18, 1, 2)[:, None]
    assert common_expert(chosen, error, None) is None
    chosen = np.stack([chosen[:, 0], np.where(np.arange(20) < 6, 3, 4)], axis=1)
    assert common_expert(chosen, error, None) == 3


def test_weights_equal_rows_count_once() -> None:
    error, chosen = np.where(np.arange(20) < 5, 0.5, 1e-6), np.where(np.arange(20) < 5, 0, 1)[:, None]
    given = RNG.standard_normal((20, 8))
    assert common_expert(chosen, error, given) == 0
    given[:5] = given[0] * (1 + 1e-5 * np.arange(5)[:, None])  # one prefix that all requests share
    assert common_expert(chosen, error, given) is None


@pytest.mark.parametrize(("level", "expected"), [(1e-6, [2, 5]), (0.3, None)])
def test_weights_columns_are_split_only_when_the_rest_agrees(level: float, expected: list[int] | None) -> None:
    error, others = level * RNG.standard_normal((9, 12)), 1e-6 * RNG.standard_normal((11, 12))
    error[:, [2, 5]] = 0.5
    found = columns_apart(error, others)
    assert (None if found is None else found.tolist()) == expected


INPUTS, OUTPUTS = 64, 48
X = RNG.standard_normal((ROWS, INPUTS)) * RNG.lognormal(0, 0.3, INPUTS)
WEIGHT = RNG.standard_normal((OUTPUTS, INPUTS)) / 8
BIAS = RNG.standard_normal(OUTPUTS)


def linear(path: Path, weight: Array, x: Array = X, bias: Array = BIAS, baseline: Array = WEIGHT) -> str:
    sides = [
        {"in[input]": x.astype(np.float32), "out": (x @ w.T + bias).astype(np.float32)} for w in (baseline, weight)
    ]
    return stated(path, "layers.1.mlp.up_proj", (sides[0], sides[1]))


def with_columns(columns: Any, change: Any) -> Array:
    found = WEIGHT.copy()
    found[:, columns] = change(found[:, columns])
    return found


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (with_columns(slice(16, 32), np.negative), "columns 16–31 of its input"),
        (with_columns(slice(1, 48, 3), np.negative), "every third column from 1 to 46 of its input"),
        (with_columns(slice(20, 52), lambda w: w * 0.98), "columns 20–51 of its input"),
        (with_columns([3, 40], np.zeros_like), "columns 3 and 40 of its input"),
    ],
)
def test_weights_names_the_inputs_that_differ(tmp_path: Path, weight: Array, said: str) -> None:
    assert linear(tmp_path, weight).startswith(f"the weight differs in {said}; that accounts for the error")


def test_weights_distinguishes_swapped_inputs_from_two_wrong_ranges(tmp_path: Path) -> None:
    order = np.arange(INPUTS)
    order[:16], order[32:48] = np.arange(32, 48), np.arange(16)
    said = "columns 0–15 of its input are exchanged with columns 32–47 in the weight"
    assert linear(tmp_path / "exchanged", WEIGHT[:, order]) == said
    assert "exchanged" not in linear(tmp_path / "other", with_columns([*range(16), *range(32, 48)], np.negative))


def test_weights_of_a_range_with_gaps_are_those_that_differ() -> None:
    """Every third column from 8 to 35 explains the error as well."""
    error = X[:, [8, 35]] @ np.array([[-0.06], [0.08]])
    noise = 1e-3 * np.linalg.norm(error) * RNG.standard_normal(error.shape) / np.sqrt(ROWS)
    said = explained_inputs(X, error + noise, 0.1 * float(np.linalg.norm(error)))
    assert said == "the weight differs in columns 8 and 35 of its input; that accounts for the error"


def test_weights_wrong_everywhere_are_named_given_enough_rows(tmp_path: Path) -> None:
    other = RNG.standard_normal(WEIGHT.shape) / 8
    narrow = X[:, :20]
    said = linear(tmp_path / "narrow", other[:, :20], x=narrow, baseline=WEIGHT[:, :20])
    assert said == "the weight differs: the error is a linear function of the input"
    assert linear(tmp_path / "wide", other) == "", "any error of 40 rows is a linear function of 64 inputs"


def test_weights_not_blamed_for_an_error_independent_of_inputs() -> None:
    error = RNG.standard_normal((ROWS, OUTPUTS))
    assert explained_inputs(X, error, 1e-3) is None
    assert explained_inputs(X[:, :20], error, 1e-3) is None


def test_weights_of_nearly_equal_inputs_are_not_distinguished() -> None:
    alike = RNG.standard_normal((ROWS, 4)) @ RNG.standard_normal((4, INPUTS)) + 1e-4 * X
    assert explained_inputs(alike, alike[:, 16:32] @ WEIGHT[:, 16:32].T, 1e-2) is None
    assert explained_inputs(X, X[:, 16:32] @ WEIGHT[:, 16:32].T, 1e-2) is not None


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2.0, "target = 2 × baseline + a number for each channel: the weight is 2 × baseline's, the bias is not"),
        (-1.0, "target = −baseline + a number for each channel: the weight is −baseline's, the bias is not"),
        (0.0, "target is the same in every row: the weight counts as zero, the bias alone is left"),
    ],
)
def test_weights_scaled_without_the_bias(tmp_path: Path, factor: float, said: str) -> None:
    assert linear(tmp_path, factor * WEIGHT).startswith(said)


def test_weights_wrong_bias_or_scaled_output_is_not_a_scaled_weight(tmp_path: Path) -> None:
    sides = [{"in[input]": X.astype(np.float32), "out": out} for out in (X @ WEIGHT.T, X @ WEIGHT.T + BIAS)]
    assert "the bias is not" not in stated(tmp_path / "bias", "layers.1.mlp.up_proj", (sides[0], sides[1]))
    sides = [{"in[input]": X.astype(np.float32), "out": f * (X @ WEIGHT.T + BIAS)} for f in (1.0, 2.0)]
    assert stated(tmp_path / "all", "layers.1.mlp.up_proj", (sides[0], sides[1])).startswith("target = 2 × baseline (")


NORM = RNG.uniform(0.5, 2.0, WIDTH)


def layer_norm(path: Path, weight: Array, bias: Array) -> str:
    centred = GIVEN - GIVEN.mean(axis=1, keepdims=True)
    unit = (centred / centred.std(axis=1, keepdims=True)).astype(np.float32)
    sides = [{"in[input]": GIVEN.astype(np.float32), "out": unit * w + bias} for w in (NORM, weight)]
    return stated(path, "layers.1.ln_1", (sides[0], sides[1]))


def test_weights_of_a_norm_are_named_with_bias_and_in_few_channels(tmp_path: Path) -> None:
    other = NORM * RNG.uniform(0.5, 2.0, WIDTH)
    said = "target = baseline × a separate factor per channel + a number: the weight differs, the bias does not"
    assert layer_norm(tmp_path / "all", other, BIAS[:WIDTH]).startswith(said)
    few = np.where(np.isin(np.arange(WIDTH), [8, 9, 10]), other, NORM)
    said = "in columns 8–10: target = baseline × a separate factor per channel"
    assert layer_norm(tmp_path / "few", few, 0 * BIAS[:WIDTH]).startswith(said)
    ones = np.where(np.arange(WIDTH) < 4, 0.0, NORM)
    assert layer_norm(tmp_path / "zero", ones, 0 * BIAS[:WIDTH]).startswith("in columns 0–3: target is zero")
    noise = (RNG.standard_normal((ROWS, WIDTH)) + 1).astype(np.float32)
    sides = [{"in[input]": GIVEN.astype(np.float32), "out": noise * f} for f in (1.0, noise)]
    assert "each channel" not in stated(tmp_path / "other", "layers.1.ln_1", (sides[0], sides[1]))


def test_weights_column_copied_from_another(tmp_path: Path) -> None:
    order = np.arange(OUTPUTS)
    order[5] = 9
    sides = [{"in[input]": X[:20].astype(np.float32), "out": (X[:20] @ w.T)} for w in (WEIGHT, WEIGHT[order])]
    sides = [{port: np.concatenate([rows, rows])[:ROWS] for port, rows in side.items()} for side in sides]
    said = stated(tmp_path, "layers.1.mlp.up_proj", (sides[0], sides[1]))
    assert "target holds baseline's column 9 in column 5" in said


def summed(path: Path, lost: int | None, scale: float = 1.0) -> str:
    """The cause where the summand of a rank is another, in columns 8 to 15."""
    parts = {rank: (X[:, 32 * rank : 32 * rank + 32] @ WEIGHT[:, :32].T).astype(np.float32) for rank in (0, 1)}
    spoiled = {rank: part.copy() for rank, part in parts.items()}
    if lost is not None:
        spoiled[lost][:, 8:16] *= scale
    for name, held in (("b", parts), ("t", spoiled)):
        with RunFactory(path / name, mesh={"tp": 2}) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("fc:in[x]", {rank: X.astype(np.float32) for rank in (0, 1)}, dims="t h # tp:replicated")
            run.put("fc.partial:out", held, dims="t h[tp:partial]")
    first = diff(path / "b", path / "t").first_divergence
    assert first is not None
    return "" if first.explanation is None else first.explanation.text


def test_weights_rank_with_a_zero_partial_sum_is_named(tmp_path: Path) -> None:
    assert summed(tmp_path / "zero", 1, 0.0) == "in columns 8–15: the partial sum of rank 1 is zero"
    assert "target = 0.5 × baseline" in summed(tmp_path / "half", 1, 0.5)


def replicated(path: Path, change: Any) -> str:
    """The cause where rank 1 holds something else than rank 0, which agrees with the baseline."""
    values = (X[:, :32] * 2).astype(np.float32)
    other = change(values).astype(np.float32)
    for name, mesh, out in (("b", {}, values), ("t", {"tp": 2}, {0: values, 1: other})):
        with RunFactory(path / name, mesh=mesh) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            same = {0: X.astype(np.float32), 1: X.astype(np.float32)}
            run.put("norm:in[x]", same if mesh else same[0], dims="t h # tp:replicated" if mesh else "t h")
            run.put("norm:out", out, dims="t h # tp:replicated" if mesh else "t h")
    first = diff(path / "b", path / "t").first_divergence
    assert first is not None
    return "" if first.explanation is None else first.explanation.text


def test_weights_cause_of_one_rank_names_the_rank(tmp_path: Path) -> None:
    assert replicated(tmp_path / "all", np.negative).startswith("in rank 1: target = −baseline")

    def part(values: Array) -> Array:
        found = values.copy()
        found[:, 8:16] *= 3
        return found

    assert replicated(tmp_path / "part", part).startswith("in columns 8–15 (of rank 1): target = 3 × baseline")
    noise = RNG.standard_normal((ROWS, 32))
    assert replicated(tmp_path / "noise", lambda values: values + noise) == ""


def test_weights_of_one_rank_may_be_its_partial_sum() -> None:
    error = X[:, 16:32] @ WEIGHT[:, 16:32].T
    text = (
        "the weight (in columns 16–31 of its input) or the partial sum of rank 1 differs; that accounts for the error"
    )
    assert explained_inputs(X, error, 1e-3, 4) == text
    assert "partial sum" not in (explained_inputs(X, error, 1e-3) or "")
    assert "partial sum" not in (explained_inputs(X, X[:, 15:31] @ WEIGHT[:, 15:31].T, 1e-3, 4) or "")


def test_weights_partial_sum_of_some_columns_is_named_before_its_inputs(tmp_path: Path) -> None:
    assert summed(tmp_path, 1, 4.0).startswith("in columns 8–15 of the partial sum of rank 1: target = 4 × baseline")


def test_weights_that_differ_in_most_inputs_list_no_columns(tmp_path: Path) -> None:
    """The input that is left out may differ, too: its weight is too small to show."""
    baseline = WEIGHT[:, :8] * np.where(np.arange(8) == 5, 1e-9, 1.0)
    other = baseline.copy()
    other[3] *= 1.002
    said = linear(tmp_path, other, x=X[:, :8], baseline=baseline)
    assert said.startswith("in column 3: the weight differs: the error is a linear function of the input")


@pytest.mark.parametrize(("vary", "said"), [(0.0, "target = baseline + 3"), (0.1, "")])
def test_weights_error_that_depends_on_the_token_is_no_number_added_to_the_output(
    tmp_path: Path, vary: float, said: str
) -> None:
    x = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
    out = RNG.standard_normal((ROWS, HIDDEN))
    added = 3.0 + vary * np.random.default_rng(1).standard_normal((ROWS, 1))
    sides = [{"in[x]": x, "out": values.astype(np.float32)} for values in (out, out + added)]
    assert stated(tmp_path, "layers.1.mlp.down_proj", (sides[0], sides[1])).partition(" (")[0] == said


def test_weights_noisy_row_does_not_hide_a_common_factor_of_the_others(tmp_path: Path) -> None:
    x = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
    out = RNG.standard_normal((ROWS, HIDDEN))
    wrong = out.copy()
    wrong[: LENGTHS["a"]] *= 0.6
    wrong[20] += 0.05 * np.sign(out[20])
    sides = [{"in[x]": x, "out": values.astype(np.float32)} for values in (out, wrong)]
    text = stated(tmp_path, "layers.1.mlp.down_proj", (sides[0], sides[1]))
    assert text.startswith("in request a: target = 0.6 × baseline")


def test_weights_exchanged_experts_are_found_in_recorded_weights() -> None:
    order = np.arange(len(UP))
    order[[1, 4]] = [4, 1]
    assert exchanged(UP, UP[order] * (1 + 1e-3)) == {1: 4, 4: 1}
    assert exchanged(UP, UP) == {}
    assert exchanged(UP, np.where(np.arange(len(UP))[:, None, None] == 1, UP[4], UP)) == {}  # one copied over another
    assert exchanged(np.stack([UP[0]] * 3), np.stack([UP[1]] * 3)) == {}
