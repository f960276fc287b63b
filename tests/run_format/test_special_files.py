"""Files that are no regular files, or are made to cost time and memory: one sentence, soon, and nothing is followed."""

import json
import os
import pickle
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import RunFactory
from memory_limit import GIB, Limited
from sglang_dumps import SglangDump

from tapscope import Dumper
from tapscope.core import json_values
from tapscope.core.errors import ConfigError, RunCorruptError, RunExistsError
from tapscope.core.regular_files import open_regular, read_small
from tapscope.run_format import index
from tapscope.run_format.compact import compact_run
from tapscope.run_format.writer import RankWriter
from tapscope.sglang import safe_unpickler, torch_save_reader
from tapscope.sglang.safe_unpickler import PickleProblem
from tapscope.sglang.zip_archive import Archive
from tapscope.sources import open_run

VERBS = ("info", "ls", "show", "verify", "repair", "compact", "diff")


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    with Limited(memory=3 * GIB) as runner:
        yield runner


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run"
    with RunFactory(path, mesh={"tp": 2}) as made:
        made.site("layers.0:out")
        for _ in range(2):
            made.step()
            made.put("layers.0:out", {rank: np.arange(64, dtype=np.float32) for rank in (0, 1)})
    return path


def words_of(verb: str, path: Path, original: Path) -> list[str]:
    more = {"diff": [str(original)], "show": ["layers.0:out"]}
    return [verb, str(path), *more.get(verb, [])]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its path may have 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": _fifo,
    "socket": _socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "itself": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("none"),
    "directory": lambda path: path.mkdir(),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 36),
}


def is_sentence(text: str) -> bool:
    return bool(text.strip()) and "Traceback" not in text


@pytest.mark.parametrize("part", ["run.json", "rank-00001/records.jsonl", "rank-00001/seg-000000.safetensors"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_in_a_run_is_one_sentence_of_every_verb(
    limited: Limited, original: Path, tmp_path: Path, part: str, kind: str
) -> None:
    for verb in VERBS:
        path = tmp_path / verb
        shutil.copytree(original, path)
        (path / part).unlink()
        SPECIAL[kind](path / part)
        end = limited.run(*words_of(verb, path, original))
        assert not end.wrong, end
        if verb == "verify" or (verb in ("info", "diff") and not (kind == "sparse" and "seg-" in part)):
            assert end.code != 0, end
            assert is_sentence(end.out + end.err)


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_table_of_a_compacted_run_is_one_sentence(
    limited: Limited, original: Path, tmp_path: Path, kind: str
) -> None:
    path = shutil.copytree(original, tmp_path / "run")
    compact_run(path)
    table = path / "rank-00001/records.parquet"
    table.unlink()
    SPECIAL[kind](table)
    for verb in ("info", "ls", "verify", "diff"):
        end = limited.run(*words_of(verb, path, original))
        assert not end.wrong, end
        assert is_sentence(end.out + end.err)
        assert verb != "verify" or end.code != 0, end


@pytest.mark.parametrize("part", [".lock", "recorder.json"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "itself", "directory"])
def test_special_recorder_files_are_not_waited_for(
    limited: Limited, original: Path, tmp_path: Path, part: str, kind: str
) -> None:
    for verb in VERBS:
        path = tmp_path / verb
        shutil.copytree(original, path)
        (path / part).unlink(missing_ok=True)
        SPECIAL[kind](path / part)
        end = limited.run(*words_of(verb, path, original))
        assert not end.wrong, end


@pytest.fixture
def dump(tmp_path: Path) -> SglangDump:
    made = SglangDump(tmp_path / "dump")
    made.step(input_ids=[5, 6])
    made.dump("t", torch.arange(64.0))
    made.dump("u", torch.arange(6.0))
    return made


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_in_a_dump_is_skipped_and_reported(
    limited: Limited, dump: SglangDump, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(dump.folder, tmp_path / "whole")
    (file,) = dump.folder.glob("*name=t*")
    file.unlink()
    SPECIAL[kind](file)
    for words in (["info"], ["ls"], ["verify"], ["diff", str(tmp_path / "whole")]):
        end = limited.run(words[0], dump.folder, *words[1:])
        assert not end.wrong, end
        assert end.code != 0 or words == ["ls"], end
    end = limited.run("verify", dump.folder)
    assert str(file) in end.out or "dump_index 2" in end.out, end


def test_symlink_is_read_but_never_written_through(original: Path, tmp_path: Path, limited: Limited) -> None:
    path, theirs = tmp_path / "run", tmp_path / "theirs"
    shutil.copytree(original, path)
    lines = path / "rank-00000/records.jsonl"
    lines.rename(theirs)
    theirs.write_bytes(theirs.read_bytes() + b"{torn")
    before = theirs.read_bytes()
    lines.symlink_to(theirs)
    with open_run(path) as run:
        assert len(run.records) == 4
    end = limited.run("repair", path)
    assert (end.code, "symbolic link" in end.err) == (3, True), end
    assert theirs.read_bytes() == before


def test_open_regular_refuses_special_and_large_files(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12345")
    assert read_small(tmp_path / "small", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, at most 4 are read"):
        read_small(tmp_path / "small", 4)
    for kind, words in (("pipe", "a named pipe"), ("endless", "a character device"), ("directory", "a directory")):
        SPECIAL[kind](tmp_path / kind)
        with pytest.raises(OSError, match=f"it is {words}, not a regular file"):
            open_regular(tmp_path / kind)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        (tmp_path / "socket").unlink(missing_ok=True)
        _socket(tmp_path / "socket")
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(tmp_path / "socket", flags)


def test_run_reports_huge_lines_and_manifests(
    original: Path, tmp_path: Path, limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    shutil.copytree(original, path)
    lines = path / "rank-00000/records.jsonl"
    whole = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join([*whole[:2], b"[" + b"[]," * (20 << 20) + b"[]]\n", *whole[2:]]))
    end = limited.run("info", path)
    assert not end.wrong, end
    assert "longer than 16 MiB" in end.out
    monkeypatch.setattr(index, "_MAX_SKIPPED", index.MAX_LINE_BYTES)
    with open_run(path) as run:
        assert any("the following lines were left out" in said for said in run.problems)
        assert len(run.records) < 4
    monkeypatch.undo()
    with open_run(path) as run:
        assert len(run.records) == 4
    os.truncate(path / "run.json", 1 << 36)
    end = limited.run("info", path)
    assert (end.wrong, end.code) == ("", 3), end
    assert "at most 16,777,216 are read" in end.err


def _pickled(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
    return path


_MODULUS = (1 << 61) - 1
BOMBS = {
    "opcodes of one byte": (b"]" * 5_000_000 + b".", "more than 4,000,000 operations"),
    "sets": (b"\x8f" * 3_000_000 + b".", "more than 4,000,000 operations"),
    "colliding keys": (
        b"}(" + b"".join(b"\x8a\x08" + struct.pack("<q", (n + 1) * _MODULUS // 4 * 4) + b"N" for n in range(3)) + b"u.",
        "a key that is not a string, None or an integer below 2^31",
    ),
    "float keys": (
        b"}" + b"G" + struct.pack(">d", 2.0**70) + b"Ns.",
        "a key that is not a string, None or an integer below 2^31",
    ),
    "a text that is encoded again and again": (
        b"](X" + struct.pack("<I", 1 << 22) + b"x" * (1 << 22) + b"q\x00X\x06\x00\x00\x00latin1q\x01"
        b"c_codecs\nencode\nq\x02" + b"h\x02h\x00h\x01\x86R" * 100_000 + b"e.",
        "more than 4,000,000 operations",
    ),
    "a list that is a size again and again": (
        b"](](" + b"K\x01" * 100_000 + b"eq\x00ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 100_000 + b"e.",
        "more than 4,000,000 operations",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs_are_refused_in_bounded_time_and_memory(tmp_path: Path, limited: Limited, bomb: str) -> None:
    data, words = BOMBS[bomb]
    (tmp_path / "dump").mkdir()
    _pickled(tmp_path / "dump/step=0___rank=0___dump_index=1___name=a.pt", data)
    end = limited.run("info", tmp_path / "dump")
    assert (end.wrong, end.code) == ("", 3), end
    assert words in end.err
    assert end.cpu < 15
    assert end.rss < GIB // 2 + GIB // 8, end


@pytest.mark.soak
def test_pickle_with_a_million_references_is_refused(tmp_path: Path, limited: Limited) -> None:
    laughs: list[object] = [None]
    for _ in range(12):
        laughs = [laughs] * 1000
    texts = [["x" * 5000] * 4096] * 9000
    doubled: list[object] = []
    for _ in range(40):
        doubled = [doubled, doubled]
    (tmp_path / "dump").mkdir()
    values = {"laughs": laughs, "texts": texts, "input_ids": doubled}
    for n, (name, value) in enumerate(values.items(), 1):
        file = tmp_path / f"dump/step=0___rank=0___dump_index={n}___name={name}.pt"
        _pickled(file, pickle.dumps({"value": value, "meta": {"name": doubled, "layer_id": doubled}}, 4))
    end = limited.run("info", tmp_path / "dump")
    assert (end.wrong, end.code) == ("", 3), end
    assert "elements" in end.err
    with pytest.raises(ValueError, match="plain values take more than"):
        json_values.leaves(texts)


def test_pickle_refuses_compressed_members_and_expanded_values(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(RunCorruptError, match="compressed archive, which torch.save does not write"):
        torch_save_reader.load(_pickled(path, b"\x80\x02N.", zipfile.ZIP_DEFLATED))
    torch.save(torch.zeros(1).expand(1 << 24), path)  # 64 MiB
    assert torch_save_reader.load(path).nbytes == 1 << 26
    torch.save([torch.zeros(1).expand(1 << 24) for _ in range(3)], path)
    with pytest.raises(RunCorruptError, match="spreads 4 bytes over a tensor of shape"):
        torch_save_reader.load(path)


def test_verify_checks_archive_checksums(dump: SglangDump, limited: Limited) -> None:
    end = limited.run("verify", dump.folder)
    assert end.code == 0, end
    assert "3 payloads match the CRC-32 of their file" in end.out
    (file,) = dump.folder.glob("*name=t*")
    data = bytearray(file.read_bytes())
    place = data.index(np.arange(64, dtype=np.float32).tobytes())
    for at in (place, place + 255):
        file.write_bytes(bytes(data[:at]) + bytes([data[at] ^ 16]) + bytes(data[at + 1 :]))
        end = limited.run("verify", dump.folder)
        assert end.code == 1, end
        assert "does not" in end.out or "do not have the CRC-32" in end.out
        assert "complete   NO" in end.out


def test_verify_reports_files_without_checksums(dump: SglangDump, limited: Limited) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dump.dump("v", torch.ones(3))
    finally:
        torch.serialization.set_crc32_options(True)
    (file,) = dump.folder.glob("*name=v*")
    with file.open("rb") as opened:
        assert not Archive(opened.fileno()).has_checksums
    end = limited.run("verify", dump.folder)
    assert end.code == 0, end
    assert "1 payloads could be read; they have no recorded hash" in end.out


def test_dump_names_removed_files(dump: SglangDump, tmp_path: Path) -> None:
    for n in range(12):
        dump.dump(f"more{n}", torch.ones(2))
    for n in (2, 5, 6, 7, 11):
        next(dump.folder.glob(f"*dump_index={n}__*")).unlink()
    with open_run(dump.folder) as run:
        account = run.ledger()
        assert not account.complete
        assert any("lacks the files of dump_index 2, 5-7, 11" in said for said in account.sentences())


def test_dump_reports_a_missing_first_file_of_a_rank(tmp_path: Path) -> None:
    made = SglangDump(tmp_path / "dump", tp=2)
    made.step(input_ids=[5, 6])
    made.dump("t", torch.ones(3))
    next(made.folder.glob("*rank=1___dump_index=1__*")).unlink()
    with open_run(made.folder) as run:
        assert any("rank 1" in said and "dump_index 1" in said for said in run.problems)


def test_pickle_memory_is_bounded_by_operations() -> None:
    with pytest.raises(PickleProblem, match="operations"):
        safe_unpickler.read(b"}" * (safe_unpickler.MAX_OPERATIONS + 1), {}, lambda identity: identity)


@pytest.mark.parametrize("name", ["recorder.log", ".lock"])
def test_dumper_does_not_write_through_symlinks(tmp_path: Path, name: str) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.write_text("precious")
    out.mkdir()
    (out / name).symlink_to(theirs)
    with pytest.raises((ConfigError, RunExistsError), match="symbolic link"):
        Dumper(torch.nn.Linear(2, 2), out).open()
    assert theirs.read_text() == "precious"
    theirs.unlink()
    with pytest.raises((ConfigError, RunExistsError), match="symbolic link"):
        Dumper(torch.nn.Linear(2, 2), out).open()
    assert not theirs.exists()


def test_writer_does_not_write_through_symlinks(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank-00000").symlink_to(theirs)
    with pytest.raises(RunExistsError, match="symbolic link"):
        RankWriter(tmp_path / "run", 0)
    (tmp_path / "run/rank-00001").mkdir()
    (tmp_path / "run/rank-00001/records.jsonl").symlink_to(theirs / "lines")
    with pytest.raises(OSError, match="symbolic"):
        RankWriter(tmp_path / "run", 1)
    assert not any(theirs.iterdir())


def test_run_reports_a_modified_table(original: Path, tmp_path: Path, limited: Limited) -> None:
    path = tmp_path / "run"
    shutil.copytree(original, path)
    assert limited.run("compact", path).code == 0
    table = path / "rank-00000/records.parquet"
    data = bytearray(table.read_bytes())
    (line,) = [json.loads(x) for x in (path / "rank-00000/records.jsonl").read_bytes().splitlines() if b"crc32" in x]
    assert line["file"] == "records.parquet"
    at = data.index(b"layers.0:out")
    table.write_bytes(bytes(data[:at]) + b"L" + bytes(data[at + 1 :]))
    end = limited.run("verify", path)
    assert end.code == 1, end
    assert "records may be wrong" in end.out
