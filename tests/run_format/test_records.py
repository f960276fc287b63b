"""Records held as columns are the records that were put in, whatever these are."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import one_payload, sketches

from tapscope.cli.ls import _order
from tapscope.comparator.runs.series import Series, content_id, series_of
from tapscope.core.site import layer_of
from tapscope.render.anomalies import anomalous, anomaly_of
from tapscope.render.run_report import payload_sizes
from tapscope.run_format import index
from tapscope.run_format.record import BACKWARD, FORWARD, Entry, Key, Record, Slice, to_json
from tapscope.run_format.record_parser import RecordLines
from tapscope.run_format.records import Records, joined
from tapscope.run_format.run import Run
from tapscope.run_format.stats import Stats
from tapscope.run_format.table import table

_counts = st.integers(0, 3)
_sums = st.sampled_from([0.0, -0.0, 1.5, 3, float("inf"), 1 << 70])
_records = st.builds(
    Record,
    st.builds(
        Key,
        st.sampled_from(["a.0:out", "a.1:out", ":in[x]"]),
        _counts,
        st.integers(0, 1),
        _counts,
        _counts,
        st.sampled_from([FORWARD, BACKWARD]),
        st.sampled_from(["", "draft"]),
    ),
    st.integers(0, 1 << 40),
    st.sampled_from(["float32", "int64", None]),
    st.sampled_from([(), (2, 3), (0,)]),
    st.sampled_from([None, "t h"]),
    st.none() | st.just(((0, 2),)),
    st.none()
    | st.builds(
        Stats,
        *[_counts] * 5,
        st.sampled_from([0, 1 << 80]),
        *[st.none() | _sums] * 3,
        _sums,
        _sums,
    ),
    st.sampled_from([None, "0f" * 16, "0F" * 16, "1", "_" * 3]),
    st.sampled_from([None, "ab" * 8, "0xab"]),
    st.none() | st.builds(Entry, st.sampled_from(["a", "b"]), st.sampled_from([0, 64, -3, 1 << 70]), _counts),
    st.none() | st.just({"type": "str", "value": "x"}),
    st.none() | st.just(Slice((0, 1, 1), (2, 2))),
    st.none() | st.just(5),
    st.none() | st.just({"tag": 1}),
    sketches,
).map(one_payload)
_lists = st.lists(_records, max_size=6)


def _same(found: Any, wanted: list[Record]) -> None:
    """Equal, and of the same types to the last sign."""
    assert repr(list(found)) == repr(wanted)
    assert found == wanted
    assert len(found) == len(wanted)


@given(_lists, _lists, st.data())
def test_records_are_equal_by_every_way_of_access(one: list[Record], two: list[Record], data: st.DataObject) -> None:
    both = joined([Records(one), Records(two)])
    every = [*one, *two]
    _same(both, every)
    start, stop, step = (data.draw(st.none() | st.integers(-7, 7)) for _ in range(3))
    _same(both[start : stop : step or None], every[start : stop : step or None])
    places = data.draw(st.lists(st.integers(0, len(every) - 1))) if every else []
    _same(both.take(np.array(places, np.int64)), [every[at] for at in places])
    _same(both.in_order(), sorted(every, key=lambda record: record.seq))
    _same(
        both.of({0, 1}, {1}, {"a.0:out"}),
        [r for r in every if r.key.step < 2 and r.key.rank == 1 and r.key.site == "a.0:out"],
    )
    assert both.sites == [r.key.site for r in every]
    assert both.of_sites(len, int).tolist() == [len(r.key.site) for r in every]
    for part, items in ((both, every), (both.take(np.array(places, np.int64)), [every[at] for at in places])):
        numbers, site_of = part.site_codes()
        assert part.distinct_sites() == list(numbers) == list(dict.fromkeys(r.key.site for r in items))
        assert site_of.tolist() == [numbers[r.key.site] for r in items]
        assert part.first_seqs() == {r.key.site: r.seq for r in reversed(items)}
        for site in numbers:
            assert part.places_of(site).tolist() == [at for at, r in enumerate(items) if r.key.site == site]
    assert both.per_step() == Counter((r.key.rank, r.key.step) for r in every)
    assert both.hashes_at(range(len(both))) == [r.hash for r in every]
    with pytest.raises(IndexError, match=f"record index {len(every)} out of range for {len(every)} records"):
        both[len(every)]


@given(_lists)
def test_records_file_ends_match_their_lastpayload_sizes(some: list[Record]) -> None:
    ends: dict[tuple[int, str], int] = {}
    for record in some:
        if (entry := record.entry) is not None:
            offset = entry.offset if entry.offset < 1 << 63 else -1  # it lies nowhere, see `bare`
            place = record.key.rank, entry.file
            ends[place] = max(ends.get(place, 0), offset + entry.nbytes)
    known = {place for place, end in ends.items() if end}
    found = Records(some).ends()
    assert {place: found[place] for place in known} == {place: ends[place] for place in known}


@given(_lists)
def test_records_series_hold_each_record_once(some: list[Record]) -> None:
    series = series_of(Run(Path(), {"version": 2}, {}), Records(some))
    held = [record for one in series for firing in one.firings for record in firing.records]
    assert Counter(map(repr, held)) == Counter(map(repr, some))
    for one in series:
        records = [record for firing in one.firings for record in firing.records]
        made = Series(one.site, one.group, tuple(one.firings))
        assert {(r.key.site, r.key.model, r.key.pass_) for r in records} == {(one.site, *one.group)}
        assert [(f.step, f.call) for f in one.firings] == sorted({(f.step, f.call) for f in one.firings})
        for told in ("dtype", "shape", "hashes", "num_records", "first"):
            assert repr(getattr(one, told)) == repr(getattr(made, told))
        assert content_id(one) == content_id(made)


def _sound(records: list[Record]) -> list[Record]:
    """Without statistics that no tensor has."""
    return [r for r in records if r.stats is None or r.stats.finite >= 0]


def _row(record: Record) -> tuple[object, ...]:
    key, stats = record.key, record.stats
    numbers = (None,) * 5 if stats is None else (stats.mean, stats.rms, stats.min, stats.max, stats.nonfinite)
    if stats is not None and not stats.finite:
        numbers = (None, None, None, None, stats.nonfinite)
    layer = layer_of(key.site.rpartition(":")[0])
    where = (key.rank, record.seq, key.step, key.site, layer, key.occurrence, key.micro, key.model, key.pass_)
    return (*where, record.dtype, list(record.shape), record.dims, *numbers, record.hash, record.bag, record.nbytes)


@settings(max_examples=40)
@given(_lists)
def test_records_table_agrees_with_each_record(items: list[Record]) -> None:
    sound = _sound(items)
    assert table(Records(sound)).rows() == [_row(record) for record in sound]


@settings(max_examples=40)
@given(_lists)
def test_records_columns_agree_with_each_record(items: list[Record]) -> None:
    found, sound = Records(_sound(items)), _sound(items)
    assert list(anomalous(found)) == [r for r in sound if anomaly_of(r)]
    by_seq = sorted(sound, key=lambda r: (r.key.step, r.key.rank, r.seq))
    assert list(found.take(_order(found, "seq"))) == by_seq
    assert list(found.take(_order(found, "size"))) == sorted(sound, key=lambda r: -r.nbytes)
    by_max = sorted(sound, key=lambda r: (not (r.stats and r.stats.nonfinite), -((r.stats and r.stats.absmax) or 0.0)))
    assert list(found.take(_order(found, "max"))) == by_max
    rms = [np.nan if r.stats is None or r.stats.rms is None else r.stats.rms for r in sound]
    np.testing.assert_array_equal(found.rms, rms)
    entries = {(r.key.rank, r.entry) for r in sound if r.entry is not None and r.entry.offset < 1 << 63}
    if all(r.entry is None or r.entry.offset < 1 << 63 for r in sound):
        sizes = [r.nbytes for r in sound if r.entry is not None]
        assert payload_sizes(found) == (len(sizes), sum(entry.nbytes for _, entry in entries), sum(sizes))


_lines = st.one_of(
    _records.map(lambda record: json.dumps({"type": "record", **to_json(record)}).encode()),
    st.sampled_from(
        [
            b'{"type":"event","kind":"close"}',
            b'{"type":"step","at":"begin","step":0,"phase":"x","epoch":0,"grid":[],"num_rows":0,"rows":[],"token_ids":[]}',
            b'{"type":"metric","step":0,"name":"a","value":1.0}',
            b'{"type":"site","site":"a.0:out","class":"Linear","params":{}}',
            b'{"type":"note"}',
            b'{"type":"record","seq":-1}',
            b"[]",
            b"",
            '{"type":"event","kind":"é"}'.encode(),
            b'{"type":"event","kind":"\xff"}',
            b"{",
        ]
    ),
)


@given(st.lists(_lines, max_size=12), st.sampled_from([b"", b"\n", b"\n{torn"]), st.integers(1, 400))
def test_records_read_in_blocks_equal_those_read_by_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, size: int
) -> None:
    folder = tmp_path_factory.mktemp("rank")
    (folder / "records.jsonl").write_bytes(b"\n".join(lines) + end)
    with mock.patch.object(index, "MAX_LINE_BYTES", 500), mock.patch.object(index, "_BLOCK", size):
        found = index.read_index(folder, 0)
        with mock.patch.object(RecordLines, "read_block", return_value=None):
            one_by_one = index.read_index(folder, 0)
    assert found.records == one_by_one.records
    assert repr(found.records.kinds) == repr(one_by_one.records.kinds)
    rest = [f"{each.events} {each.begins} {each.metrics} {each.sites} {each.problems}" for each in (found, one_by_one)]
    assert rest[0] == rest[1]
