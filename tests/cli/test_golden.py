"""`tapscope golden`: a changed layer is named; different chunking, sharding and dtypes pass."""

import json
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tapscope.cli import main
from tapscope.core.errors import RunCorruptError
from tapscope.dashboard.browse_source import RunSource
from tapscope.dumper import Dumper, DumperConfig, make_observer
from tapscope.engine import LLM
from tapscope.kernels.native.sketch import sketch_of
from tapscope.run_format import golden as golden_module
from tapscope.run_format.golden import is_golden
from tapscope.run_format.record import Record, Slice
from tapscope.run_format.repair import repair_run
from tapscope.sources import open_run, require_run
from tapscope.testing import assert_matches_golden

PROMPTS = [list(range(1, 40)), [3, 4, 5], list(range(7, 30))]


def dump(model: Path, out: Path, keep: Any = "sketch", **settings: Any) -> Path:
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep=keep))
    with LLM(str(model), observer=observer, prefix_cache=False, logits="all", **settings) as llm:
        llm.generate(PROMPTS, max_new_tokens=2, request_ids=["a", "b", "c"])
    return out


@pytest.fixture(scope="module")
def sketched(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(llama, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def golden(sketched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("goldens") / "model.golden"
    assert main(["golden", "record", str(sketched), "-o", str(path), "-q"]) == 0
    assert path.stat().st_size < 200_000
    return path


def test_sketched_run_is_stored_without_values_and_verifies(sketched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(sketched) as run:
        tensors = [record for record in run.records if record.dtype is not None]
        assert tensors
        assert all(isinstance(record, Record) and record.entry is None for record in tensors)
        assert all(record.sketch is not None and len(run.sketch(record)) == 256 for record in tensors)
    assert main(["verify", str(sketched)]) == 0
    out = capsys.readouterr().out
    assert f"payloads   {len(tensors):,} sketches match their recorded CRC-32\n" in out
    assert f" 0 with values, {len(tensors):,} with sketches (" in out
    assert main(["info", str(sketched)]) == 0
    out = capsys.readouterr().out
    assert f"{len(tensors):,} with sketches (" in out
    assert "statistics only" not in out
    with open_run(sketched) as run:
        assert "statistics only" not in str(RunSource(run).header)
    assert not any(repair.needed for repair in repair_run(sketched, check=True))


def test_verify_reports_a_damaged_sketch(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(llama, tmp_path / "run")
    with open_run(path) as run:
        record = next(record for record in run.records if record.sketch is not None)
    assert record.sketch is not None
    with (path / "rank-00000" / record.sketch.entry.file).open("r+b") as file:
        file.seek(record.sketch.entry.offset)
        file.write(b"\x01\x02\x03")
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "its sketch has crc32" in out
    assert "payloads   1 of " in out
    assert "1 of 0 payloads" not in out


def test_golden_of_values_equals_that_of_sketches(llama: Path, golden: Path, tmp_path: Path) -> None:
    full = dump(llama, tmp_path / "full", keep="full")
    assert main(["golden", "record", str(full), "-o", str(tmp_path / "g"), "-q"]) == 0
    assert (tmp_path / "g").read_bytes() == golden.read_bytes()
    assert main(["golden", "check", str(golden), str(full)]) == 0


def test_golden_opens_wherever_a_run_does(golden: Path) -> None:
    require_run(golden)  # view and the comparison screen check this before opening a run


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 16}, {"tp": 2}, {"dtype": "bfloat16"}])
def test_golden_check_passes_under_chunking_sharding_and_rounding(
    llama: Path, golden: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert main(["golden", "check", str(golden), str(dump(llama, tmp_path / "run", **settings))]) == 0


def test_golden_check_names_the_changed_layer(
    llama: Path, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "changed"
    model.mkdir()
    for path in llama.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    layer = max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    weights[name] = torch.where(torch.arange(len(weights[name]))[:, None] % 3 == 0, weights[name] * 1.3, weights[name])
    save_file(weights, model / "model.safetensors")
    changed = dump(model, tmp_path / "run")
    assert main(["golden", "check", str(golden), str(changed)]) == 1
    said = capsys.readouterr().out
    assert f"model.layers.{layer} (out" in said
    assert "estimated from sketches" in said
    with pytest.raises(AssertionError, match=rf"model\.layers\.{layer} "):
        assert_matches_golden(golden, changed)
    assert_matches_golden(golden, dump(llama, tmp_path / "same"))


def with_metadata(data: bytes, **changed: Any) -> bytes:
    """Return the golden file with changed metadata and a recomputed header checksum."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= {"crc32": "00000000"} | changed
    text = json.dumps(header, separators=(",", ":")).encode()
    text = struct.pack("<Q", len(text)) + text
    return text.replace(b'"00000000"', b'"%08x"' % zlib.crc32(text), 1) + data[8 + size :]


def test_golden_refuses_bad_files(
    golden: Path, sketched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = golden.read_bytes()
    (tmp_path / "cut").write_bytes(data[:3000])
    (tmp_path / "cut in the header").write_bytes(data[:200])
    (tmp_path / "other").write_text("{}")
    (tmp_path / "newer").write_bytes(with_metadata(data, schema="3"))
    for name, reason in (
        ("cut", "damaged golden file"),
        ("cut in the header", "truncated golden file: it ends in its header, at byte 192 of "),
        ("other", "is not a golden file"),
        ("newer", "has golden schema 3; this tapscope reads up to 2"),
        ("missing", "no golden file at"),
    ):
        assert main(["golden", "check", str(tmp_path / name), str(sketched)]) == 3
        assert reason in capsys.readouterr().err
    with pytest.raises(RunCorruptError, match="is not a golden file"):
        assert_matches_golden(tmp_path / "other", sketched)
    assert main(["golden", "record", str(sketched), "-o", str(golden)]) == 2
    assert main(["golden", "record", str(sketched)]) == 2


def test_golden_with_a_changed_counter_is_damaged(
    golden: Path, sketched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(golden.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + size])["sketches"]["data_offsets"]
    data[8 + size + (begin + end) // 2] ^= 1
    (tmp_path / "changed").write_bytes(data)
    for words in (["golden", "check"], ["diff"]):  # both would otherwise compare recorded hashes
        assert main([*words, str(tmp_path / "changed"), str(sketched)]) == 3
        assert "changed: damaged golden file: the sketch of " in capsys.readouterr().err
    with pytest.raises(RunCorruptError, match="differs from its CRC-32"):
        assert_matches_golden(tmp_path / "changed", sketched)


def test_golden_with_any_changed_byte_in_its_header_is_damaged(golden: Path, tmp_path: Path) -> None:
    data = golden.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    path = tmp_path / "changed"
    for at in range(8 + size):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[at] ^= bit
            path.write_bytes(changed)
            with pytest.raises(RunCorruptError, match="changed: (damaged|truncated) golden file: .*; record it again"):
                open_run(path)


def test_golden_of_schema_1_reads(tmp_path: Path) -> None:
    """The header of schema 1 has no checksum."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    for name, scale in (("same", 1.0), ("other", 1.5)):
        model[0].weight.data.mul_(scale)
        with torch.no_grad(), Dumper(model, tmp_path / name, keep="sketch") as dumper, dumper.step():
            model(torch.ones(2, 4))
    golden = Path(__file__).parent / "golden" / "schema_1.golden"
    assert main(["golden", "check", str(golden), str(tmp_path / "same")]) == 0
    assert main(["golden", "check", str(golden), str(tmp_path / "other")]) == 1


def test_golden_without_the_checksum_of_its_header_is_damaged(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "changed").write_bytes(golden.read_bytes().replace(b'"crc32":', b'"other":', 1))
    with pytest.raises(RunCorruptError, match="damaged golden file: its header has no CRC-32"):
        open_run(tmp_path / "changed")


def test_golden_usage_errors_are_one_sentence(
    golden: Path, sketched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ["golden", "record", str(sketched), "-o"]
    for words, code, reason in (
        ([*record, str(tmp_path / "none" / "file")], 3, "cannot write"),
        ([*record, str(tmp_path / "file"), "--steps", "0"], 2, "--steps applies to golden check"),
        ([*record, str(tmp_path / "file"), "--json"], 2, "--json applies to golden check"),
        (["golden", "check", str(sketched), str(golden)], 2, f"comes first: tapscope golden check {golden}"),
    ):
        assert main(words) == code
        said = capsys.readouterr().err
        assert reason in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("{}", "is not the manifest of a tapscope run"),
        ('{"format":"tapscope-run","version":"3"}', "invalid format version"),
        ('{"format":"tapscope-run","version":99}', "upgrade tapscope"),
        ('{"format":"tapscope-run","version":3,"world_size":"two"}', "world_size is"),
        ("[" * 100_000, "damaged golden file"),
        (7, "damaged golden file"),
    ],
)
def test_golden_with_a_bad_manifest_is_one_clear_error(
    golden: Path, sketched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: Any, reason: str
) -> None:
    (tmp_path / "bad").write_bytes(with_metadata(golden.read_bytes(), manifest=manifest))
    assert main(["golden", "check", str(tmp_path / "bad"), str(sketched)]) == 3
    err = capsys.readouterr().err
    assert reason in err
    assert "Traceback" not in err


def test_golden_header_nested_too_deeply_is_no_golden(tmp_path: Path) -> None:
    (tmp_path / "deep").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    assert not is_golden(tmp_path / "deep")


def test_golden_leaves_out_complex_values_and_parts_of_unknown_rows(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full") as dumper, dumper.step():
        dumper.dump("layers.0", torch.ones(3, dtype=torch.complex64))
        model(torch.ones(2, 4))
    assert main(["golden", "record", str(tmp_path / "run"), "-o", str(tmp_path / "g"), "--site", "*"]) == 0
    with open_run(tmp_path / "run") as run:
        record = next(record for record in run.records if record.key.site == "0:out")
        part = record._replace(slice=Slice((0, 2, 1), (5, 4)), rows=None)
        assert golden_module._sketch_of(run, record, {}, sketch_of) is not None
        assert golden_module._sketch_of(run, part, {}, sketch_of) is None
