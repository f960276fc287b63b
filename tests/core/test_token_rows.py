"""The rows of a step, inferred from the arguments of the model call."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.token_rows import Arguments, RowReader


def read(ids: Any, reader: RowReader | None = None, step: int = 0, **known: Any) -> StepInfo | None:
    arrays = {name: np.asarray(value) if name != "names" else value for name, value in known.items()}
    return (reader or RowReader()).read(step, "forward", Arguments(ids=np.asarray(ids), **arrays))


def rows(info: StepInfo | None) -> list[tuple[str, int, int, int]]:
    assert info is not None
    return [(r.request, r.position, r.count, r.slot) for r in info.rows]


def test_token_rows_of_a_whole_prefill_need_lengths_only() -> None:
    info = read([5, 6, 7, 8, 9], lengths=[2, 3])
    assert rows(info) == [("0", 0, 2, 0), ("1", 0, 3, 2)]
    assert info is not None
    assert (info.grid, info.token_ids) == ((5,), (5, 6, 7, 8, 9))


def test_token_rows_of_a_decode_step_with_context_lengths() -> None:
    assert rows(read([5, 6], lengths=[9, 4], names=["a", "b"])) == [("a", 8, 1, 0), ("b", 3, 1, 1)]


def test_token_rows_of_a_cached_prefix_start_at_its_length() -> None:
    found = read([5, 6, 7, 8], positions=[8, 9, 10, 4], lengths=[11, 5], names=["a", "b"])
    assert rows(found) == [("a", 8, 3, 0), ("b", 4, 1, 3)]


def test_token_rows_separate_consecutive_positions_by_lengths() -> None:
    assert rows(read([5, 6], positions=[3, 4], lengths=[4, 5])) == [("0", 3, 1, 0), ("1", 4, 1, 1)]
    assert rows(read([5, 6], positions=[3, 4])) == [("0", 3, 2, 0)]


def test_token_rows_after_the_last_request_are_padding() -> None:
    info = read([5, 6, 0, 0], positions=[3, 8, 0, 0], lengths=[4, 9])
    assert rows(info) == [("0", 3, 1, 0), ("1", 8, 1, 1)]
    assert info is not None
    assert (info.grid, info.token_ids) == ((4,), (5, 6))


def test_token_rows_use_the_first_component_of_mrope_positions() -> None:
    assert rows(read([5, 6, 7], positions=[[0, 1, 2], [0, 0, 0], [9, 9, 9]], lengths=[3])) == [("0", 0, 3, 0)]


def test_token_rows_of_packed_sequences() -> None:
    info = read([[5, 6, 7, 8, 9]], lengths=[2, 3])
    assert rows(info) == [("0", 0, 2, 0), ("1", 0, 3, 2)]
    assert info is not None
    assert info.grid == (1, 5)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, [("0", 0, 3, 0), ("1", 0, 3, 3)]),
        ({"positions": [[4, 5, 6]]}, [("0", 4, 3, 0), ("1", 4, 3, 3)]),
        ({"mask": [[1, 1, 1], [0, 1, 1]]}, [("0", 0, 3, 0), ("1", 1, 2, 4)]),
        ({"mask": [[1, 1, 1], [0, 1, 1]], "positions": [[0, 1, 2], [1, 0, 1]]}, [("0", 0, 3, 0), ("1", 0, 2, 4)]),
        ({"lengths": [3, 2]}, [("0", 0, 3, 0), ("1", 0, 2, 3)]),
        ({"names": ["x", "y"]}, [("x", 0, 3, 0), ("y", 0, 3, 3)]),
    ],
)
def test_token_rows_of_padded_batches(known: dict[str, Any], expected: list[tuple[str, int, int, int]]) -> None:
    assert rows(read([[5, 6, 7], [8, 9, 9]], **known)) == expected


def test_token_rows_continue_unnamed_requests() -> None:
    reader = RowReader()
    read([5, 6, 7, 8, 9], reader, 0, lengths=[2, 3])
    assert rows(read([1, 2], reader, 1, positions=[3, 2])) == [("1", 3, 1, 0), ("0", 2, 1, 1)]
    assert rows(read([1, 2, 3], reader, 2, positions=[4, 0, 1])) == [("1", 4, 1, 0), ("2", 0, 2, 1)]
    assert reader.num_ambiguous == 0
    assert rows(read([1, 2], reader, 3, positions=[3, 2])) == [("0", 3, 1, 0), ("2", 2, 1, 1)]


def test_token_rows_count_ambiguous_requests() -> None:
    reader = RowReader()
    read([5, 6, 7, 8], reader, 0, lengths=[2, 2])
    assert rows(read([1, 2], reader, 1, positions=[2, 2])) == [("0", 2, 1, 0), ("1", 2, 1, 1)]
    assert reader.num_ambiguous == 1


def test_token_rows_leave_out_padding_after_packed_prompts() -> None:
    assert rows(read([1, 2, 3], lengths=[1, 1])) == [("0", 0, 1, 0), ("1", 0, 1, 1)]


@pytest.mark.parametrize(
    ("ids", "known"),
    [
        ([1.0, 2.0], {"lengths": [2]}),
        ([], {"lengths": [0]}),
        ([1, 2, 3], {}),
        ([1, 2, 3], {"lengths": [2, 2]}),
        ([1, 2, 3], {"positions": [0, 1, 2], "lengths": [9, 9]}),
        ([[1, 2, 3]], {"positions": [[0, 1]]}),
        ([[[1]]], {}),
    ],
)
def test_token_rows_do_not_guess_without_positions(ids: Any, known: dict[str, Any]) -> None:
    assert read(ids, **known) is None


@st.composite
def scheduled(draw: st.DrawFn) -> list[list[tuple[str, int, int]]]:
    """Draw steps of (request, first position, number of rows), mixing chunks, decode steps and cached prefixes."""
    done = {name: draw(st.integers(0, 4)) for name in "abc"}
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        step = []
        for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
            count = draw(st.integers(1, 4))
            step.append((name, done[name], count))
            done[name] += count
        steps.append(step)
    return steps


@given(scheduled(), st.integers(0, 3))
@settings(max_examples=100)
def test_token_rows_of_any_schedule_are_recovered(steps: list[list[tuple[str, int, int]]], padding: int) -> None:
    reader = RowReader()
    for number, step in enumerate(steps):
        positions = [p for _, first, count in step for p in range(first, first + count)] + [0] * padding
        info = read(
            [7] * len(positions),
            reader,
            number,
            positions=positions,
            lengths=[first + count for _, first, count in step],
            names=[name for name, *_ in step],
        )
        slots = np.cumsum([0, *(count for *_, count in step)])
        assert info is not None
        assert list(info.rows) == [RowSpan(n, p, c, 0, int(s)) for (n, p, c), s in zip(step, slots, strict=False)]
