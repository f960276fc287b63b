"""Reading a pickle by template gives the same result as interpreting it, even for malicious pickles."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.errors import RunCorruptError
from tapscope.run_format.tensor_layout import Tensor, packed
from tapscope.sglang import torch_save_reader
from tapscope.sglang.pickle_template import PickleTemplates
from tapscope.sglang.safe_unpickler import PickleProblem, read

STORAGES = {"0": (640, 256), "5": (1280, 256)}


class _Stored:
    """An object pickled as a storage."""

    def __init__(self, key: str) -> None:
        self.key = key


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", None, obj.key, "cpu", 64) if isinstance(obj, _Stored) else None


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


def _persistent(identity: Any) -> Tensor:
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[2] in STORAGES):
        raise PickleProblem("references something that is not a storage")
    return packed("float32", (64,), STORAGES[str(identity[2])][0])


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return [(type(key), key, _typed(each)) for key, each in value.items()]
    return [type(value), *map(_typed, value)] if isinstance(value, list | tuple) else (type(value), value)


def _files(folder: Path, values: list[dict[str, Any]]) -> list[Path]:
    for number, value in enumerate(values):
        torch.save(value, folder / f"{number}.pt")
    return [folder / f"{number}.pt" for number in range(len(values))]


def test_template_reads_what_the_interpreter_reads(tmp_path: Path) -> None:
    values = [
        {
            "value": torch.randn(4, 1 + step % 2),
            "meta": {"name": f"s{step}" * (1 + step % 3), "step": step * 97, "deep": {"rank": step % 2, "dims": "t h"}},
        }
        for step in range(40)
    ]
    values += [{"value": torch.randn(4, 1), "meta": {"name": "é\udce9", "step": 1 << 40, "deep": {"rank": -1}}}]
    templates = PickleTemplates()
    for path in _files(tmp_path, values):
        found = torch_save_reader.load(path, templates)
        assert _typed(found) == _typed(torch_save_reader.load(path))
        assert type(found["meta"]["name"]) is str


def test_template_keeps_apart_files_with_other_storages(tmp_path: Path) -> None:
    templates = PickleTemplates()
    first = {"value": torch.arange(8.0)[2:6], "meta": {"name": "a"}}
    for path in _files(tmp_path, [first, {**first, "value": torch.arange(9.0)[2:6]}, first]):
        assert torch_save_reader.load(path, templates) == torch_save_reader.load(path)


@pytest.mark.parametrize("tag", ["0", "5"])
def test_template_never_takes_the_key_of_a_storage_for_a_value(tag: str) -> None:
    """If one string object is both the key of the storage and a value, neither may vary."""
    pickles = [_pickled({"value": _Stored(key), "tag": key, "name": "x"}) for key in ("0", tag)]
    templates = PickleTemplates()
    for data in (*pickles, *pickles):
        assert templates.read(data, {}, _persistent, STORAGES.__getitem__) == read(data, {}, _persistent)


_PICKLE = _pickled({"value": _Stored("0"), "meta": {"name": "layer", "step": 3, "loss": 0.5, "ok": True}})


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_template_agrees_with_the_interpreter_on_damaged_pickles(seed: int, flips: int) -> None:
    """For any changed bytes, both readers return equal results or both raise."""
    rng = random.Random(seed)
    base = bytearray(_PICKLE)
    for _ in range(flips):
        base[rng.randrange(len(base))] = rng.randrange(256)
    templates = PickleTemplates()
    templates.read(_PICKLE, {}, _persistent, STORAGES.__getitem__)
    results = []
    for call in (
        lambda: read(bytes(base), {}, _persistent),
        lambda: templates.read(bytes(base), {}, _persistent, STORAGES.__getitem__),
    ):
        try:
            results.append(_typed(call()))
        except PickleProblem:
            results.append("refused")
    assert results[0] == results[1] or repr(results[0]) == repr(results[1])  # NaN is not equal to itself


def test_template_is_not_made_of_a_pickle_with_a_foreign_global(tmp_path: Path) -> None:
    torch.save({"value": torch.ones(2), "meta": {"path": Path("x")}}, tmp_path / "evil.pt")
    templates = PickleTemplates()
    for _ in range(2):
        with pytest.raises(RunCorruptError, match="nothing was executed"):
            torch_save_reader.load(tmp_path / "evil.pt", templates)


def test_template_keeps_a_string_that_is_a_value_and_a_key() -> None:
    """``{"a": 1, B: 2, "c": B}`` by memo: with B="a" the key B replaces "a", with another B it does not."""

    def crafted(b: bytes) -> bytes:
        return b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00" + b + b"q\x00K\x02X\x01\x00\x00\x00ch\x00u."

    templates = PickleTemplates()
    for text in (b"a", b"z", b"y"):
        found = templates.read(crafted(text), {}, _persistent, STORAGES.__getitem__)
        assert _typed(found) == _typed(read(crafted(text), {}, _persistent))


def test_template_gives_plain_integers_in_shapes(tmp_path: Path) -> None:
    files = _files(tmp_path, [{"value": torch.ones(2, 3), "meta": {"step": step}} for step in range(3)])
    templates = PickleTemplates()
    for file in files:
        value = torch_save_reader.load(file, templates)["value"]
        assert {type(number) for number in (*value.shape, *value.strides)} == {int}
