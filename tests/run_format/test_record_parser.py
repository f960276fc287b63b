"""Record lines read in one step are what the careful reader makes of them, or are left to it."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tapscope.run_format import index, record
from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.record_parser import RecordLines, read_site
from tapscope.run_format.records import Records
from tapscope.run_format.stats import Stats

USUAL = Record(
    Key("model.layers.3.mlp:out", 4, 2, 1),
    7,
    "bfloat16",
    (2, 3),
    "t h[tp]",
    stats=Stats(6, 0, 1, 0, 2, 0, -1.0, 2.5, 2.5, 3.0, 9.25),
    hash="0f" * 16,
    bag="ab" * 8,
    entry=Entry("seg-000000.safetensors", 131072, 12),
)
LINE = json.loads(record.encode(USUAL))
_odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from(
        [1 << 62, 1 << 63, 1 << 64, -(1 << 70), 1.5, 2.0, 1e400, "", "g", "é", "float32", "record", "site"]
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)
_places = [(name,) for name in (*LINE, "micro", "pass", "model", "rows", "slice", "cap", "tags", "value", "new")]
_places += [("stats", name) for name in LINE["stats"]] + [("entry", at) for at in range(3)]


def _changed(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    line = json.loads(json.dumps(LINE))
    inside = line
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return line


def _read(line: bytes) -> Record | None:
    records = Records()
    return records[0] if RecordLines(2, records).read(line) else None


def test_record_parser_reads_ordinary_lines_on_the_fast_path() -> None:
    records = Records()
    lines = RecordLines(2, records)
    assert lines.read(record.encode(USUAL))
    assert lines.read(record.encode(USUAL))
    assert records == [USUAL, USUAL]
    assert records[0].shape is records[1].shape


@given(st.sampled_from(_places), _odd)
@example(("stats", "sumsq"), None)
@example(("shape",), [1] * 40)
@example(("hash",), "no hex")
@example(("site",), "a\udc80:out")
def test_record_parser_leaves_unusual_lines_to_the_full_parser(place: tuple[Any, ...], value: Any) -> None:
    line = _changed(place, value)
    found = _read(json.dumps(line).encode())
    try:
        careful = record.from_json(line, 2) if line.get("type") == "record" else None
    except (ValueError, KeyError, TypeError):
        careful = None
    assert found is None or found == careful


@given(
    st.dictionaries(st.sampled_from(["type", "site", "class", "params", "parent", "dims", "no_inputs", "new"]), _odd)
)
@example({"params": {"weight": [2, 3], "bias": []}})
@example({"params": {"weight": [1] * 40}})
@example({"params": {"weight": [-1]}})
@example({"site": "a\udc80:out"})
@example({"no_inputs": 1})
@example({"no_inputs": True, "parent": None})
def test_record_parser_leaves_unusual_sites_to_the_full_parser(changed: dict[str, Any]) -> None:
    line = {"type": "site", "site": "a:out", "class": "Linear", "params": {}, "parent": "MLP", "dims": "t h"} | changed
    one, careful = read_site(json.dumps(line).encode()), index.RankIndex()
    if one is not None:
        index._add(careful, line, 0)
        found = index.SiteInfo(one.site, one.cls, one.params, one.parent, one.dims, one.no_inputs)
        assert {found.site: found} == careful.sites


@given(st.integers(0, 400), st.binary(max_size=3))
def test_record_parser_leaves_damaged_bytes_to_the_full_parser(at: int, junk: bytes) -> None:
    text = record.encode(USUAL)
    damaged = text[:at] + junk + text[at + len(junk) :]
    found = _read(damaged)
    assert found is None or found == record.from_json(json.loads(damaged), 2)
