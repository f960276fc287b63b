"""Directories of tensor files written by a user's script, read on the command line."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Cli
from factories import RunFactory
from safetensors.torch import save_file

from tapscope.core.errors import ConfigError
from tapscope.sources import open_run, require_run
from tapscope.tensor_files import tensor_file
from tapscope.tensor_files.file_pattern import FileFields, FilePattern, fields_of, split_pattern
from tapscope.tensor_files.site_names import site_of_tensor


def values_of(step: int, shift: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the tensors of one step of a small model; ``shift`` changes a row of layer 1 and everything downstream."""
    torch.manual_seed(step)
    found = {f"model.layers.{layer}.mlp": torch.randn(6, 16) for layer in range(3)}
    for layer in (1, 2):
        found[f"model.layers.{layer}.mlp"][4] += shift
    return found


def save_pt(folder: Path, shift: float = 0.0, *, steps: int = 2) -> Path:
    for step in range(steps):
        (folder / f"step_{step}").mkdir(parents=True)
        for name, value in values_of(step, shift).items():
            torch.save(value, folder / f"step_{step}" / f"{name}.pt")
    return folder


def save_npz(folder: Path, shift: float = 0.0, *, compressed: bool = False) -> Path:
    folder.mkdir()
    save = np.savez_compressed if compressed else np.savez
    for step in range(2):
        save(folder / f"step{step}.npz", **{name: value.numpy() for name, value in values_of(step, shift).items()})
    return folder


def save_npy(folder: Path, shift: float = 0.0) -> Path:
    for step in range(2):
        (folder / str(step)).mkdir(parents=True)
        for name, value in values_of(step, shift).items():
            np.save(folder / str(step) / f"{name}.npy", value.numpy())
    return folder


def save_safetensors(folder: Path, shift: float = 0.0) -> Path:
    folder.mkdir()
    for step in range(2):
        save_file(values_of(step, shift), folder / f"step{step}.safetensors")
    return folder


def save_dicts(folder: Path, shift: float = 0.0) -> Path:
    folder.mkdir()
    for step in range(2):
        torch.save(values_of(step, shift), folder / f"iter_{step:04}.pth")
    return folder


SAVERS: dict[str, Callable[..., Path]] = {
    "pt": save_pt,
    "npz": save_npz,
    "npz compressed": lambda folder, shift=0.0: save_npz(folder, shift, compressed=True),
    "npy": save_npy,
    "safetensors": save_safetensors,
    "dicts": save_dicts,
}


@pytest.mark.parametrize("kind", SAVERS)
def test_diff_names_the_first_tensor_that_differs(run_cli: Cli, tmp_path: Path, kind: str) -> None:
    SAVERS[kind](tmp_path / "a"), SAVERS[kind](tmp_path / "b", 1.0), SAVERS[kind](tmp_path / "c")
    assert run_cli("diff", "a", "c")[0] == 0
    code, out, _ = run_cli("diff", "a", "b")
    assert code == 1
    assert "what      model.layers.1.mlp (out) differs" in out
    assert "ordered by file name, not by execution" in out


@pytest.mark.parametrize("name", ["layers.{}.k", "layer{}.k", "model.layer_{}.k", "block{}.k", "h{}/k", "layer{}_k"])
def test_diff_reports_a_layer_without_files(run_cli: Cli, tmp_path: Path, name: str) -> None:
    for layer in range(4):
        for side in ("a", "b"):
            path = tmp_path / side / f"{name.format(layer)}.pt"
            if (side, layer) != ("b", 2):
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(torch.full((3, 4), 1.0 + layer), path)
    code, out, _ = run_cli("diff", "a", "b")
    assert code == 1
    assert "missing   layer 2 is only in a\n" in out
    code, out, _ = run_cli("ls", "a", "--layers", "2")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines() if "fp32" in line] == [
        "layers.2:tap[layer2_k]" if "_k" in name else f"{name.format(2).replace('/', '.')}:out"
    ]


@pytest.mark.parametrize("kind", sorted(SAVERS))
def test_diff_compares_files_of_different_formats(run_cli: Cli, tmp_path: Path, kind: str) -> None:
    save_pt(tmp_path / "a"), SAVERS[kind](tmp_path / "b")
    assert run_cli("diff", "a", "b")[0] == 0


def test_other_verbs_read_tensor_files(run_cli: Cli, tmp_path: Path) -> None:
    save_pt(tmp_path / "a")
    code, out, err = run_cli("info", "a")
    assert code == 0
    assert "6 with values" in out
    assert "next: tapscope view a" in err
    code, out, err = run_cli("verify", "a")
    assert code == 0
    assert "hashes are of version" not in out  # the files have no hashes
    assert "model.layers.2.mlp:out" in run_cli("ls", "a")[1]
    assert "0.0e+00" not in run_cli("show", "a", "model.layers.2.mlp:out", "--slice", "0,:4")[1]


def test_pattern_gives_steps_ranks_and_order(run_cli: Cli, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"a/worker{rank}").mkdir(parents=True)
        for index, name in enumerate(("zeta", "alpha")):
            np.save(tmp_path / f"a/worker{rank}/7-{index}-{name}.npy", np.full((2, 3), rank + index))
    pattern = "worker{rank}/{step}-{index}-{name}.npy"
    code, out, _ = run_cli("ls", "a", "--pattern", pattern, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["rank"], line["step"], line["site"]) for line in lines] == [
        (0, 7, ":tap[zeta]"),
        (0, 7, ":tap[alpha]"),
        (1, 7, ":tap[zeta]"),
        (1, 7, ":tap[alpha]"),
    ]
    with open_run(tmp_path / "a" / pattern) as run:
        assert (run.name, run.world_size, run.unknown) == ("a", 2, ["tensor files do not record what was lost"])
    assert run_cli("diff", f"a/{pattern}", f"a/{pattern}")[0] == 0
    require_run(tmp_path / "a" / pattern)


def test_files_beyond_the_pattern_are_reported(run_cli: Cli, tmp_path: Path) -> None:
    save_npy(tmp_path / "a")
    np.save(tmp_path / "a" / "loss.npy", np.ones(2))
    code, out, _ = run_cli("diff", "a", "a", "--pattern", "{step}/{name}.npy")
    assert code == 0
    assert "1 file in a do not match the pattern: loss.npy" in out


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{nme}.pt", "unknown field {nme}; fields: {name}, {step}"),
        ("{name}/{name}.pt", "{name} appears twice"),
        ("{name}.txt", "it must end with one of .pt"),
        ("rank{rank}.pt", "no file in a matches 'rank{rank}.pt'; it has step_0/model.layers.0.mlp.pt"),
    ],
)
def test_bad_pattern_is_one_sentence(run_cli: Cli, tmp_path: Path, pattern: str, message: str) -> None:
    save_pt(tmp_path / "a")
    code, out, err = run_cli("ls", "a", "--pattern", pattern)
    assert code in (2, 3)
    assert not out
    assert message in err
    assert "Traceback" not in err


def test_single_files_are_compared(run_cli: Cli, tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    np.save(tmp_path / "b.npy", np.ones(3, np.float32))
    save_file({"tensor": torch.tensor([1.0, 2.0, 1.0])}, tmp_path / "c.safetensors")
    assert run_cli("diff", "a.pt", "b.npy")[0] == 0
    assert run_cli("diff", "a.pt", "c.safetensors")[0] == 1


def test_containers_and_plain_values_are_read(tmp_path: Path) -> None:
    value = {"hidden": [torch.ones(2), torch.zeros(2)], "step": 3, "nested": {"q": torch.eye(2).t()[:1]}}
    torch.save(value, tmp_path / "layer_4.pt")
    with open_run(tmp_path) as run:
        sites = {record.key.site: record for record in run.records}
        assert set(sites) == {
            "layer_4.hidden.0:out",
            "layer_4.hidden.1:out",
            "layer_4.step:out",
            "layer_4.nested.q:out",
        }
        assert sites["layer_4.step:out"].value == {"type": "int", "value": 3}
        assert run.array(sites["layer_4.nested.q:out"]).tolist() == [[1.0, 0.0]]


def test_arrays_come_back_as_they_were_saved(tmp_path: Path) -> None:
    arrays = {
        name: (np.arange(24).reshape(2, 3, 4) % 5).astype(name)
        for name in ("float64", "float32", "float16", "int64", "int8", "uint16", "bool", "complex64")
    }
    arrays |= {"fortran": np.asfortranarray(arrays["float32"]), "scalar": np.array(2.5), "empty": np.empty((0, 3))}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"c-{name}.npy", array)
    for file in sorted(tmp_path.iterdir()):
        with open_run(file) as run:
            for record in run.records:
                name = record.key.site.removeprefix(":tap[").removesuffix("]")
                expected = arrays[file.stem.removeprefix("c-") if file.suffix == ".npy" else name]
                found = run.array(record)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert np.array_equal(found, expected)


def _damaged(folder: Path) -> dict[str, str]:
    """Write damaged files; returns file -> expected error message."""
    np.save(folder / "cut.npy", np.ones(100))
    (folder / "cut.npy").write_bytes((folder / "cut.npy").read_bytes()[:300])
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(folder / "text.npy", np.array(["a"]))
    np.save(folder / "endian.npy", np.ones(3, ">f4"))
    (folder / "not.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff{")
    (folder / "not.npz").write_bytes(b"PK\x03\x04 nothing")
    np.savez_compressed(folder / "bomb.npz", x=np.zeros(1 << 21, np.uint8))
    (folder / "long.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (folder / "lies.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (folder / "deep.safetensors").write_bytes((60_000).to_bytes(8, "little") + b"[" * 60_000)
    os.mkfifo(folder / "pipe.npy")
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    torch.save({"x": Path("x")}, folder / "code.pt")
    return {
        "cut.npy": "is cut off",
        "objects.npy": "holds Python objects (a pickle); nothing was executed",
        "text.npy": "has dtype <U1, which is not read",
        "endian.npy": "has dtype >f4, which is not read",
        "not.npy": "is not an .npy file",
        "not.npz": "has no directory",
        "bomb.npz": "its array 'x' is compressed and has 2,097,280 bytes",
        "long.safetensors": "cut off within its header",
        "lies.safetensors": "is cut off or damaged",
        "deep.safetensors": "its header is not JSON",
        "pipe.npy": "it is a named pipe",
        "zero.safetensors": "it is a character device",
        "code.pt": "nothing was executed",
    }


def test_damaged_and_hostile_files_are_named_and_the_rest_is_compared(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_MAX_INFLATED", 1 << 20)
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "good.npy", np.ones(4))
    expected = _damaged(tmp_path / "b")
    with open_run(tmp_path / "b") as run:
        problems = {Path(sentence.split(": ")[0]).name: sentence for sentence in run.problems}
        assert set(problems) == set(expected)
        for name, words in expected.items():
            assert words in problems[name], problems[name]
    code, out, err = run_cli("diff", "a", "b")
    assert code == 3
    assert "Traceback" not in out + err
    assert "1 same" in out


def test_run_without_its_manifest_is_not_read_as_tensor_files(run_cli: Cli, tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as made:
        made.step()
        made.put("m:out", np.ones(3, np.float32))
    (tmp_path / "run/run.json").unlink()
    code, _, err = run_cli("info", "run")
    assert code == 3
    assert "run is not a tapscope run: " in err


def test_directory_without_a_readable_file_is_one_sentence(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.npy").write_bytes(b"")
    code, _, err = run_cli("info", "a")
    assert code == 3
    assert "a has no readable tensor: a/x.npy: is not an .npy file" in err


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("step_3/rank1/q.pt", FileFields("q", 3, 1)),
        ("3/model.layers.0.mlp.pt", FileFields("model.layers.0.mlp", 3)),
        ("rank0/iter0010_logits.npz", FileFields("logits", 10, 0)),
        ("logits_step=7.npz", FileFields("logits", 7)),
        ("attn/q.npy", FileFields("attn.q")),
        ("step12.pt", FileFields("", 12)),
        ("footstep3.pt", FileFields("footstep3")),
        ("layers.10.out.pt", FileFields("layers.10.out")),
    ],
)
def test_fields_are_recognised_without_a_pattern(path: str, fields: FileFields) -> None:
    assert fields_of(path) == fields


def test_pattern_matches_names_with_directories() -> None:
    pattern = FilePattern("{step}/{name}.pt")
    assert pattern.fields("3/attn/q.pt") == FileFields("attn.q", 3)
    assert pattern.fields("x/q.pt") is None
    assert FilePattern("{*}_{step}/{name}.pt").fields("abc_4/q.pt") == FileFields("q", 4)
    assert split_pattern("/a/b{step}/{name}.pt") == ("/a", "b{step}/{name}.pt")
    assert split_pattern("{name}.pt") == (".", "{name}.pt")
    with pytest.raises(ConfigError, match="unknown field"):
        FilePattern("{}.pt")


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("model.layers.3.mlp", "model.layers.3.mlp:out"),
        ("model.layers.3.mlp.output", "model.layers.3.mlp:out"),
        ("model.layers.3.mlp.output.1", "model.layers.3.mlp:out[1]"),
        ("model.layers.3.mlp.input", "model.layers.3.mlp:in[args.0]"),
        ("model.layers.3.mlp.inputs.hidden_states", "model.layers.3.mlp:in[hidden_states]"),
        ("model.layers.3.q_proj.weight", "model.layers.3.q_proj:param[weight]"),
        ("model.layers.3.q_proj.weight.grad", "model.layers.3.q_proj:param[weight].grad"),
        ("layer_3_attn", "layers.3:tap[layer_3_attn]"),
        ("logits", ":tap[logits]"),
        ("lm_head", "lm_head:out"),
        ("a[0]:b", ":tap[a(0);b]"),
    ],
)
def test_site_names_follow_module_paths(name: str, site: str) -> None:
    assert site_of_tensor(name) == site


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("mlp", "layers.3:tap[mlp]"),
        ("layer_1_mlp", "layers.3:tap[layer_1_mlp]"),
        ("attn.q", "layers.3.attn.q:out"),
        ("attn.q.grad", "layers.3.attn.q:out.grad"),
        ("attn.q.weight", "layers.3.attn.q:param[weight]"),
        ("attn.input", "layers.3.attn:in[args.0]"),
        ("output", "layers.3:out"),
        ("norm", "layers.3.norm:out"),
        ("tap.scores", "layers.3:tap[scores]"),
        ("model.layers.1.mlp", "model.layers.1.mlp:out"),
    ],
)
def test_site_names_are_in_the_layer_of_the_file(name: str, site: str) -> None:
    assert site_of_tensor(name, 3) == site


def test_many_small_files_open_quickly(tmp_path: Path) -> None:
    """A guard against quadratic complexity, not a benchmark."""
    for number in range(300):
        np.savez(tmp_path / f"t{number}.npz", x=np.ones(4))
    begin = time.process_time()
    with open_run(tmp_path) as run:
        assert len(run.records) == 300
    assert time.process_time() - begin < 3
