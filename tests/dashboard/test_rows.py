from hypothesis import given
from hypothesis import strategies as st

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.render.row_labels import Place, row_map
from tapscope.run_format.ledger import StepLine
from tapscope.run_format.record import Key, Record


def record(shape, dims=None, rows=None):
    return Record(Key("m:out", 0), 0, "float32", shape, dims, rows)


def step(grid, runs, **more):
    return StepLine(StepInfo(step=0, grid=grid, rows=tuple(runs), **more))


RAGGED = step((2, 4), [RowSpan("a", 0, 3, 0, 1), RowSpan("b", 5, 4, 1, 4)])


def test_row_map_gives_padded_rows_their_request_and_padding_none():
    rows = row_map(record((2, 4, 8), "b s h"), RAGGED)
    assert rows.place(0) is None
    assert rows.place(1) == Place("a", 0, 0)
    assert rows.place(7) == Place("b", 8, 1)
    assert rows.label(0) == "padding"
    assert rows.describe() == "request a: 0-2, request b: 5-8"
    assert not rows.inferred


def test_row_map_without_dims_requires_leading_token_axes_and_says_so():
    assert row_map(record((2, 4, 8)), RAGGED).inferred
    assert row_map(record((8, 2, 4)), RAGGED) is None


def test_row_map_prefers_dims_to_the_shape():
    rows = row_map(record((2, 8, 4, 3), "b heads s d"), RAGGED)
    assert rows.axes == (0, 2)
    assert row_map(record((2, 4), "h k"), RAGGED) is None


def test_row_map_maps_partial_records_through_their_slots():
    rows = row_map(record((2, 8), "t h", ((3, 1), (7, 1))), RAGGED)
    assert [rows.label(i) for i in range(2)] == ["a:2", "b:8"]
    assert rows.describe() == "request a: 2, request b: 8"


def test_row_map_refuses_inconsistent_row_counts():
    assert row_map(record((3, 8), "t h"), RAGGED) is None
    assert row_map(record((2, 4, 8)), None) is None
    assert row_map(record((2, 4), "t h h2 nonsense["), RAGGED) is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_row_map_places_packed_rows_in_order(lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    runs = [RowSpan(str(i), 10 * i, n, 0, starts[i]) for i, n in enumerate(lengths)]
    total = sum(lengths)
    rows = row_map(record((total, 4), "t h"), step((total,), runs))
    expected = [Place(str(i), 10 * i + k, 0) for i, n in enumerate(lengths) for k in range(n)]
    assert [rows.place(row) for row in range(total)] == expected
