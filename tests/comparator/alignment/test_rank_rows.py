"""Ranks that hold other rows: data parallel ranks other requests, context parallel ones other positions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report, compare
from tapscope.comparator.pipeline.open_runs import map_rows
from tapscope.comparator.report.answer import answer
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

WIDTH = 6
TEXTS = {"a": [4, 8, 15, 16, 23, 42, 7, 9], "b": [4, 8, 15, 11], "c": [1, 2, 3, 4, 5, 6, 7, 8], "d": [30]}


def values(name: str, positions: Sequence[int]) -> np.ndarray:
    """A row for each position of a request, that depends on all of its tokens so far."""
    rows = [np.sin(np.cumsum(TEXTS[name][: p + 1])[-1] * np.arange(1, WIDTH + 1) + p) for p in positions]
    return np.asarray(rows, np.float32).reshape(-1, WIDTH)


def whole(path: Path, names: Sequence[str] = tuple(TEXTS), numbered: bool = True) -> Run:
    """Everything on one rank, packed."""
    with RunFactory(path) as run:
        rows, ids = [], []
        for i, name in enumerate(names):
            rows.append(RowSpan(str(i) if numbered else name, 0, len(TEXTS[name]), 0, len(ids)))
            ids += TEXTS[name]
        run.step(grid=(len(ids),), rows=rows, token_ids=ids)
        run.put("norm:out", np.concatenate([values(name, range(len(TEXTS[name]))) for name in names]), dims="t h")
        run.put("norm:param[weight]", np.ones(WIDTH, np.float32))
    return open_run(path)


def data_parallel(path: Path, *, mesh: bool = True, tp: int = 1, bad: bool = False) -> Run:
    """Two padded batches of two requests, whose batch indices are the same and whose lengths are not."""
    groups = (("a", "b"), ("d", "c"))
    with RunFactory(path, mesh={"dp": 2, "tp": tp} if mesh else {"": 2}) as run:
        steps, tensors = {}, {}
        for rank in range(2 * tp):
            names = groups[rank // tp]
            length = max(len(TEXTS[n]) for n in names)
            rows = [RowSpan(str(i), 0, len(TEXTS[n]), 0, i * length) for i, n in enumerate(names)]
            steps[rank] = {"grid": (2, length), "rows": tuple(rows), "token_ids": [t for n in names for t in TEXTS[n]]}
            tensor = np.full((2, length, WIDTH), 99, np.float32)
            for i, n in enumerate(names):
                tensor[i, : len(TEXTS[n])] = values(n, range(len(TEXTS[n])))
            if bad and rank >= tp:
                tensor[1, 5] += 1
            tensors[rank] = np.split(tensor, tp, axis=2)[rank % tp]
        run.step(apart=steps)
        run.put("norm:out", tensors, dims="b s h[tp]" if tp > 1 else None)
        run.put("norm:param[weight]", dict.fromkeys(tensors, np.ones(WIDTH, np.float32)))
    return open_run(path)


def zigzag(path: Path, size: int, *, sp: bool = False, dims: str | None, bad: bool = False) -> Run:
    """One batch of "a" and "c", every rank with two chunks of each: r and 2 * size - 1 - r."""
    with RunFactory(path, mesh={"cp": size, "tp": 2} if sp else {"cp": size}) as run:
        steps, tensors = {}, {}
        for rank in range(size * (2 if sp else 1)):
            place = rank // 2 if sp else rank
            chunk = 8 // (2 * size)
            at = [c * chunk + i for c in (place, 2 * size - 1 - place) for i in range(chunk)]
            rows, ids = [], []
            for i, name in enumerate("ac"):
                slot = i * 2 * chunk
                rows += [RowSpan(str(i), at[0], chunk, 0, slot), RowSpan(str(i), at[chunk], chunk, 0, slot + chunk)]
                ids += [TEXTS[name][p] for p in at]
            steps[rank] = {"grid": (2, 2 * chunk), "rows": tuple(rows), "token_ids": ids}
            tensor = np.stack([values(name, at) for name in "ac"], axis=1)  # s b h
            if bad and place == 1:
                tensor[0, 1] += 1  # request c, first position of this rank
            tensors[rank] = np.split(tensor, 2, axis=0)[rank % 2] if sp else tensor
        run.step(apart=steps)
        run.put("norm:out", tensors, dims=dims)
    return open_run(path)


def check(report: Report, num_rows: int) -> None:
    assert not any(f.verdict.is_bad for f in report.findings)
    assert (report.coverage.num_rows_aligned, report.coverage.partial, report.exit_code) == (num_rows, (), 0)
    assert report.findings[0].rows.num_compared == num_rows


@pytest.mark.parametrize(("mesh", "tp"), [(True, 1), (False, 1), (True, 2)])
def test_rank_rows_data_parallel_ranks_hold_different_requests(tmp_path: Path, mesh: bool, tp: int) -> None:
    with whole(tmp_path / "b") as one, data_parallel(tmp_path / "t", mesh=mesh, tp=tp) as two:
        check(compare(one, two), 21)
        check(compare(two, one), 21)


def test_rank_rows_bad_row_of_a_data_parallel_rank_is_named(tmp_path: Path) -> None:
    worst = diff(whole(tmp_path / "b", numbered=False), data_parallel(tmp_path / "t", bad=True)).findings[0].worst
    assert worst is not None
    assert (worst.request, worst.position, worst.rank) == ("c", 5, 1)


def test_rank_rows_error_is_not_attributed_to_another_ranks_requests(tmp_path: Path) -> None:
    """Column 1 is on the first of two tensor-parallel ranks, of each data-parallel pair."""
    texts = {"a": range(3, 9), "b": range(40, 46)}
    with RunFactory(tmp_path / "b") as base, RunFactory(tmp_path / "t", mesh={"dp": 2, "tp": 2}) as target:
        rows = [RowSpan(name, 0, 6, 0, 6 * i) for i, name in enumerate(texts)]
        base.step(grid=(12,), rows=rows, token_ids=[t for ids in texts.values() for t in ids])
        own = [{"rows": (RowSpan(name, 0, 6, 0, 0),), "token_ids": tuple(ids)} for name, ids in texts.items()]
        target.step(grid=(6,), apart={rank: own[rank // 2] for rank in range(4)})
        value = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
        off = value.copy()
        off[6 + 2, 1] += 7
        base.put("norm:out", value, dims="t h")
        parts = [half for rows in np.split(off, 2) for half in np.split(rows, 2, axis=1)]
        target.put("norm:out", dict(enumerate(parts)), dims="t h[tp]")
    where = answer(diff(tmp_path / "b", tmp_path / "t"))[1]
    assert "step 0, rank 2" in where
    assert "of rank" not in where


def test_rank_rows_selected_ranks_bring_only_their_rows(tmp_path: Path) -> None:
    report = diff(data_parallel(tmp_path / "b"), data_parallel(tmp_path / "t"), ranks=frozenset({1}))
    check(report, 9)


@pytest.mark.parametrize(
    ("size", "sp", "dims"), [(2, False, "s[cp:zigzag] b h"), (4, False, "s b h"), (2, True, "s[cp:zigzag,tp] b h")]
)
def test_rank_rows_context_parallel_ranks_hold_different_positions(
    tmp_path: Path, size: int, sp: bool, dims: str
) -> None:
    with whole(tmp_path / "b", "ac") as one, zigzag(tmp_path / "t", size, sp=sp, dims=dims) as two:
        check(compare(one, two), 16)
        check(compare(two, one), 16)


def test_rank_rows_bad_row_of_a_context_parallel_rank_is_named(tmp_path: Path) -> None:
    worst = (
        diff(whole(tmp_path / "b", "ac", numbered=False), zigzag(tmp_path / "t", 2, dims="s[cp:zigzag] b h", bad=True))
        .findings[0]
        .worst
    )
    assert worst is not None
    assert (worst.request, worst.position, worst.rank) == ("c", 2, 1)


def test_rank_rows_later_pipeline_stage_has_the_rows_of_the_first(tmp_path: Path) -> None:
    """Only the first stage sees tokens; its data parallel neighbour's rows are others."""
    with RunFactory(tmp_path / "t", mesh={"pp": 2, "dp": 2}) as run:
        steps = {rank: {"grid": (), "rows": (), "token_ids": ()} for rank in range(4)}
        for rank, name in enumerate("ac"):
            steps[rank] = {"grid": (8,), "rows": (RowSpan("0", 0, 8, 0, 0),), "token_ids": TEXTS[name]}
        run.step(apart=steps)
        run.put("norm:out", {2: values("a", range(8)), 3: values("c", range(8))})
    check(diff(whole(tmp_path / "b", "ca"), tmp_path / "t"), 16)


def test_rank_rows_equal_positions_without_a_mesh_are_different_requests(tmp_path: Path) -> None:
    with data_parallel(tmp_path / "b", mesh=False) as one, data_parallel(tmp_path / "t", mesh=False) as two:
        rows = map_rows(one, two)
    assert (rows.num_pairs, len(rows.requests), rows.problems) == (21, 4, ())
