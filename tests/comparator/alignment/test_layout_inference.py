"""Token axes are found by name or by the grid, in whatever order they lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Finding, Verdict
from tapscope.core.observe import RowSpan

LENGTHS = (5, 3)
LONGEST = max(LENGTHS)
TOKENS = list(range(sum(LENGTHS)))
PACKED_ROWS = [RowSpan("a", 0, 5, 0, 0), RowSpan("b", 0, 3, 0, 5)]
PADDED_ROWS = [RowSpan("a", 0, 5, 0, 0), RowSpan("b", 0, 3, 0, LONGEST)]


def padded(packed: np.ndarray) -> np.ndarray:
    grid = np.full((2, LONGEST, *packed.shape[1:]), 99, packed.dtype)
    grid[0, :5], grid[1, :3] = packed[:5], packed[5:]
    return grid


def diff_layouts(
    tmp_path: Path, packed: np.ndarray, other: Any, dims: str | None, packed_dims: str = "t h", **put: Any
) -> Finding:
    with RunFactory(tmp_path / "b") as run:
        run.step(grid=(8,), rows=PACKED_ROWS, token_ids=TOKENS)
        run.put("layers.0:out", packed, dims=packed_dims)
        run.put("norm:out", packed[:, :1].copy(), dims="t h")
    with RunFactory(tmp_path / "t") as run:
        run.step(grid=(2, LONGEST), rows=PADDED_ROWS, token_ids=TOKENS)
        run.put("layers.0:out", other, dims=dims, **put)
        run.put("norm:out", padded(packed[:, :1].copy()), dims="b s h")
    return diff(tmp_path / "b", tmp_path / "t").findings[0]


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((8, 12)).astype(np.float32)


@pytest.mark.parametrize(
    ("axes", "dims", "layout"),
    [
        ((0, 1, 2), None, "inferred"),
        ((0, 1, 2), "b s h", "annotated"),
        ((1, 0, 2), "s b h", "annotated"),
        ((2, 0, 1), "h b s", "annotated"),
    ],
)
def test_layout_inference_padded_matches_packed(
    tmp_path: Path, values: np.ndarray, axes: tuple[int, ...], dims: str | None, layout: str
) -> None:
    found = diff_layouts(tmp_path, values, padded(values).transpose(axes), dims)
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, layout, 8)


def test_layout_inference_bhsd_matches_tokens_heads(tmp_path: Path, values: np.ndarray) -> None:
    heads = values.reshape(8, 3, 4)
    found = diff_layouts(tmp_path, heads, padded(heads).transpose(0, 2, 1, 3), "b n s d", "t n d")
    assert (found.verdict, found.rows.num_compared) == (Verdict.SAME, 8)


def test_layout_inference_finds_bhsd_from_the_other_run(tmp_path: Path, values: np.ndarray) -> None:
    found = diff_layouts(tmp_path, values, padded(values.reshape(8, 3, 4)).transpose(0, 2, 1, 3), None)
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, "inferred", 8)


def test_layout_inference_finds_sbhd_from_the_other_run(tmp_path: Path, values: np.ndarray) -> None:
    found = diff_layouts(
        tmp_path, values, padded(values.reshape(8, 3, 4)).transpose(1, 0, 2, 3), None, packed_dims="t (n*d)"
    )
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, "inferred", 8)


def test_layout_inference_ambiguous_shape_names_the_annotations(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((8, LONGEST, 4)).astype(np.float32)
    found = diff_layouts(
        tmp_path / "unsaid", values.reshape(8, -1), padded(values).transpose(0, 2, 1, 3)[:, :, None], None
    )
    assert (found.verdict, found.rows.num_compared) == (Verdict.SHAPE, 0)
    assert "can be read as 'b s h d e' or 'b h d s e'" in found.notes[0]
    found = diff_layouts(tmp_path / "said", values.reshape(8, -1), padded(values).transpose(0, 2, 1, 3), "b n s d")
    assert found.verdict is Verdict.SAME


def test_layout_inference_ambiguous_equal_shapes_are_compared_whole(tmp_path: Path) -> None:
    heads = padded(np.random.default_rng(3).standard_normal((8, LONGEST, 4)).astype(np.float32)).transpose(0, 2, 1, 3)
    bad = heads.copy()
    bad[1, 4, 2] += 1  # of the second request, whose third row this is; read the other way it would be padding
    for name, tensor in (("b", heads), ("t", bad)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(2, LONGEST), rows=PADDED_ROWS, token_ids=TOKENS)
            run.put("k:out", tensor)
    found = diff(tmp_path / "b", tmp_path / "t").findings[0]
    assert (found.verdict, found.layout) == (Verdict.DIFFERS, "whole")


def test_layout_inference_bhsd_in_both_runs_with_different_batches(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((8, 3, 4)).astype(np.float32)
    with RunFactory(tmp_path / "b") as run:
        run.step(grid=(2, LONGEST), rows=PADDED_ROWS, token_ids=TOKENS)
        run.put("k:out", padded(values).transpose(0, 2, 1, 3))
    with RunFactory(tmp_path / "t") as run:
        for rows, cut in ((PACKED_ROWS[:1], slice(0, 5)), ([RowSpan("b", 0, 3, 0, 0)], slice(5, 8))):
            run.step(grid=(1, rows[0].count), rows=rows, token_ids=TOKENS[cut])
            run.put("k:out", values[cut].transpose(1, 0, 2)[None])
    found = diff(tmp_path / "b", tmp_path / "t").findings[0]
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, "inferred", 8)


def test_layout_inference_one_sequence_of_positions_is_broadcast(tmp_path: Path) -> None:
    angles = np.random.default_rng(0).standard_normal((1, LONGEST, 4)).astype(np.float32)
    packed = np.concatenate([angles[0, :5], angles[0, :3]])
    found = diff_layouts(tmp_path, packed, angles, None)
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, "inferred", 8)


@pytest.mark.parametrize(("axes", "dims"), [((), "s d"), ((1,), "s 1 d"), ((0,), "b s d"), ((1, 2), "s 1 1 d")])
def test_layout_inference_one_annotated_sequence_is_broadcast(tmp_path: Path, axes: tuple[int, ...], dims: str) -> None:
    angles = np.random.default_rng(0).standard_normal((LONGEST, 4)).astype(np.float32)
    packed = np.concatenate([angles[:5], angles[:3]])
    found = diff_layouts(tmp_path, packed, np.expand_dims(angles, axes), dims)
    assert (found.verdict, found.layout, found.rows.num_compared) == (Verdict.SAME, "annotated", 8)


def test_layout_inference_partial_rows_are_placed_by_their_rows(tmp_path: Path, values: np.ndarray) -> None:
    last = values[[4, 7]]
    found = diff_layouts(tmp_path, values, last, "t h", rows=[(4, 1), (7, 1)])
    assert (found.verdict, found.rows.num_compared, found.rows.num_absent) == (Verdict.SAME, 2, 6)


def test_layout_inference_unknown_rows_are_reported(tmp_path: Path, values: np.ndarray) -> None:
    found = diff_layouts(tmp_path, values, values[[4, 7]], "t h", rows=[(4, 1), (99, 1)])
    assert found.verdict is Verdict.SHAPE
    assert found.notes[0] == "its rows name slots 99 to 99 at step 0, which has 10"


def test_layout_inference_padding_is_not_compared(tmp_path: Path, values: np.ndarray) -> None:
    grid = padded(values)
    grid[1, 3:] = np.nan
    assert diff_layouts(tmp_path, values, grid, "b s h").verdict is Verdict.SAME


def test_layout_inference_invalid_dims_are_reported(tmp_path: Path, values: np.ndarray) -> None:
    found = diff_layouts(tmp_path, values, padded(values)[:, :2], "b s h")
    assert found.verdict is Verdict.SHAPE
    assert "give shape (2, 2, 12) 4 token rows at step 0, where the step has 10" in found.notes[0]


def test_layout_inference_missing_token_axis_asks_for_dims(tmp_path: Path, values: np.ndarray) -> None:
    found = diff_layouts(tmp_path, values, values.T.copy(), None)
    assert found.verdict is Verdict.SHAPE
    assert "annotate dims" in found.notes[0]


def test_layout_inference_table_of_grid_length_in_one_step_is_not_a_token_tensor(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            for step, length in enumerate((4, 1)):
                run.step(grid=(length,), rows=[RowSpan("a", 4 * step, length, 0, 0)], token_ids=[0] * length)
                run.put("rotary:out", table)
    found = diff(tmp_path / "b", tmp_path / "t").findings[0]
    assert (found.verdict, found.layout) == (Verdict.SAME, "whole")


@pytest.mark.parametrize(
    ("dims", "axes", "shape"),
    [
        ("t d n", (0, 2, 1), None),
        ("d t n", (2, 0, 1), None),
        ("t (n*d)", (0, 1, 2), (8, 12)),
        ("t 1 (n*d)", (0, 1, 2), (8, 1, 12)),
        ("1 d n t", (2, 1, 0), (1, 4, 3, 8)),
    ],
)
def test_layout_inference_axes_match_by_name_in_any_order(
    tmp_path: Path, values: np.ndarray, dims: str, axes: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    heads = values.reshape(8, 3, 4)
    other = heads.transpose(axes).reshape(shape or tuple(heads.shape[i] for i in axes))
    for left, right, names in ((heads, other, ("t n d", dims)), (other, heads, (dims, "t n d"))):
        found = one_site(tmp_path / names[0].replace("*", "x"), left, right, *names)
        assert (found.verdict, found.rows.num_compared) == (Verdict.SAME, 8)
        wrong = right.copy()
        wrong[(slice(None),) * names[1].split().index("t") + (5,)] += 1
        found = one_site(tmp_path / "wrong" / names[0].replace("*", "x"), left, wrong, *names)
        assert found.verdict is Verdict.DIFFERS
        assert found.worst is not None
        assert found.worst.position == 0  # the sixth row is the first of request b
        assert found.worst.request == "b"


def one_site(path: Path, left: np.ndarray, right: np.ndarray, left_dims: str, right_dims: str) -> Finding:
    for name, array, dims in (("b", left, left_dims), ("t", right, right_dims)):
        with RunFactory(path / name) as run:
            run.step(grid=(8,), rows=PACKED_ROWS, token_ids=TOKENS)
            run.put("layers.0:out", array, dims=dims)
    return diff(path / "b", path / "t").findings[0]


def test_layout_inference_axes_flattened_in_another_order_are_reported(tmp_path: Path, values: np.ndarray) -> None:
    flat = values.reshape(8, 3, 4).transpose(0, 2, 1).reshape(8, 12)
    found = one_site(tmp_path, values, flat, "t (n*d)", "t (d*n)")
    assert found.verdict is Verdict.SHAPE
    assert "flattened in another order" in found.notes[0]


def test_layout_inference_weight_axes_match_by_name(tmp_path: Path, values: np.ndarray) -> None:
    for name, array, dims in (("b", values, "o i"), ("t", values.T.copy(), "i o")):
        with RunFactory(tmp_path / name) as run:
            run.step()
            run.put("layers.0:param[weight]", array, dims=dims)
    assert diff(tmp_path / "b", tmp_path / "t").findings[0].verdict is Verdict.SAME


@pytest.mark.parametrize(("dims", "axes"), [("(b*s) h", (0, 1, 2)), ("(s*b) h", (1, 0, 2)), ("h (s*b)", (2, 1, 0))])
def test_layout_inference_batch_and_sequence_may_be_one_axis(
    tmp_path: Path, values: np.ndarray, dims: str, axes: tuple[int, ...]
) -> None:
    grid = padded(values).transpose(axes)
    flat = grid.reshape(12, -1) if axes[0] == 2 else grid.reshape(-1, 12)
    found = diff_layouts(tmp_path, values, flat, dims)
    assert (found.verdict, found.rows.num_compared) == (Verdict.SAME, 8)
