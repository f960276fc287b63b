import numpy as np
from command_line import command_line
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st

from tapscope.comparator import CompareOptions
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.record_values import RecordValueTable
from tapscope.dashboard.model.token_strip import token_strip
from tapscope.render.row_labels import Place, row_map
from tapscope.run_format.ledger import StepLine
from tapscope.run_format.record import Key, Record
from tapscope.sources import open_run


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


def test_rows_of_a_draft_tree_are_told_apart_by_their_branch(tmp_path, capsys):
    """Two siblings at one position and visit; the second is wrong, and the target has another order."""
    siblings = {0x2F19AC03: (8, 0.5), 0x1B: (9, 4.0)}
    for name, branches in (("base", [0x2F19AC03, 0x1B]), ("target", [0x1B, 0x2F19AC03])):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(2,), rows=[RowSpan("a", 0, 2, 0, 0)], token_ids=[5, 6])
            run.step(phase="draft", grid=(2,), rows=[RowSpan("a", 0, 2, 0, 0)], token_ids=[6, 7])
            run.put("m:out", np.ones((2, 3), np.float32), dims="t h")
            spans = [RowSpan("a", 2, 1, 0, i, branch) for i, branch in enumerate(branches)]
            run.step(phase="draft", grid=(2,), rows=spans, token_ids=[siblings[each][0] for each in branches])
            values = np.ones((2, 3), np.float32)
            for i, branch in enumerate(branches):
                values[i, 1] = siblings[branch][1] + (name == "target" and branch == 0x1B)
            run.put("m:out", values, dims="t h")
    source = DiffSource.open((tmp_path / "base", tmp_path / "target"), CompareOptions(), lambda *_: None)
    finding = next(each for each in source.report.findings if each.site == "m:out")
    assert finding.rows.num_compared == 4
    assert finding.worst.text() == "request draft/a, position 2, branch 0000001b"
    assert source.link(finding) == "target/m:out@2.0[0,1]"
    strip = token_strip(source.table(finding))
    assert [(row.label, row.error.value > 0) for row in strip.rows] == [
        ("draft/a:2/0000001b #9", True),
        ("draft/a:2/2f19ac03 #8", False),
    ]
    run = open_run(tmp_path / "base")
    own = RecordValueTable(run, run.select(["m:out"], steps=[2])[0])
    assert [own.label(row) for row in (0, 1)] == ["draft/a:2/2f19ac03 #8", "draft/a:2/0000001b #9"]
    assert run.tokens() == {"a": {0: 5, 1: 6}}
    _, shown, _ = command_line(capsys)("show", tmp_path / "base", "m:out", "--step", 2)
    for words in ("0 draft/a:2/2f19ac03", "1 draft/a:2/0000001b", "request draft/a: 2/0000001b"):
        assert words in shown
