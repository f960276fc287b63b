"""Hashes and statistics on first need: equal to those computed up front, and reports that do not depend on which."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compare_runs import diff
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dumps import SglangDump

from tapscope.comparator.metrics import measure
from tapscope.comparator.pair_analysis import shape_class
from tapscope.comparator.pipeline import open_runs
from tapscope.comparator.runs.lazy_records import LazyHash, have_other_elements, lazy_records
from tapscope.core.errors import RunCorruptError
from tapscope.kernels.native import filled, summarize_array
from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.records import Records

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int64": np.int64, "complex64": np.complex64}


class Stored:
    """A run of arrays; ``with_tails``: whether their last bytes are at hand."""

    def __init__(self, arrays: list[Any], *, with_tails: bool = False) -> None:
        self.arrays, self.with_tails = arrays, with_tails
        self.payloads = self
        entries = [Entry("file", at, array.nbytes) for at, array in enumerate(arrays)]
        self.records = Records(
            Record(Key(f"s{at}:out", 0), at, arrays[at].dtype.name, arrays[at].shape, entry=entry)
            for at, entry in enumerate(entries)
        )

    def array(self, record: Record) -> Any:
        if self.arrays[record.seq] is None:
            raise RunCorruptError("gone")
        return self.arrays[record.seq]

    def tail(self, record: Record) -> bytes | None:
        return self.arrays[record.seq].tobytes()[-256:] if self.with_tails else None


def lazy(arrays: list[Any], **options: bool) -> Records:
    run = Stored(arrays, **options)
    return lazy_records(run, run.records)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lazy_hash_is_equal_exactly_where_bytes_are(data: st.DataObject) -> None:
    kind = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    shape = data.draw(st.sampled_from([(0,), (3,), (5, 7), (40, 30), (2, 3, 64)]))
    one = np.arange(int(np.prod(shape))).reshape(shape).astype(kind)
    two = one.copy()
    if one.size and data.draw(st.booleans()):
        two.reshape(-1)[data.draw(st.integers(0, one.size - 1))] += 100
    if data.draw(st.booleans()) and one.ndim > 1:
        one = np.ascontiguousarray(one.T).T  # the same values in another memory order
    left = lazy([one], with_tails=one.flags.c_contiguous and data.draw(st.booleans()))[0]
    right = lazy([two], with_tails=data.draw(st.booleans()))[0]
    expected = summarize_array(np.ascontiguousarray(one)), summarize_array(two)
    assert (left.hash == right.hash) == (expected[0].hash == expected[1].hash)
    if left.hash == right.hash:
        assert hash(left.hash) == hash(right.hash)
    assert left.hash == expected[0].hash
    assert (left.hash == expected[1].hash) == (expected[0].hash == expected[1].hash)
    assert (left.bag, left.stats) == (expected[0].bag, expected[0].stats)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_have_other_elements_never_contradicts_a_permutation(data: st.DataObject) -> None:
    kind = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    values = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=1, max_size=60))).astype(kind)
    order = np.array(data.draw(st.permutations(range(len(values)))))
    cut = data.draw(st.integers(0, len(values)))
    moved = values[order]
    assert not have_other_elements(lazy([values]), lazy([moved[:cut], moved[cut:]]))


def test_have_other_elements_of_rounded_values() -> None:
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    assert have_other_elements(lazy([values]), lazy([values * np.float32(1 + 1e-6)]))


def test_lazy_records_keep_hashes_through_selections() -> None:
    records = lazy([np.arange(900.0), np.arange(900.0), np.ones(3)])
    assert len({record.hash for record in records}) == 2
    chosen = records.take(np.array([1, 0]))
    assert isinstance(chosen[0].hash, LazyHash)
    assert chosen[1].hash is records[0].hash
    assert chosen.hashes_at([0]) == records.hashes_at([0])
    assert records[2]._replace(dims="t").hash == records[2].hash


def test_lazy_records_without_readable_bytes_have_no_hash() -> None:
    run = Stored([np.ones(3), np.ones(3)])
    records = lazy_records(run, run.records)  # type: ignore[arg-type]
    run.arrays[0] = None
    assert (records[0].hash, records[0].bag, records[0].stats) == (None, None, None)
    assert records[1].hash is not None


def write(folder: Path, seed: int, noise: float, dtype: torch.dtype) -> Path:
    dump = SglangDump(folder, tp=2)
    dump.step(input_ids=list(range(8)), positions=list(range(8)), seq_lens=[8], rids=["a"])
    torch.manual_seed(3)
    shards = [[torch.randn(8, 16) for _ in range(2)] for _ in range(12)]
    torch.manual_seed(seed)
    for number, pair in enumerate(shards):
        values = [(v + noise * v.abs() * torch.randn(8, 16)).to(dtype) for v in pair]
        if number % 4 == 1:
            values[1] = values[0].clone()
        dims = ("t h[tp]", "t h # tp:replicated", "t h[tp:partial]", None)[number % 4]
        if dims is None:
            values[1] = values[0].clone()
        if number == 8 and noise:
            values = [v.flip(0) for v in values]
        dump.dump(f"s{number}", dict(enumerate(values)), dims=dims)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.3])
def test_reports_are_those_of_hashes_computed_up_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, dtype: torch.dtype
) -> None:
    base, target = write(tmp_path / "a", 1, 0.0, torch.float32), write(tmp_path / "b", 2, noise, dtype)
    found = lines(base, target)
    monkeypatch.setattr(open_runs, "lazy_records", filled)
    monkeypatch.setattr(measure, "batched_pairs_of", lambda ready: None)
    assert lines(base, target) == found


def lines(base: Path, target: Path) -> list[Any]:
    return [json.dumps(line) for line in diff(base, target).to_json()]


def test_tiny_files_are_read_in_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = SimpleNamespace(classes=0)
    original = shape_class.shape_class_of

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.classes += 1
        return original(*arguments, **options)

    monkeypatch.setattr("tapscope.comparator.pair_analysis.pair_analyzer.shape_class_of", counted)
    for name in ("a", "b"):
        torch.manual_seed(1)
        dump = SglangDump(tmp_path / name)
        dump.step(input_ids=[1], positions=[0], seq_lens=[1], rids=["a"])
        for number in range(30):
            dump.dump(f"s{number}", torch.randn(1, 8) * (1.5 if (name, number) == ("b", 17) else 1.0), dims="t h")
    report = diff(tmp_path / "a", tmp_path / "b")
    (bad,) = [one.target.site for one in report.findings if one.target and one.verdict.is_bad]
    assert bad == ":tap[s17]"
    assert counts.classes < 8
