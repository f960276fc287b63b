"""Any part of a piece reads as the same part of the whole array."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import needs_library
from shard_tensors import MemoryRun, assembled, deal

from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.blocks import blocks
from tapscope.comparator.assembly.pieces import (
    Array,
    Concatenated,
    Leaf,
    Permuted,
    Piece,
    Scattered,
    Sliced,
    Summed,
    is_partition,
    leaves,
    records_at,
    records_over,
)
from tapscope.comparator.assembly.read import read, view
from tapscope.comparator.metrics.joined_rows import compare_blocks
from tapscope.core.dims import parse
from tapscope.run_format.run import Run
from tapscope.sources import open_run

SHAPE = (4, 3, 5)
NUM = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("pieces") / "run"
    rng = np.random.default_rng(0)
    with RunFactory(path) as out:
        out.step(grid=(4,))
        for i in range(NUM):
            out.put(f"a{i}:out", rng.integers(-50, 50, SHAPE).astype(np.float32))
        out.put("c:out", (rng.standard_normal((4, 6)) + 1j).astype(np.complex64))
    return open_run(path)


@st.composite
def pieces(draw: st.DrawFn, run: Run, depth: int = 3) -> tuple[Piece, Array]:
    """A random expression and the array it stands for."""
    kind = draw(st.sampled_from(["leaf", "cut", "joined", "summed", "turned", "placed"])) if depth else "leaf"
    if kind == "leaf":
        record = run.records[draw(st.integers(0, NUM - 1))]
        return Leaf(record), np.array(run.array(record))
    piece, array = draw(pieces(run, depth - 1))
    axis = draw(st.integers(0, 2))
    if kind == "cut":
        start = draw(st.integers(0, piece.shape[axis]))
        stop = draw(st.integers(start, piece.shape[axis]))
        return Sliced(axis, start, stop, piece), np.take(array, range(start, stop), axis)
    if kind == "turned":
        order = tuple(draw(st.permutations(range(3))))
        return Permuted(order, piece), array.transpose(order)
    if kind == "placed":
        rows = np.array(draw(st.lists(st.integers(-1, 4), min_size=array.shape[axis], max_size=array.shape[axis])))
        total = np.zeros((*array.shape[:axis], 5, *array.shape[axis + 1 :]))
        for i, row in enumerate(rows.tolist()):
            if row >= 0:
                total[(slice(None),) * axis + (row,)] += np.take(array, i, axis)
        return Scattered(axis, rows.astype(np.int64), 5, piece), total
    if kind == "summed":
        return Summed((piece, piece)), array.astype(np.float64) * 2
    halves = draw(st.integers(0, piece.shape[axis]))
    parts = [Sliced(axis, halves, piece.shape[axis], piece), Sliced(axis, 0, halves, piece), piece]
    arrays = [np.take(array, range(halves, piece.shape[axis]), axis), np.take(array, range(halves), axis), array]
    return Concatenated(axis, tuple(parts)), np.concatenate(arrays, axis)


@given(st.data())
@settings(max_examples=100)
def test_pieces_every_read_gives_the_values_of_the_whole(run: Run, data: st.DataObject) -> None:
    piece, array = data.draw(pieces(run))
    assert piece.shape == array.shape
    np.testing.assert_array_equal(read(piece, run), array)
    seen = view(piece, run)
    assert seen is None or np.array_equal(seen, array)
    axes = data.draw(st.sampled_from([(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]))
    others = [i for i in range(3) if i not in axes]
    num = int(np.prod([array.shape[i] for i in axes])) if axes else None
    rows = array.transpose(*axes, *others).reshape(num, -1) if axes and array.size else None
    found = blocks(piece, run, axes)
    if rows is None:
        size = sum(b.width * b.num_rows for b in found)
        assert size == array.size
        return
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5)), np.int64)
    start = data.draw(st.integers(0, len(rows)))
    for some in (index, slice(start, len(rows))):
        np.testing.assert_array_equal(np.concatenate([b.rows(some) for b in found], axis=1), rows[some])
    assert [b.offset for b in found] == np.cumsum([0, *(b.width for b in found)]).tolist()[:-1]


@given(st.data())
@settings(max_examples=60)
def test_pieces_elements_are_the_sums_of_those_of_their_records(run: Run, data: st.DataObject) -> None:
    piece, array = data.draw(pieces(run))
    total = np.zeros(array.size)
    for record, which, index in records_over(
        piece, [axis.ravel() for axis in np.indices(array.shape)], np.arange(array.size)
    ):
        np.add.at(total, which, np.asarray(run.array(record))[tuple(index)])
    np.testing.assert_array_equal(total.reshape(array.shape), array)
    if array.size:
        place = tuple(data.draw(st.integers(0, length - 1)) for length in array.shape)
        assert sum(float(run.array(record)[at]) for record, at in records_at(piece, place)) == array[place]


def test_pieces_scalar_has_one_record(tmp_path: Any) -> None:
    with RunFactory(tmp_path / "run") as out:
        out.step(grid=(4,))
        out.put("loss:out", np.array(2.5, np.float32))
    record = open_run(tmp_path / "run").records[0]
    assert list(records_at(Leaf(record), ())) == [(record, ())]


def test_pieces_row_count_of_any_tensor_is_bounded(run: Run, monkeypatch: Any) -> None:
    leaf = Leaf(run.records[0])
    (block,) = blocks(leaf, run, ())
    assert block.num_rows == SHAPE[0] * SHAPE[1]
    monkeypatch.setattr("tapscope.comparator.assembly.blocks.MAX_ROWS", SHAPE[0])
    for piece in (leaf, Concatenated(1, (leaf, Leaf(run.records[1])))):
        found = blocks(piece, run, ())
        assert {b.num_rows for b in found} == {SHAPE[0]}
        assert sum(b.num_rows * b.width for b in found) == int(np.prod(piece.shape))


@pytest.mark.parametrize("columns", [3, 7])
def test_pieces_wide_block_is_split_when_copied(run: Run, monkeypatch: Any, columns: int) -> None:
    monkeypatch.setattr("tapscope.comparator.assembly.blocks._MAX_COPIED_COLUMNS", columns)
    parts = tuple(Leaf(run.records[i]) for i in (0, 1))
    found = blocks(Summed(parts), run, (0,))
    assert len(found) > 1
    whole = sum(np.asarray(run.array(p.record), np.float64) for p in parts).reshape(4, -1)
    np.testing.assert_array_equal(np.concatenate([b.rows(slice(None)) for b in found], axis=1), whole)


def test_pieces_complex_value_is_two_columns(run: Run) -> None:
    leaf = Leaf(run.records[NUM])
    pairs = np.array(run.array(leaf.record)).view(np.float32)
    for piece in (leaf, Concatenated(0, (Sliced(0, 0, 1, leaf), Sliced(0, 1, 4, leaf)))):
        (block,) = blocks(piece, run, (0,))
        assert block.width == 12
        np.testing.assert_array_equal(block.rows(slice(None)), pairs)


def test_pieces_contiguous_data_is_not_copied(run: Run) -> None:
    leaf = Leaf(run.records[0])
    for piece, axes in ((leaf, (0, 1)), (leaf, (0,)), (Sliced(2, 1, 3, leaf), (0, 1)), (Sliced(0, 1, 3, leaf), (0,))):
        (block,) = blocks(piece, run, axes)
        assert block.values is not None
        assert np.shares_memory(block.values, run.array(leaf.record))
    assert all(b.values is not None for b in blocks(Concatenated(1, (leaf, Leaf(run.records[1]))), run, (0,)))
    assert blocks(leaf, run, (1,))[0].values is None  # columns of the others lie apart


def test_pieces_statistics_add_up_only_for_disjoint_shards(run: Run) -> None:
    one, two = Leaf(run.records[0]), Leaf(run.records[1])
    zigzag = Concatenated(0, (Sliced(0, 0, 2, one), two, Sliced(0, 2, 4, one)))
    assert is_partition(zigzag)
    assert [r.key.site for r in leaves(zigzag)] == ["a0:out", "a1:out"]
    assert not is_partition(Sliced(0, 0, 7, zigzag))
    assert not is_partition(Concatenated(0, (Summed((one, two)),)))


@needs_library  # numpy converts what it compares
@pytest.mark.parametrize("dims", ["t h[tp:partial]", "h t[tp]", "t (a+b)[tp]", "t[cp:zigzag] h"])
def test_pieces_few_rows_of_a_large_tensor_are_copied(monkeypatch: pytest.MonkeyPatch, dims: str) -> None:
    monkeypatch.setattr("tapscope.comparator.metrics.joined_rows._COPY_ELEMENTS", 1 << 14)
    lengths, mesh, whole = (256,), {"tp": 2, "cp": 2}, np.ones((256, 4096), np.float32)
    sides = []
    for text in (dims, "t h[tp]"):
        run = MemoryRun(
            deal(whole.T if text.startswith("h t") else whole, parse(text), mesh, lengths), text, mesh, lengths
        )
        found = assembled(run)
        assert found.piece is not None
        sides.append(blocks(found.piece, run, (parse(text).index("t") or 0,)))
    tracemalloc.start()
    compare_blocks(*sides, RowJoin(0, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < whole.nbytes / 4
