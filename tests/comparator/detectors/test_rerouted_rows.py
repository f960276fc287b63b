"""Experts chosen at a near tie, and rows in the order of the choices, are not errors of the target."""

from pathlib import Path

import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import CompareOptions, Finding, Report, Verdict, compare
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.detectors.confine_rerouted_rows import Dependents
from tapscope.comparator.report.answer import answer
from tapscope.comparator.runs.grids import SideRows, StepRows
from tapscope.core.observe import RowSpan

ROWS, WIDTH, EXPERTS, TOP = 24, 32, 6, 2
_RNG = np.random.default_rng(11)
HIDDEN = _RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
ROUTER = _RNG.standard_normal((EXPERTS, WIDTH)).astype(np.float32) / np.sqrt(WIDTH, dtype=np.float32)
UP = _RNG.standard_normal((EXPERTS, WIDTH, WIDTH)).astype(np.float32) / np.sqrt(WIDTH, dtype=np.float32)
INNER = "layers.0.mlp.experts.act_fn:in[input]"
TIED = 9
"""Row of the token whose second and third experts are a near tie."""


def tied(gap: float) -> np.ndarray:
    """Return hidden states for which the third expert's score of the tied token is `gap` below the second's."""
    found = HIDDEN.copy()
    scores = ROUTER @ found[TIED]
    order = np.argsort(-scores)
    between = ROUTER[order[1]] - ROUTER[order[2]]
    found[TIED] -= between * (scores[order[1]] - scores[order[2]] - gap) / (between @ between)
    return found


def laid_out(chosen: np.ndarray, layout: str) -> list[np.ndarray]:
    """Return the (token, choice) entries of each call of the experts' inner module, in order."""
    flat, entries = chosen.reshape(-1), np.arange(chosen.size)
    by_choice = entries.reshape(chosen.shape).T.reshape(-1)
    if layout == "loop":  # one call per expert
        return [by_choice[flat[by_choice] == expert] for expert in np.unique(flat)]
    if layout == "unstable":  # arbitrary order within each expert
        return [np.lexsort((np.random.default_rng(5).permutation(len(flat)), flat))]
    return [{"grouped": np.argsort(flat, kind="stable"), "batched": entries, "choices": by_choice}[layout]]


def write(
    path: Path,
    hidden: np.ndarray,
    *,
    nudge: float = 0.0,
    wrong: bool = False,
    harm: float = 1.0,
    inner_harm: float = 1.0,
    padded: bool = False,
    layout: str = "grouped",
    bias: float = 0.0,
    sets: int | None = None,
) -> None:
    """Write one layer of experts over all rows.

    `nudge` is the error of one score of the tied token. `bias` is added to the scores of the first expert before the
    choice, and not recorded. With `sets`, choices are unordered, and those of the tied token are rotated by `sets`.
    `harm` and `inner_harm` are factors on the output of the experts, and on the inner values of the second expert.
    """
    tokens, x, tied_at = ROWS // 2, hidden, TIED
    grid: tuple[int, ...] = (ROWS,)
    rows = [RowSpan("a", 0, ROWS, 0, 0)]
    if padded:  # each request has one padding position before its tokens
        grid, tied_at = (2, tokens + 1), TIED + 1
        rows = [RowSpan("a", 0, tokens, 0, 1), RowSpan("a", tokens, tokens, 0, tokens + 2)]
        pad = np.full((1, WIDTH), 2.0, np.float32)
        x = np.vstack([pad, hidden[:tokens], pad, hidden[tokens:]])
    logits = x @ ROUTER.T
    third = np.argsort(-logits[tied_at])[2]
    logits[tied_at, third] += np.float32(nudge)
    chosen = np.argsort(-(logits + np.float32(bias) * (np.arange(EXPERTS) == 0)), axis=1)[:, :TOP]
    if wrong:
        chosen[3, 1] = np.argsort(-logits[3])[-1]
    if sets is not None:
        chosen = np.sort(chosen, axis=1)
        chosen[TIED] = np.roll(np.argsort(-logits[TIED])[:TOP], sets)
    flat = chosen.reshape(-1)
    inner = np.einsum("nd,nod->no", np.repeat(x, TOP, 0), UP[flat]).astype(np.float32)
    mixed = (inner.reshape(len(x), TOP, WIDTH).mean(1) * np.float32(harm)).astype(np.float32)
    inner[flat == 1] *= np.float32(inner_harm)
    with RunFactory(path) as run:
        run.step(grid=grid, rows=rows, token_ids=range(ROWS))
        run.put("layers.0.mlp:in[hidden_states]", x)
        run.site("layers.0.mlp.gate:out[0]", params={"weight": ROUTER.shape})
        run.put("layers.0.mlp.gate:in[hidden_states]", x)
        run.put("layers.0.mlp.gate:out[0]", logits)
        run.put("layers.0.mlp.gate:out[1]", chosen)
        run.put("layers.0.mlp.experts:in[hidden_states]", x)
        run.put("layers.0.mlp.experts:in[top_k_index]", chosen)
        for call in laid_out(chosen, layout):
            run.put(INNER, inner[call])
        run.put("layers.0.mlp.experts:out", mixed)
        run.put("layers.0.mlp:out", mixed)
        run.put("layers.0:out", x + mixed)


def by_name(report: Report) -> dict[str, Finding]:
    """Return the findings by their site within layer 0."""
    return {f.site.removeprefix("layers.0."): f for f in report.findings}


def test_rerouted_rows_near_tie_row_is_excluded(tmp_path: Path) -> None:
    write(tmp_path / "b", tied(1e-7))
    write(tmp_path / "t", tied(1e-7), nudge=6e-7)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert found["mlp.gate:out[1]"].verdict is Verdict.CLOSE
    assert "1 unequal, each a near tie: the scores of layers.0.mlp.gate:out[0]" in found["mlp.gate:out[1]"].notes[0]
    assert found["mlp.experts:in[top_k_index]"].verdict is Verdict.CLOSE
    assert found["mlp.experts:out"].rows.num_compared == ROWS - 1
    assert "1 token row left out" in found["mlp.experts:out"].notes[0]
    assert found["mlp.experts.act_fn:in[input]"].rows.num_compared == (ROWS - 1) * TOP
    assert found["layers.0:out"].worst is not None
    assert found["layers.0:out"].worst.position == TIED
    assert any("dump the target with --experts-from BASELINE" in note for note in report.coverage.warnings)
    assert report.exit_code == 0


def test_rerouted_rows_unordered_choices_may_look_ordered(tmp_path: Path) -> None:
    write(tmp_path / "b", tied(1e-7), sets=0)
    write(tmp_path / "t", tied(1e-7), nudge=6e-7, sets=1)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert found["mlp.gate:out[1]"].verdict is Verdict.CLOSE
    assert report.exit_code == 0


def test_rerouted_rows_other_rows_are_still_judged(tmp_path: Path) -> None:
    write(tmp_path / "b", tied(1e-7))
    write(tmp_path / "t", tied(1e-7), nudge=6e-7, harm=1.01)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert found["mlp.gate:out[1]"].verdict is Verdict.CLOSE
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.mlp.experts"


@pytest.mark.parametrize("gap", [0.3, 0.01])
def test_rerouted_rows_far_from_a_tie_blame_the_router(tmp_path: Path, gap: float) -> None:
    write(tmp_path / "b", tied(gap))
    write(tmp_path / "t", tied(gap), wrong=True)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert found["mlp.gate:out[1]"].verdict is Verdict.DIFFERS
    assert [d.module for d in report.divergences] == ["layers.0.mlp.gate"]


def test_rerouted_rows_flip_after_wrong_scores_blames_the_scores(tmp_path: Path) -> None:
    write(tmp_path / "b", tied(0.2))
    write(tmp_path / "t", tied(0.2), nudge=0.5)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert found["mlp.gate:out[0]"].role == "producer"
    assert found["mlp.gate:out[1]"].verdict is Verdict.DIFFERS
    assert [d.module for d in report.divergences] == ["layers.0.mlp.gate"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", ["grouped", "loop", "batched", "choices"])
def test_rerouted_rows_expert_rows_match_by_token_and_expert(tmp_path: Path, layout: str, padded: bool) -> None:
    write(tmp_path / "b", HIDDEN, padded=not padded)
    write(tmp_path / "t", HIDDEN * np.float32(1 + 1e-7), padded=padded, layout=layout)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    inner = found["mlp.experts.act_fn:in[input]"]
    assert (inner.verdict, inner.basis, inner.rows.num_compared) == (Verdict.CLOSE, "values", ROWS * TOP)
    assert report.exit_code == 0
    write(tmp_path / "w" / "b", HIDDEN, padded=not padded, layout="loop")
    write(tmp_path / "w" / "t", HIDDEN, padded=padded, layout=layout, inner_harm=1.05)
    found = by_name(diff(tmp_path / "w" / "b", tmp_path / "w" / "t"))
    if layout != "loop":  # indistinguishable from an unstable sort
        assert "mlp.experts.act_fn:in[input]" not in found
        return
    inner = found["mlp.experts.act_fn:in[input]"]
    chosen = np.argsort(-(HIDDEN @ ROUTER.T), axis=1)[:, :TOP]
    assert inner.verdict is Verdict.DIFFERS
    assert inner.worst is not None
    assert inner.worst.position in np.flatnonzero((chosen == 1).any(1))


def test_rerouted_rows_expert_rows_match_with_top_1_routing(tmp_path: Path) -> None:
    # One row per token, but sorted by expert: the number of rows matches that of the tokens, their order does not.
    choice = np.argmax(HIDDEN @ ROUTER.T, axis=1)[:, None]
    for name, order in (("b", np.arange(ROWS)), ("t", np.argsort(choice[:, 0], kind="stable"))):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("layers.0.mlp.experts:in[hidden_states]", HIDDEN)
            run.put("layers.0.mlp.experts:in[top_k_index]", choice)
            run.put(INNER, HIDDEN[order])
            run.put("layers.0.mlp.experts:out", HIDDEN)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    inner = found["mlp.experts.act_fn:in[input]"]
    assert (inner.verdict, inner.rows.num_compared, report.exit_code) == (Verdict.SAME, ROWS, 0)


def test_rerouted_rows_expert_rows_of_other_ranks_are_reported(tmp_path: Path) -> None:
    # Each of two ranks has one row per pair: first the pairs of its own experts, then zeros.
    inner, choice = np.ones((ROWS * TOP, WIDTH), np.float32), np.tile(np.arange(TOP), (ROWS, 1))
    for name, num_ranks in (("b", 1), ("t", 2)):
        with RunFactory(tmp_path / name, mesh={"tp": num_ranks}) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            for port, values, dims in (
                ("experts:in[hidden_states]", HIDDEN, "t h # tp:replicated"),
                ("experts:in[top_k_index]", choice, "t k # tp:replicated"),
                ("experts.act_fn:in[input]", inner, "pair h[tp]"),
                ("experts:out", HIDDEN, "t h # tp:replicated"),
            ):
                run.put(f"layers.0.mlp.{port}", dict.fromkeys(range(num_ranks), values), dims=dims)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert report.exit_code == 0
    assert found["mlp.experts:out"].verdict is Verdict.SAME
    assert "mlp.experts.act_fn:in[input]" not in found
    assert any("experts that are on other ranks" in note for note in report.coverage.warnings)


@pytest.mark.parametrize("harm", [1.0, 1.5])
def test_rerouted_rows_unordered_expert_rows_are_excluded(tmp_path: Path, harm: float) -> None:
    write(tmp_path / "b", HIDDEN)
    write(tmp_path / "t", HIDDEN, layout="unstable", harm=harm)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert "mlp.experts.act_fn:in[input]" not in found
    assert any("with an unknown order within each expert" in note for note in report.coverage.warnings)
    assert report.exit_code == int(harm != 1.0)


@pytest.mark.parametrize("padded", [False, True])
def test_rerouted_rows_unordered_expert_rows_that_are_all_similar_are_excluded(tmp_path: Path, padded: bool) -> None:
    heavy = 0.1 * HIDDEN
    heavy[:, :2] = (4.0, -4.0)  # two huge channels in every token make unrelated rows of an expert similar
    write(tmp_path / "b", heavy, padded=padded)
    write(tmp_path / "t", heavy * np.float32(1 + 1e-7), padded=padded, layout="unstable")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert INNER not in {finding.site for finding in report.findings}
    assert report.exit_code == 0


def test_rerouted_rows_wrong_expert_is_not_a_reordering(tmp_path: Path) -> None:
    write(tmp_path / "b", HIDDEN)
    write(tmp_path / "t", HIDDEN, inner_harm=-1.0)
    found = by_name(diff(tmp_path / "b", tmp_path / "t"))
    assert found["mlp.experts.act_fn:in[input]"].verdict is Verdict.DIFFERS


@pytest.mark.parametrize("is_rounded", [True, False])
def test_rerouted_rows_unrecorded_decision_is_reported(tmp_path: Path, is_rounded: bool) -> None:
    write(tmp_path / "b", HIDDEN, bias=2.0)
    signs = np.where(np.arange(WIDTH) % 2, np.inf, -np.inf).astype(np.float32)
    rounded = np.nextafter(HIDDEN, signs) if is_rounded else HIDDEN  # equal scores do not excuse another choice
    write(tmp_path / "t", rounded, bias=2.0, wrong=True)
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.exit_code) == ("layers.0.mlp.gate", 1)
    assert ("a bias or expert groups decide in addition to layers.0.mlp.gate:out[0]" in answer(report)[2]) is is_rounded


def masked(path: Path, hidden: np.ndarray, *, nudge: float = 0.0, padding: float = 0.0, wrong: bool = False) -> Path:
    """Write a router like Llama 4's: scores that are zero except the best, and a copy of all tokens per expert, times
    its score.

    `padding` is the value of the one position of the grid that is not a token.
    """
    x = np.vstack([hidden, np.full((1, WIDTH), padding, np.float32)])
    logits = x @ ROUTER.T
    logits[TIED, np.argsort(-logits[TIED])[1]] += np.float32(nudge)
    best = logits.argmax(1)
    if wrong:
        best[3] = logits[3].argmin()
    scores = np.where(np.arange(EXPERTS) == best[:, None], 1 / (1 + np.exp(-logits)), 0).astype(np.float32)
    copies = (scores.T[:, :, None] * x).reshape(-1, WIDTH)
    with RunFactory(path) as run:
        run.step(grid=(1, ROWS + 1), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.put("layers.0.mlp:in[hidden_states]", x[None])
        run.site("layers.0.mlp.router:out[1]", params={"weight": ROUTER.shape})
        run.put("layers.0.mlp.router:out[0]", scores)
        run.put("layers.0.mlp.router:out[1]", logits)
        run.put("layers.0.mlp.experts:in[hidden_states]", copies)
        run.put("layers.0.mlp:out", copies.reshape(EXPERTS, len(x), WIDTH).sum(0)[None])
    return path


def first_tied(gap: float) -> np.ndarray:
    """Return hidden states like `tied`, but with a near tie of the token's best two experts."""
    found = HIDDEN.copy()
    scores = ROUTER @ found[TIED]
    one, two = np.argsort(-scores)[:2]
    between = ROUTER[one] - ROUTER[two]
    found[TIED] -= between * (scores[one] - scores[two] - gap) / (between @ between)
    return found


def test_rerouted_rows_masked_scores_may_flip_at_a_near_tie(tmp_path: Path) -> None:
    masked(tmp_path / "b", first_tied(1e-7))
    masked(tmp_path / "t", first_tied(1e-7), nudge=6e-7)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = by_name(report)
    assert "1 token row left out that went to other experts" in found["mlp.router:out[0]"].notes[0]
    assert found["mlp:out"].rows.num_compared == ROWS - 1
    assert report.exit_code == 0
    masked(tmp_path / "w" / "b", first_tied(0.2))
    masked(tmp_path / "w" / "t", first_tied(0.2), wrong=True)
    report = diff(tmp_path / "w" / "b", tmp_path / "w" / "t")
    found = by_name(report)
    assert [d.module for d in report.divergences] == ["layers.0.mlp.router"]


def test_rerouted_rows_padding_of_per_expert_copies_is_not_compared(tmp_path: Path) -> None:
    masked(tmp_path / "b", HIDDEN)
    masked(tmp_path / "t", HIDDEN, padding=2.0)
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.exit_code == 0
    masked(tmp_path / "w" / "b", HIDDEN)
    wrong = HIDDEN.copy()
    wrong[5] *= np.float32(1.1)
    masked(tmp_path / "w" / "t", wrong, padding=2.0)
    found = by_name(diff(tmp_path / "w" / "b", tmp_path / "w" / "t"))
    assert found["mlp.experts:in[hidden_states]"].verdict is Verdict.DIFFERS


def test_rerouted_rows_near_tie_remains_despite_a_later_bug(tmp_path: Path) -> None:
    texts = prompts((4, 12, 8), 945)
    tables = weights(945, layers=1, experts=6)
    calls = iter(range(4))

    def flipped(value: np.ndarray) -> np.ndarray:
        return -value if next(calls) >= 2 else value

    Toy(tables).write(tmp_path / "b", texts, steps=(7, 8, 9)).close()
    hooks = {"model.layers.0.self_attn.q_proj:out": flipped}
    Toy(tables, dtype="bfloat16", padded=True, hooks=hooks).write(tmp_path / "t", texts, steps=(7, 8, 9)).close()
    first = compare(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert (first.module, first.step) == ("model.layers.0.self_attn.q_proj", 2)


def test_rerouted_rows_do_not_hide_a_bug_in_other_requests(tmp_path: Path) -> None:
    texts, tables = prompts((12, 8, 6, 9), 900), weights(900, layers=3, experts=6)
    hooks = {"model.layers.2.self_attn": lambda value: value * np.float32(1.1)}
    Toy(tables).write(tmp_path / "b", texts).close()
    Toy(tables, dtype="bfloat16").write(tmp_path / "good", texts).close()
    Toy(tables, dtype="bfloat16", hooks=hooks).write(tmp_path / "bad", texts).close()
    good = compare(tmp_path / "b", tmp_path / "good")
    assert good.exit_code == 0
    assert by_name(good)["model.layers.0.mlp.gate:out[1]"].verdict is Verdict.CLOSE  # a row was rerouted
    assert (
        compare(
            tmp_path / "b", tmp_path / "bad", CompareOptions(disabled=frozenset({"confine_rerouted_rows"}))
        ).exit_code
        == 0
    )
    first = compare(tmp_path / "b", tmp_path / "bad").first_divergence
    assert first is not None
    assert first.module == "model.layers.2.self_attn"
    assert any("that may depend on a token that went to other experts" in n for n in first.finding.notes)
    assert first.finding.rows.num_compared < sum(map(len, texts.values()))


def test_rerouted_rows_do_not_hide_a_bug_in_earlier_rows(tmp_path: Path) -> None:
    """In a single request, the tokens before a rerouted token do not depend on it."""
    texts, tables = prompts((40,), 905), weights(905, layers=3, experts=6)
    hooks = {"model.layers.2.self_attn": lambda value: value * np.float32(1.1)}
    Toy(tables).write(tmp_path / "b", texts).close()
    Toy(tables, dtype="bfloat16").write(tmp_path / "good", texts).close()
    Toy(tables, dtype="bfloat16", hooks=hooks).write(tmp_path / "bad", texts).close()
    assert compare(tmp_path / "b", tmp_path / "good").exit_code == 0
    without = CompareOptions(disabled=frozenset({"confine_rerouted_rows"}))
    assert compare(tmp_path / "b", tmp_path / "bad", without).exit_code == 0
    first = compare(tmp_path / "b", tmp_path / "bad").first_divergence
    assert first is not None
    assert first.module == "model.layers.2.self_attn"
    assert 0 < first.finding.rows.num_compared < 40


def test_rerouted_rows_dependents_are_rows_of_the_request_from_their_step_on() -> None:
    # Requests a and b begin at position 0; c continues the prefix of another request. Row pairs 0 to 5 in three steps.
    steps = {0: [0, 2, 4], 1: [1, 3], 2: [5]}
    side = SideRows(
        {(step, None): {0: StepRows((len(rows),), np.array(rows, np.int64))} for step, rows in steps.items()}
    )
    request, position = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 4, 5])
    dependents = Dependents(RowMap(side, side, ("a", "b", "c"), request, position))
    assert dependents.of(frozenset({1})) == {1, 5}  # not the first step of a, and of c the later steps
    assert dependents.of(frozenset({2})) == {2, 3, 4, 5}
    assert dependents.of(frozenset({5})) == {5}


def test_rerouted_rows_dependents_of_a_causal_model_are_later_positions() -> None:
    # One step with four rows of a, two of b, and two of c, which continues a cached prefix.
    side = SideRows({(0, None): {0: StepRows((8,), np.arange(8))}})
    request, position = np.array([0, 0, 0, 0, 1, 1, 2, 2]), np.array([0, 1, 2, 3, 0, 1, 4, 5])
    rows = RowMap(side, side, ("a", "b", "c"), request, position)
    assert Dependents(rows).of(frozenset({2})) == {0, 1, 2, 3, 6, 7}
    assert Dependents(rows, is_causal=True).of(frozenset({2})) == {2, 3, 6, 7}
    assert Dependents(rows, is_causal=True).of(frozenset({1, 2, 5})) == {1, 2, 3, 5, 6, 7}
