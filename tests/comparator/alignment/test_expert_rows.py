"""Rows that experts hold in an order of their own meet the other run's by their numbers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Finding, Verdict
from tapscope.core.observe import RowSpan

ROWS, WIDTH = 12, 5
WHOLE = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32)
ROUTED = {0: [7, 0, 3, 11, 5], 1: [4, 1], 2: [], 3: [9, 2, 8, 10, 6, -1, -1]}
"""Rank -> the token row of each of its rows, in the order in which its experts take them."""


def taken(numbers: Mapping[int, list[int]]) -> dict[int, np.ndarray]:
    return {rank: WHOLE[np.array(rows, np.int64)].reshape(-1, WIDTH) for rank, rows in numbers.items()}


def diff_experts(
    path: Path, parts: Mapping[int, np.ndarray], numbers: Mapping[int, list[int]] | None, dims: str
) -> Finding:
    with RunFactory(path / "b") as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        run.put("mlp.experts:out", WHOLE, dims="t h")
        run.put("norm:out", WHOLE, dims="t h")
    with RunFactory(path / "t", mesh={"ep": 4}) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        if numbers is not None:
            run.put("mlp.experts:tap[rows]", {rank: np.array(n, np.int32) for rank, n in numbers.items()})
        run.put("mlp.experts:out", parts, dims=dims)
        run.put("norm:out", dict.fromkeys(range(4), WHOLE), dims="t h # ep:replicated")
    return next(f for f in diff(path / "b", path / "t").findings if f.site == "mlp.experts:out")


def test_expert_rows_of_uneven_ranks_are_placed_by_row_number(tmp_path: Path) -> None:
    found = diff_experts(tmp_path, taken(ROUTED), ROUTED, "t[ep] h # rows:=tap[rows]")
    assert (found.verdict, found.rows.num_compared, found.rows.num_absent) == (Verdict.SAME, ROWS, 0)


def test_expert_rows_wrong_row_is_found_at_its_position(tmp_path: Path) -> None:
    parts = taken(ROUTED)
    parts[3][1] += 1
    found = diff_experts(tmp_path, parts, ROUTED, "t[ep] h # rows:=tap[rows]")
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert found.worst.position == 2


def test_expert_rows_without_an_expert_are_not_compared(tmp_path: Path) -> None:
    few = {rank: rows[:2] for rank, rows in ROUTED.items()}
    found = diff_experts(tmp_path, taken(few), few, "t[ep] h # rows:=tap[rows]")
    assert (found.verdict, found.rows.num_compared, found.rows.num_absent) == (Verdict.SAME, 6, 6)


def test_expert_rows_of_several_experts_are_summed(tmp_path: Path) -> None:
    twice = {0: [*range(ROWS), 3], 1: [5, 0], 2: [], 3: list(range(ROWS))}
    shares = {0: np.full(13, 0.5), 1: np.full(2, 0.25), 2: np.empty(0), 3: np.full(ROWS, 0.5)}
    shares[0][[3, 12, 5, 0]] = 0.25
    parts = {r: part * shares[r][:, None].astype(np.float32) for r, part in taken(twice).items()}
    found = diff_experts(tmp_path, parts, twice, "t[ep:partial] h # rows:=tap[rows]")
    assert (found.verdict, found.rows.num_compared) == (Verdict.SAME, ROWS)


@pytest.mark.parametrize(
    ("numbers", "dims", "reason"),
    [
        (None, "t[ep] h # rows:=tap[rows]", "rank 0 has no values of mlp.experts:tap[rows]"),
        ({**ROUTED, 1: [4, 4]}, "t[ep] h # rows:=tap[rows]", "token row 4 occurs 2 times"),
        ({**ROUTED, 1: [4]}, "t[ep] h # rows:=tap[rows]", "does not number 2 rows"),
        ({**ROUTED, 1: [4, 99]}, "t[ep] h # rows:=tap[rows]", "token row 99"),
        (ROUTED, "n[ep] h # rows:=tap[rows]", "number rows, but have no axis t"),
        (ROUTED, "t[ep:partial] h", "summands over ep have incompatible shapes"),
    ],
)
def test_expert_rows_invalid_row_numbers_are_reported(
    tmp_path: Path, numbers: dict[int, list[int]] | None, dims: str, reason: str
) -> None:
    found = diff_experts(tmp_path, taken(ROUTED), numbers, dims)
    assert found.verdict is Verdict.SHAPE
    assert reason in found.notes[0]
