"""Rows pair by request, position and visit; what has no partner is counted and said."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapscope.comparator import Verdict, compare
from tapscope.comparator.pipeline.open_runs import map_rows
from tapscope.core.errors import NothingInCommonError
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

TABLES = weights(layers=2)


def packed(path: Path, steps: Sequence[Sequence[tuple[str, int, int, Sequence[int]]]], site: str = "norm:out") -> Run:
    """Steps of (request, position, visit, tokens); each row's value is a function of its request's tokens so far."""
    with RunFactory(path) as run:
        for parts in steps:
            rows, slot, ids = [], 0, []
            for request, position, visit, tokens in parts:
                rows.append(RowSpan(request, position, len(tokens), visit, slot))
                slot += len(tokens)
                ids += list(tokens)
            phase = "prefill" if any(len(tokens) > 1 for *_, tokens in parts) else "decode"
            run.step(grid=(slot,), rows=rows, token_ids=ids, phase=phase)
            run.put(site, np.outer(np.asarray(ids, np.float32) + 1, np.ones(4, np.float32)), dims="t h")
    return open_run(path)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[str, int, int, list[int]]]]:
    """The same three requests computed in any chunks, in any order."""
    tokens = {"a": list(range(7)), "b": list(range(10, 15)), "c": [3]}
    done = dict.fromkeys(tokens, 0)
    steps = []
    while any(done[r] < len(tokens[r]) for r in tokens):
        waiting = [r for r in tokens if done[r] < len(tokens[r])]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        parts = []
        for r in chosen:
            count = draw(st.integers(1, len(tokens[r]) - done[r]))
            parts.append((r, done[r], 0, tokens[r][done[r] : done[r] + count]))
            done[r] += count
        steps.append(parts)
    return steps


@given(schedules(), schedules())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_row_alignment_any_two_schedules_align_one_to_one(
    tmp_path_factory: pytest.TempPathFactory, left: list[object], right: list[object]
) -> None:
    path = tmp_path_factory.mktemp("rows")
    with packed(path / "b", left) as one, packed(path / "t", right) as two:  # type: ignore[arg-type]
        rows = map_rows(one, two)
        assert (rows.num_pairs, rows.num_forked, rows.num_unaligned) == (13, (0, 0), (0, 0))
        for side in (rows.baseline, rows.target):
            used = np.concatenate([grid.pairs for grids in side.by_step().values() for grid in grids])
            assert sorted(used.tolist()) == list(range(13))
        report = compare(one, two)
    assert [f.verdict for f in report.findings] == [Verdict.SAME]
    assert report.findings[0].rows.num_compared == 13
    assert report.exit_code == 0


def test_row_alignment_ignores_the_order_of_requests(tmp_path: Path) -> None:
    given_prompts = prompts((12, 5, 9))
    turned = dict(reversed(given_prompts.items()))
    report = diff(
        Toy(TABLES).write(tmp_path / "b", given_prompts),
        Toy(TABLES).write(tmp_path / "t", turned),
        skip=("*.o_proj:in[input]",),
    )
    assert not any(f.verdict.is_bad for f in report.findings)
    assert report.coverage.is_complete


def test_row_alignment_prefill_matches_decode_steps(tmp_path: Path) -> None:
    report = diff(
        Toy(TABLES).write(tmp_path / "b", prompts((12, 5, 9)), steps=()),
        Toy(TABLES, padded=True).write(tmp_path / "t", prompts((12, 5, 9)), steps=(4, 5, 6, 7, 8, 9, 10, 11)),
    )
    assert not any(f.verdict.is_bad for f in report.findings)
    assert report.coverage.num_rows_aligned == 26
    assert report.exit_code == 0


def test_row_alignment_rows_after_a_fork_are_excluded_and_reported(tmp_path: Path) -> None:
    shared = [("a", 0, 0, [1, 2, 3])]
    report = diff(
        packed(tmp_path / "b", [shared, [("a", 3, 0, [4])], [("a", 4, 0, [5])], [("a", 5, 0, [6])]]),
        packed(tmp_path / "t", [shared, [("a", 3, 0, [4])], [("a", 4, 0, [9])]]),
    )
    (fork,) = report.coverage.forks
    assert (fork.request, fork.position, fork.baseline_token, fork.target_token, fork.in_prompt) == (
        "a",
        4,
        5,
        9,
        False,
    )
    assert report.coverage.num_rows_aligned == 4
    assert report.coverage.num_rows_forked == (2, 1)
    assert report.exit_code == 0


def test_row_alignment_different_prompts_are_partial_data(tmp_path: Path) -> None:
    report = diff(
        packed(tmp_path / "b", [[("a", 0, 0, [1, 2, 3]), ("b", 0, 0, [7, 8])]]),
        packed(tmp_path / "t", [[("a", 0, 0, [1, 5, 3]), ("b", 0, 0, [7, 8])]]),
    )
    assert report.coverage.num_rows_aligned == 3
    assert "prompts differ: request a at position 1" in report.coverage.partial[0]
    assert report.exit_code == 1


def test_row_alignment_requests_of_different_ids_match_by_prompt(tmp_path: Path) -> None:
    report = diff(
        packed(tmp_path / "b", [[("a", 0, 0, [1, 2]), ("b", 0, 0, [3, 4, 5])]]),
        packed(tmp_path / "t", [[("x", 0, 0, [3, 4, 5]), ("y", 0, 0, [1, 2])]]),
    )
    assert report.coverage.num_rows_aligned == 5
    assert "2 requests with different names paired by equal prompts" in report.coverage.warnings
    assert report.exit_code == 0


def test_row_alignment_recomputed_rows_are_counted_separately(tmp_path: Path) -> None:
    first = [("a", 0, 0, [1, 2, 3])]
    report = diff(packed(tmp_path / "b", [first]), packed(tmp_path / "t", [first, [("a", 0, 1, [1, 2])]]))
    assert report.coverage.num_rows_recomputed == (0, 2)
    assert report.coverage.num_rows_unaligned == (0, 0)
    assert report.exit_code == 0


def test_row_alignment_unknown_tokens_align_by_position_with_a_warning(tmp_path: Path) -> None:
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)])
            run.put("norm:out", np.ones((3, 4), np.float32), dims="t h")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert "token ids unknown" in report.coverage.warnings[0]
    assert report.coverage.num_rows_aligned == 3


def test_row_alignment_no_common_row_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with (
        packed(tmp_path / "b", [[("a", 0, 0, [1, 2])]]) as one,
        packed(tmp_path / "t", [[("a", 0, 0, [5, 6])]]) as two,
        pytest.raises(NothingInCommonError, match="request a diverges at position 0"),
    ):
        compare(one, two)
