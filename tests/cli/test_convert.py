"""`tapscope convert`: output readable by the engine, `diff` and compressed-tensors; either complete output or none."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from command_line import Cli
from moe_checkpoints import make_moe
from quantized_checkpoints import PROMPT, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.engine.checkpoint import convert
from tapscope.engine.checkpoint.convert import Converter
from tapscope.engine.checkpoint.weight_quantizer import FORMATS

torch.set_num_threads(1)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bf16 checkpoint with several shards."""
    path = make_llama(tmp_path_factory.mktemp("plain") / "model", seed=5, num_hidden_layers=2, torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    shards = {f"model-0000{i}-of-00003.safetensors": list(tensors)[i - 1 :: 3] for i in (1, 2, 3)}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, path / shard, {"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "model.safetensors").unlink()
    return path


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _options(form: str) -> list[str]:
    return ["--to", form, *(["--group-size", "32"] if form == "int4" else [])]


def _meant(original: dict[str, Tensor], converter: Converter) -> dict[str, Tensor]:
    return {
        name: converter.quantizer.quantize(tensor)[1]
        if converter.covers(name, tensor.shape, "BF16")
        else tensor.float()
        for name, tensor in original.items()
    }


@pytest.mark.parametrize("form", FORMATS)
def test_convert_writes_what_the_engine_and_diff_read(run_cli: Cli, plain: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    code, text, err = run_cli("convert", plain, out, *_options(form))
    assert (code, f"converted 14 weights to {form} in {out}" in text, "sqnr" in text) == (0, True, True)
    assert f"next: tapscope diff {plain} {out}" in err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored, original = tensors_of(out), tensors_of(plain)
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    assert torch.equal(stored["lm_head.weight"], original["lm_head.weight"])
    assert (out / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()

    code, text, _ = run_cli("diff", plain, out, "--sqnr", 1)
    assert code == 0, text
    assert "14 by quantization" in text
    assert "sqnr" in text

    dense = shutil.copytree(plain, tmp_path / "dense", ignore=shutil.ignore_patterns("*.index.json", "*.safetensors"))
    save_file(_meant(original, Converter(form, 32)), dense / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits_of(out, quantized_layers="weight_only"), logits_of(dense))


@pytest.mark.parametrize(("form", "last"), [("fp8-block", "_scale_inv"), ("int8", ""), ("int4", "_packed")])
def test_diff_names_a_corrupt_tensor_of_a_converted_checkpoint(
    run_cli: Cli, plain: Path, tmp_path: Path, form: str, last: str
) -> None:
    out = tmp_path / "out"
    assert run_cli("convert", plain, out, *_options(form))[0] == 0
    file = next(file for file in out.glob("*.safetensors") if UP + last in load_file(file))
    tensors = load_file(file)
    corrupt = {"fp8-block": lambda t: t * 1.5, "int8": torch.bitwise_not, "int4": lambda t: t ^ (8 << 12)}[form]
    save_file(tensors | {UP + last: corrupt(tensors[UP + last])}, file, {"format": "pt"})
    code, text, _ = run_cli("diff", plain, out)
    assert code == 1
    assert "what      model.layers.1.mlp.up_proj (param[weight]) differs" in text
    assert "beyond the error of its quantizer" in text
    assert "13 close · 1 differs" in text


def test_int4_is_read_by_compressed_tensors(run_cli: Cli, plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    out = tmp_path / "out"
    assert run_cli("convert", plain, out, *_options("int4"))[0] == 0
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    names = {name.rpartition(".")[2]: tensor for name, tensor in tensors_of(out).items() if UP in name}
    found = PackedQuantizationCompressor.decompress(names, config.config_groups["group_0"])["weight"]
    assert torch.equal(found, Converter("int4", 32).quantizer.quantize(tensors_of(plain)[UP])[1].bfloat16())


def test_convert_does_not_depend_on_how_many_rows_are_read(plain: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for form in ("fp8-block", "int4"):
        Converter(form, 32).convert(plain, tmp_path / form)
    monkeypatch.setattr(convert, "_STEP", 1)
    for form in ("fp8-block", "int4"):
        Converter(form, 32).convert(plain, tmp_path / f"{form}-in-parts")
        for file in (tmp_path / form).iterdir():
            assert file.read_bytes() == (tmp_path / f"{form}-in-parts" / file.name).read_bytes()


def test_convert_keeps_routers_and_ignored_modules_of_experts(run_cli: Cli, tmp_path: Path) -> None:
    path, out = make_moe(tmp_path / "model", "qwen3_moe", seed=3), tmp_path / "out"
    code, text, _ = run_cli("convert", path, out, "--to", "fp8-channel", "--ignore", "*.layers.0.*", "--json")
    assert code == 0
    ratios = {one["name"]: one["sqnr"] for one in json.loads(text)["tensors"]}
    assert all(25 < ratio < 40 for ratio in ratios.values())
    assert not [name for name in ratios if ".gate." in name or "embed" in name or ".layers.0." in name]
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in ratios
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.self_attn.k_proj", "model.layers.2.mlp.gate"} <= {*ignored}
    assert "model.embed_tokens" not in ignored
    assert logits_of(out).isfinite().all()
    stacked = make_moe(tmp_path / "stacked", "gpt_oss", seed=3)
    code, _, err = run_cli("convert", stacked, tmp_path / "out2", "--to", "int8")
    assert (code, "6 tensors of stacked experts kept as they are" in err) == (0, True)
    assert logits_of(tmp_path / "out2", quantized_layers="weight_only").shape == (len(PROMPT), 512)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["--to", "int4", "--group-size", "48"],
            2,
            "input features, not a multiple of --group-size 48: choose",
        ),
        (["--to", "int4", "--group-size", "12"], 2, "--group-size 12: expected a multiple of 8"),
        (["--to", "int8", "--group-size", "32"], 2, "with --to int4"),
        (["--to", "int8", "--ignore", "*.k_prok"], 2, "--ignore '*.k_prok' matches no module"),
        (["--to", "int8", "--ignore", "*"], 2, "has no weight of a linear layer to quantize"),
    ],
)
def test_convert_refuses_what_does_not_fit(
    run_cli: Cli, plain: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    found, _, err = run_cli("convert", plain, tmp_path / "out", *words)
    assert (found, message in err) == (code, True)
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_convert_writes_nothing_where_it_fails(run_cli: Cli, plain: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(plain, tmp_path / "broken")
    file = sorted(broken.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    name = next(name for name in tensors if "_proj" in name)
    tensors[name][3, 4] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _, err = run_cli("convert", broken, tmp_path / "out", "--to", "int8")
    assert (code, f"{name} in {file} has values that are not finite" in err) == (3, True)
    code, _, err = run_cli("convert", plain, tmp_path / "taken", "--to", "int8")
    assert (code, "is not an empty directory" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    assert run_cli("convert", plain, tmp_path / "empty", "--to", "int8")[0] == 0
    code, _, err = run_cli("convert", tmp_path / "empty", tmp_path / "out", "--to", "int4")
    assert (code, "is already quantized (compressed-tensors)" in err) == (3, True)
    code, _, err = run_cli("convert", plain, tmp_path / "none" / "out", "--to", "int8")
    assert (code, "cannot write to" in err) == (3, True)
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "taken", "empty"}


def test_convert_names_a_tensor_of_a_dtype_that_it_cannot_copy(run_cli: Cli, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=1)
    file = path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header, values = json.loads(file.read_bytes()[8 : 8 + length]), file.read_bytes()[8 + length :]
    header["packed"] = {"dtype": "F4", "shape": [2, 4], "data_offsets": [len(values), len(values) + 4]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + values + bytes(4))
    code, _, err = run_cli("convert", path, tmp_path / "out", "--to", "int8")
    assert (code, f"packed in {file} has dtype F4, which cannot be copied" in err) == (3, True)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
