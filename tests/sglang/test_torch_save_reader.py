"""torch.save files are read without torch, bit for bit; anything else is a one-sentence error, and no code is
executed."""

import collections
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapscope.core.dtypes import NAMES
from tapscope.core.errors import RunCorruptError
from tapscope.run_format import tensor_layout
from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang import safe_unpickler, torch_save_reader
from tapscope.sglang.safe_unpickler import PickleProblem

QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def _saved(path: Path, value: Any, **kwargs: Any) -> Any:
    torch.save(value, path, **kwargs)
    return torch_save_reader.load(path)


def _bytes(path: Path, found: Tensor) -> bytes:
    array = tensor_layout.view(np.memmap(path, mode="r"), found)
    assert array.shape == found.shape
    assert not array.flags.writeable or not array.size
    return np.ascontiguousarray(array).tobytes()


def _expected(value: torch.Tensor) -> bytes:
    packed = value.detach().clone(memory_format=torch.contiguous_format)
    return packed.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_torch_save_reader_round_trips_every_dtype_and_view(tmp_path: Path, name: str) -> None:
    whole = (torch.arange(120).reshape(4, 5, 6) % 7).to(torch.float32).to(getattr(torch, name))
    views = {
        "whole": whole,
        "transposed": whole.transpose(0, 2),
        "columns": whole[:, :, 1:4],
        "every other": whole[::2, ::3],
        "scalar": whole[1, 2, 3],
        "empty": whole[:0],
        "expanded": whole[:, :1].expand(4, 5, 6),
        "offset": whole[2],
    }
    for view in views.values():
        found = _saved(tmp_path / "t.pt", view)
        assert (found.dtype, found.shape) == (name, tuple(view.shape))
        assert _bytes(tmp_path / "t.pt", found) == _expected(view)


@QUICK
@given(st.data())
def test_torch_save_reader_round_trips_random_strided_views(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = torch.randn(shape)
    view = whole.permute(data.draw(st.permutations(range(len(shape)))))
    for axis, size in enumerate(view.shape):
        start = data.draw(st.integers(0, size))
        view = view[(slice(None),) * axis + (slice(start, size, data.draw(st.integers(1, 3))),)]
    found = _saved(tmp_path / "t.pt", {"value": view})["value"]
    assert _bytes(tmp_path / "t.pt", found) == _expected(view)


def test_torch_save_reader_reads_containers_and_shared_storages(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.sequence_parallel = True  # a parameter with attributes is saved in another form
    tagged = torch.zeros(2)
    tagged.note = "x"
    value = {
        "shared": [base[:4], base[4:]],
        "plain": (1, -(2**70), 2.5, float("inf"), None, True, "tëxt", b"bytes"),
        "dict": collections.OrderedDict([("a", 1), ("b", [2])]),
        "set": {1, 2},
        "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
        "subclasses": (parameter, tagged),
        3: "whole-number key",
    }
    path = tmp_path / "t.pt"
    for protocol in (2, 3, 4, 5):
        found = _saved(path, value, pickle_protocol=protocol)
        assert found["plain"] == value["plain"]
        assert found["dict"] == {"a": 1, "b": [2]}
        assert found["set"] == {1, 2}
        assert found["torch"] == ((2, 3), "bfloat16", "cpu")
        assert found[3] == "whole-number key"
        assert [_bytes(path, t) for t in found["shared"]] == [_expected(base[:4]), _expected(base[4:])]
        assert found["shared"][1].offset - found["shared"][0].offset == 16
        assert [_bytes(path, t) for t in found["subclasses"]] == [_expected(parameter), _expected(tagged)]


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def _with_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


@pytest.mark.parametrize("protocol", [2, 5])
def test_torch_save_reader_refuses_a_pickle_bomb_without_executing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"value": _Bomb(), "meta": {}}, tmp_path / "bomb.pt", pickle_protocol=protocol)
    with pytest.raises(RunCorruptError, match=r"bomb\.pt: it asks for posix\.system, which is not a tensor") as caught:
        torch_save_reader.load(tmp_path / "bomb.pt")
    assert "\n" not in str(caught.value)
    assert os.listdir() == ["bomb.pt"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", "asks for os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "asks for builtins.eval"),
        (b"(S'true'\nios\nsystem\n.", "opcode"),  # INST, of protocol 0
        (b"\x82\x01.", "opcode"),  # EXT1: the registry of extensions
        (b"K\x01K\x02\x85R.", "calls an unknown constructor"),
        (b"ccollections\nOrderedDict\n]K\x01a\x85R.", "ordered dict of what is not a list of pairs"),
        (b")}b.", "sets the state"),
        (
            b"}" + b")\x85" * 100_000 + b"K\x01s.",
            "a key that is not a string, None or an integer below 2^31",
        ),  # would overflow the C stack
        (b"\x8b\xff\xff\xff\x7f.", "an integer of 2,147,483,647 bytes"),
        (b"r\xff\xff\xff\x7f.", "damaged at byte"),  # would allocate a memo of 34 GB in C
        (b"\x8d" + b"\xff" * 7 + b"\x7f.", "damaged at byte"),
        (b"]" * 10 + b"e.", "damaged at byte"),
        (b"", "damaged at byte"),
        (b"X\x03\x00\x00\x00abcQ.", "references something that is not a storage"),
    ],
)
def test_torch_save_reader_refuses_hostile_pickles_in_bounded_time(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(RunCorruptError, match=re.escape(words)):
        torch_save_reader.load(_with_pickle(tmp_path / "x.pt", data))


def test_torch_save_reader_refuses_tensors_outside_their_storage(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(torch.zeros(4, 6), path)
    pickled = zipfile.ZipFile(path).read("t/data.pkl")
    assert b"K\x04K\x06\x86" in pickled
    for shape, words in (
        (b"K\x05K\x06\x86", "a storage of 96 bytes"),
        (b"K\x04J\xff\xff\xff\xff\x86", "invalid shape"),
    ):
        _rewrite(path, pickled.replace(b"K\x04K\x06\x86", shape))
        with pytest.raises(RunCorruptError, match=words):
            torch_save_reader.load(path)
    torch.save(torch.zeros(1).expand(2**40), path)
    with pytest.raises(RunCorruptError, match="spreads 4 bytes over a tensor of shape"):
        torch_save_reader.load(path)
    torch.save(torch.zeros(3, dtype=torch.complex64).conj(), path)
    with pytest.raises(RunCorruptError, match="conjugate or negative was never computed"):
        torch_save_reader.load(path)


def _rewrite(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, pickled if name.endswith("data.pkl") else content)


def test_torch_save_reader_names_other_file_types(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)
    with pytest.raises(RunCorruptError, match=r"t\.pt: saved in the form that torch wrote before 1\.6"):
        torch_save_reader.load(path)
    for content, words in ((b"", "empty: its writer"), (b"hello", "not a torch.save file")):
        path.write_bytes(content)
        with pytest.raises(RunCorruptError, match=words):
            torch_save_reader.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(RunCorruptError, match=r"holds no data\.pkl"):
        torch_save_reader.load(path)
    with pytest.raises(RunCorruptError, match="cannot be read"):
        torch_save_reader.load(tmp_path / "none.pt")
    torch.save(torch.ones(3), path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            new.writestr(name, content * (1 if "pkl" in name else 100))
    with pytest.raises(RunCorruptError, match="compressed archive"):
        torch_save_reader.load(path)


def test_torch_save_reader_truncated_and_flipped_files_are_one_sentence(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.pt", tmp_path / "x.pt"
    torch.save({"value": torch.arange(6.0).reshape(2, 3), "meta": {"step": 0, "names": ["a", "b"]}}, whole)
    data = whole.read_bytes()
    for end in range(0, len(data), 13):
        path.write_bytes(data[:end])
        with pytest.raises(RunCorruptError):
            torch_save_reader.load(path)
    rng = np.random.default_rng(3)
    for _ in range(400):
        changed = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            changed[place] = rng.integers(256)
        path.write_bytes(changed)
        found, sentence = None, ""
        try:
            found = torch_save_reader.load(path)
        except RunCorruptError as error:
            sentence = str(error)
        assert "\n" not in sentence
        value = found.get("value") if isinstance(found, dict) else None
        if isinstance(value, Tensor):
            _bytes(path, value)


@QUICK
@given(st.binary(max_size=60))
def test_torch_save_reader_random_pickles_end_in_a_value_or_one_sentence(data: bytes) -> None:
    sentence = ""
    try:
        safe_unpickler.read(data, {}, lambda identity: identity)
    except PickleProblem as problem:
        sentence = str(problem)
    assert "\n" not in sentence


_whole = st.integers(-(2**100), 2**100)  # fits into 16 bytes: longer integers are rejected
_key = st.integers(1 - 2**31, 2**31 - 1)  # larger integers could collide in their hash
_plain = st.recursive(
    st.none() | st.booleans() | _whole | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | _key, inner),
    max_leaves=20,
)


@QUICK
@given(_plain, st.sampled_from([3, 4, 5]))
def test_torch_save_reader_round_trips_plain_values(value: Any, protocol: int) -> None:
    assert safe_unpickler.read(pickle.dumps(value, protocol), {}, lambda identity: identity) == value


def test_torch_save_reader_refuses_a_long_pickle_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_unpickler, "MAX_BYTES", 10)
    with pytest.raises(PickleProblem, match="at most 10 are read"):
        safe_unpickler.read(struct.pack("11x"), {}, lambda identity: identity)
