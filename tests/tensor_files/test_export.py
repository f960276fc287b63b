"""`tapscope export` on the command line; exported files are read back by their own tools and by tapscope."""

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import Cli
from factories import RunFactory
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tapscope.core.observe import RowSpan
from tapscope.sglang import torch_save_reader
from tapscope.sources import open_run
from tapscope.tensor_files import export, torch_save_writer
from tapscope.tensor_files.site_names import name_of_site, site_of_tensor

RNG = np.random.default_rng(0)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Write two ranks and two steps: sharded and replicated tensors of several dtypes, gradients, inputs and plain
    values."""
    path = tmp_path / "run"
    with RunFactory(path, mesh={"tp": 2}) as made:
        for step in range(2):
            rows = [RowSpan("a", 3 * step, 3, 0, 0), RowSpan("b", 2 * step, 2, 0, 3)]
            made.step(rows=rows, token_ids=[*range(5)], grid=(5,))
            whole = RNG.standard_normal((5, 8)).astype(np.float32)
            made.put("model.layers.0.mlp:out", {0: whole[:, :4], 1: whole[:, 4:]}, dims="t h[tp]")
            same = RNG.standard_normal((5, 4)).astype(ml_dtypes.bfloat16)
            made.put("model.layers.1:in[hidden_states]", {0: same, 1: same}, dims="t h # tp:replicated")
            made.put("model.layers.1:out[1]", {0: same, 1: same}, dims="t h # tp:replicated")
            made.put("model.norm:param[weight]", {0: same[0], 1: same[0]}, dims="h # tp:replicated")
            made.put("layers.1:tap[q]", {0: same, 1: same}, dims="t h # tp:replicated")
    return path


@pytest.mark.parametrize("to", ["sglang", "npz", "pt"])
def test_export_reads_back_equal(run_cli: Cli, sharded: Path, to: str) -> None:
    code, out, err = run_cli("export", "run", "--to", to, "-o", "out")
    assert code == 0
    assert "exported   20 records" in out
    assert "next: tapscope diff run out" in err
    code, out, _ = run_cli("ls", "out", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    sites = {line["site"] for line in lines if not line["site"].startswith(":in[")}
    assert sites == {
        "model.layers.0.mlp:out",
        "model.layers.1:in[hidden_states]",
        "model.layers.1:out[1]",
        "model.norm:param[weight]",
        "layers.1:tap[q]",
    }
    if to == "sglang":  # other formats have no dims
        code, out, _ = run_cli("diff", "run", "out")
        assert code == 0, out
        assert "rows: 10 aligned" in out
        assert "5 same" in out


def test_export_to_sglang_is_loaded_by_torch(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    run_cli("export", "run", "--to", "sglang", "-o", "out", "--ranks", "1")
    files = sorted((tmp_path / "out").iterdir())
    loaded = [torch.load(file, weights_only=True) for file in files]
    names = {one["meta"]["name"]: one for one in loaded}
    assert {"input_ids", "positions", "seq_lens", "rids", "q", "non_intrusive__model.layers.0.mlp.output"} <= set(names)
    mlp = names["non_intrusive__model.layers.0.mlp.output"]
    assert mlp["value"].shape == (5, 4)
    assert mlp["meta"]["dims"] == "t h[tp]"
    assert mlp["meta"]["sglang_parallel_info"] == {"tp_size": 2, "tp_rank": 1}
    assert names["q"]["meta"]["layer_id"] == 1
    assert names["rids"]["value"] == ["a", "b"]
    assert names["non_intrusive__model.layers.1.output.1"]["value"].dtype == torch.bfloat16


def test_export_to_npz_is_loaded_by_numpy(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    _, _, err = run_cli("export", "run", "--to", "npz", "-o", "out", "--site", "*:out", "--site", "*:tap[q]")
    assert "4 tensors written as float32: numpy has no bfloat16 or FP8" in err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"step{step}_rank{rank}.npz" for step in range(2) for rank in range(2)
    ]
    with np.load(tmp_path / "out/step1_rank0.npz") as arrays:
        assert set(arrays) == {"model.layers.0.mlp.output", "layers.1.tap.q"}
        assert arrays["layers.1.tap.q"].dtype == np.float32


def test_export_to_csv_has_statistics_and_scalars(run_cli: Cli, tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as made:
        made.step()
        made.put("m:out", np.array([1.0, -3.0, np.nan], np.float32))
        made.put("m:tap[loss]", np.array(0.5))
    assert run_cli("export", "run", "--to", "csv", "-o", "out")[0] == 0
    with (tmp_path / "out/records.csv").open() as file:
        first, loss = csv.DictReader(file)
    assert (first["site"], first["absmax"], first["nan"], first["shape"], first["value"]) == (
        "m:out",
        "3.0",
        "1",
        "3",
        "",
    )
    assert (loss["site"], loss["value"]) == ("m:tap[loss]", "0.5")


def two_ranks(path: Path) -> None:
    """Write two ranks and two steps, and one metric of rank 0."""
    with RunFactory(path, mesh={"tp": 2}) as made:
        for step in (0, 1):
            made.step()
            values = np.array([3.0, -4.0, np.nan], np.float32) * (1 + step)
            made.put("m:out", {0: values, 1: 2 * values}, dims="h # tp:replicated")
            made.put("m:tap[loss]", {0: np.array(0.5 + step), 1: np.array(0.0)}, dims="# tp:replicated")
            made.writers[0].line({"type": "metric", "step": step, "name": "lr", "value": 0.25})


def test_export_to_tensorboard_is_read_by_tensorboard(run_cli: Cli, tmp_path: Path) -> None:
    two_ranks(tmp_path / "run")
    code, out, err = run_cli("export", "run", "--to", "tensorboard", "-o", "out")
    assert (code, err) == (0, "")
    assert "8 records to 2 files" in out
    read = []
    for rank in (0, 1):
        events = EventAccumulator(str(tmp_path / f"out/rank{rank}")).Reload()
        tags = events.Tags()["tensors"]
        found = {tag: [(e.step, make_ndarray(e.tensor_proto).item()) for e in events.Tensors(tag)] for tag in tags}
        assert found["m.output/absmax"] == [(0, 4.0 * (1 + rank)), (1, 8.0 * (1 + rank))]
        assert found["m.output/nonfinite"] == [(0, 1.0), (1, 1.0)]
        read.append(found)
    assert read[0]["m.tap.loss/value"] == [(0, 0.5), (1, 1.5)]
    assert read[0]["metrics/lr"] == [(0, 0.25), (1, 0.25)]
    assert "metrics/lr" not in read[1]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the payloads of wandb's LevelDB log: blocks of 32 KiB after a 7-byte header."""
    data, at, parts = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield parts
            parts = b""


def wandb_runs(path: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Return name of each run -> step -> scalars."""
    from wandb.proto import wandb_internal_pb2

    read: dict[str, dict[int, dict[str, float]]] = {}
    for file in path.rglob("*.wandb"):
        name, steps = "", {}
        for payload in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            name = record.run.display_name or name
            if record.WhichOneof("record_type") == "history":
                items = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                steps[record.history.step.num] = items
        read[name] = steps
    return read


def test_export_to_wandb_is_an_offline_run_of_each_rank(run_cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    two_ranks(tmp_path / "run")
    code, out, err = run_cli("export", "run", "--to", "wandb", "-o", "out")
    assert code == 0
    assert "8 records to 2 files" in out
    assert "wandb sync out/wandb/offline-run-*" in err
    read = wandb_runs(tmp_path / "out")
    assert set(read) == {"run rank 0", "run rank 1"}
    assert read["run rank 1"][1]["m.output/absmax"] == 16.0
    assert read["run rank 1"][1]["m.output/nonfinite"] == 1
    assert [read["run rank 0"][step]["m.tap.loss/value"] for step in (0, 1)] == [0.5, 1.5]
    assert [read["run rank 0"][step]["metrics/lr"] for step in (0, 1)] == [0.25, 0.25]
    assert "metrics/lr" not in read["run rank 1"][0]


@pytest.mark.parametrize("reinit", ["default", "create_new"])
def test_export_to_wandb_leaves_the_runs_of_the_caller_open(tmp_path: Path, reinit: str) -> None:
    wandb = pytest.importorskip("wandb")
    two_ranks(tmp_path / "run")
    folder = tmp_path / "own"
    folder.mkdir()
    settings = wandb.Settings(silent=True, console="off")
    own = wandb.init(mode="offline", name="own", dir=str(folder), settings=settings, reinit=reinit)
    try:
        own.log({"loss": 2.0}, step=0)
        current = wandb.run
        with open_run(tmp_path / "run") as run:
            assert export.export_run(run, run.records, "wandb", tmp_path / "out").num_files == 2
        assert wandb.run is current
        own.log({"loss": 1.0}, step=1)
    finally:
        own.finish()
        wandb.teardown()
    assert {step: scalars["loss"] for step, scalars in wandb_runs(folder)["own"].items()} == {0: 2.0, 1: 1.0}
    assert len(wandb_runs(tmp_path / "out")["run rank 1"]) == 2


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_export_without_the_package_says_so(
    run_cli: Cli, sharded: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    code, _, err = run_cli("export", "run", "--to", package, "-o", "out")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{package} is not installed; pip install {package}" in err
    assert not (sharded.parent / "out").exists()


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_export_to_csv_writes_no_formula(run_cli: Cli, tmp_path: Path, first: str) -> None:
    name = f'{first}HYPERLINK("http://x")'
    with RunFactory(tmp_path / "run") as made:
        made.step()
        made.put(f"{name}:out", np.array([-3.0], np.float32))
        made.writers[0].line({"type": "metric", "step": 0, "name": name, "value": -1.0})
    assert run_cli("export", "run", "--to", "csv", "-o", "out")[0] == 0
    with (tmp_path / "out/records.csv").open(newline="") as file:
        (record,) = csv.DictReader(file)
    with (tmp_path / "out/metrics.csv").open(newline="") as file:
        (metric,) = csv.DictReader(file)
    assert (record["site"], record["value"]) == (f"'{name}:out", "-3.0")
    assert (metric["name"], metric["value"]) == (f"'{name}", "-1.0")


def test_export_refuses_a_directory_in_use(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").touch()
    code, _, err = run_cli("export", "run", "--to", "pt", "-o", "out")
    assert code == 2
    assert "out exists and is not an empty directory" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing", "--to", "pt", "-o", "out"], "missing is not a tapscope run"),
        (["run", "--to", "hdf5", "-o", "out"], "invalid choice: 'hdf5'"),
        (["run", "-o", "out"], "--to"),
        (["run", "--to", "pt", "-o", "out", "--site", "nothing*"], "no site matches"),
    ],
)
def test_export_of_bad_input_is_one_sentence(run_cli: Cli, sharded: Path, words: list[str], message: str) -> None:
    code, out, err = run_cli("export", *words)
    assert code in (2, 3)
    assert out == ""
    assert message in err
    assert not Path("out").exists()


def test_export_of_statistics_alone_says_so(run_cli: Cli, tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as made:
        made.step()
        made.put("m:out", np.ones(3, np.float32), keep="stats")
    code, _, err = run_cli("export", "run", "--to", "npz", "-o", "out")
    assert code == 3
    assert "nothing was exported to npz; 1 record left out: only statistics were captured" in err


@pytest.mark.parametrize(
    "site",
    [
        *("a.b:out", ":out", "a.b:out[1]", ":out[logits]", "a.b:in[x]", "a:in[args.0]", ":in[input_ids]"),
        *("a.b:in[position_embeddings.0]", "lm_head:in[input]", "a.b:param[weight]", "a:param[qkv_scale]"),
        *(":tap[q]", "layers.3:tap[q]", ":tap[a.b]", "a.b:buffer[inv]", "a.b:out.grad", "layers.3:tap[q].grad"),
    ],
)
def test_names_of_sites_are_read_back(site: str) -> None:
    assert site_of_tensor(name_of_site(site)) == site


def test_torch_save_writer_is_read_by_torch_and_by_us(tmp_path: Path) -> None:
    arrays = {
        name: RNG.standard_normal((2, 3)).astype(name)
        for name in ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool", "complex64")
    }
    arrays |= {"uint16": np.ones(2, np.uint16), "scalar": np.array(2.5), "empty": np.empty((0, 3), np.float32)}
    arrays |= {name: np.ones(3, getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
    plain = {"i": -5, "f": 0.1, "b": True, "n": None, "s": "é\n", "l": [1, "x", []], "t": (1, 2), "d": {"k": 1 << 40}}
    torch_save_writer.save(tmp_path / "x.pt", {**arrays, **plain})
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    ours = torch_save_reader.load(tmp_path / "x.pt")
    for name, array in arrays.items():
        tensor = found.pop(name)
        assert tuple(tensor.shape) == array.shape == ours.pop(name).shape
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
    assert found == plain == ours
    with pytest.raises(TypeError, match="cannot save a set"):
        torch_save_writer.save(tmp_path / "y.pt", {1, 2})
