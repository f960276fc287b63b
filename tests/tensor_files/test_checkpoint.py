"""Comparison of two Hugging Face checkpoints on the command line."""

import json
import shutil
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
from checkpoints import make_llama
from command_line import Cli
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from tapscope.cli import main
from tapscope.core.errors import RunNotFoundError
from tapscope.dumper import Dumper
from tapscope.sources import open_run, require_run

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with several shards and an index."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("checkpoints") / "sharded"
    Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: Path, **changes: object) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((config / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    return folder


def test_checkpoint_diff_sees_through_shards(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "whole", weights(sharded), sharded))
    assert code == 0
    assert "25 same · 0 close · 0 differs" in out
    assert "token rows" not in out


def test_checkpoint_diff_names_a_changed_tensor(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    changed = weights(sharded)
    changed[UP][5] *= 1.01
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "changed", changed, sharded))
    assert code == 1
    assert "what      model.layers.1.mlp.up_proj (param[weight]) differs" in out
    assert "target = 1.01 × baseline" in out
    assert "24 same · 0 close · 1 differs" in out


def test_checkpoint_diff_judges_a_cast_by_its_rounding(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    cast = {name: tensor.bfloat16() for name, tensor in weights(sharded).items()}
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "bf16", cast, sharded))
    assert (code, "0 differs" in out) == (0, True)
    cast[UP][5] *= 1.05
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "wrong", cast, sharded))
    assert (code, "1 differs" in out) == (1, True)
    assert "model.layers.1.mlp.up_proj (param[weight]) differs" in out


def test_checkpoint_diff_of_equal_dtypes_allows_no_difference(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    """A difference of one ULP in one element, which the noise floor of a computation would explain, is reported."""
    changed = weights(sharded)
    bits = changed[UP].view(torch.int32)
    bits[3, 4] += 1
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "changed", changed, sharded))
    assert code == 1
    assert "1 of 2,048 elements differ, by up to" in out
    assert "no cast explains it, because the dtypes are equal" in out


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fuse q, k and v, and gate and up, into one tensor each, as in Phi-3 and in inference engines."""
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensor, *(tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj"))]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            found[name] = tensor
    return found


def test_checkpoint_diff_splits_fused_tensors(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "fused", fused(weights(sharded)), sharded))
    assert code == 0
    assert "fused qkv (plain)" in out
    changed = weights(sharded)
    changed[UP] += 0.01
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "wrong", fused(changed), sharded))
    assert code == 1
    assert "model.layers.1.mlp.up_proj (param[weight]) differs" in out


def test_checkpoint_diff_reports_missing_and_extra_tensors(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    some = weights(sharded)
    some["model.extra.weight"] = some.pop(UP)
    code, out, _ = run_cli("diff", sharded, write(tmp_path / "some", some, sharded))
    assert code == 1
    assert "1 tensor is only in sharded: model.layers.1.mlp.up_proj:param[weight]" in out
    assert "1 tensor is only in some: model.extra:param[weight]" in out
    allowed = ("--allow-missing", "*up_proj*", "--allow-missing", "*extra*")
    assert run_cli("diff", sharded, tmp_path / "some", *allowed)[0] == 0


def test_checkpoint_with_tied_embeddings_meets_a_stored_head(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    stored = weights(sharded)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    both = write(tmp_path / "stored", stored, sharded)
    del stored["lm_head.weight"]
    tied = write(tmp_path / "tied", stored, sharded, tie_word_embeddings=True)
    assert run_cli("diff", both, tied)[0] == 0


def test_checkpoint_with_a_missing_shard_is_partial(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    gone = sorted(broken.glob("*.safetensors"))[1]
    gone.unlink()
    code, out, err = run_cli("diff", sharded, broken)
    assert code == 3
    assert gone.name in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "cannot be read"),
        ('{"weight_map": {"a": 1}}', "weight_map must be an object"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "invalid file name '../x.safetensors'"),
    ],
)
def test_checkpoint_with_an_invalid_index_is_one_sentence(
    run_cli: Cli, sharded: Path, tmp_path: Path, index: str, message: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    (broken / "model.safetensors.index.json").write_text(index)
    code, out, err = run_cli("diff", sharded, broken)
    assert (code, out) == (3, "")
    assert message in err


@pytest.fixture(scope="module", params=list(quantized_checkpoints.CASES))
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return (original checkpoint, quantized checkpoint, its dequantized equivalent)."""
    folder = tmp_path_factory.mktemp(request.param)
    stored, meant = quantized_checkpoints.make(folder, request.param)
    original = make_llama(folder / "original", seed=5, num_hidden_layers=2, torch_dtype="float32")
    return original, stored, meant


def test_checkpoint_diff_judges_quantized_weights_by_the_quantizer(
    run_cli: Cli, quantized: tuple[Path, Path, Path]
) -> None:
    original, stored, meant = quantized
    for pair in ((original, stored), (stored, original)):
        code, out, _ = run_cli("diff", *pair)
        assert code == 0, out
        assert "14 by quantization" in out
        assert "of what rounding explains" in out
    code, out, _ = run_cli("diff", meant, stored)
    assert (code, "21 same · 0 close" in out) == (0, True)
    assert run_cli("diff", stored, stored)[0] == 0


def test_checkpoint_diff_names_a_wrong_scale(run_cli: Cli, quantized: tuple[Path, Path, Path], tmp_path: Path) -> None:
    original, stored, _ = quantized
    wrong = weights(stored)
    names = (f"{UP}_scale_inv", f"{UP}_scale", UP.replace("weight", "scales"))
    scale = next(name for name in names if name in wrong)
    scales = wrong[scale].float()
    scales.reshape(-1)[:1] *= 2  # a different value in E8M0 as well
    wrong[scale] = scales.to(wrong[scale].dtype)
    code, out, _ = run_cli("diff", original, write(tmp_path / "wrong", wrong, stored))
    assert code == 1
    assert "what      model.layers.1.mlp.up_proj (param[weight]) differs" in out
    assert "beyond the error of its quantizer" in out
    code, out, _ = run_cli("diff", stored, tmp_path / "wrong")
    assert code == 1
    assert f"up_proj:param[{scale.rpartition('.')[2]}]" in out


def test_checkpoint_diff_names_a_changed_weight_below_the_codes(
    run_cli: Cli, quantized: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    original, stored, _ = quantized
    changed = weights(original)
    changed[UP][3, 4] += 0.5
    code, out, _ = run_cli("diff", write(tmp_path / "changed", changed, original), stored)
    assert code == 1
    assert "model.layers.1.mlp.up_proj (param[weight]) differs" in out


def quantized_shards(folder: Path, tensors: dict[str, torch.Tensor], config: Path, kind: str) -> Path:
    """Write fused and then quantized weights in two shards with an index."""
    quantize, about = quantized_checkpoints.CASES[kind]
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in fused(tensors).items():
        stored |= quantize(name, tensor)[0] if name.endswith("_proj.weight") else {name: tensor}
    write(folder, {}, config, quantization_config=about)
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: stored[name].contiguous() for name in names if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.soak), "int4"])
def test_checkpoint_diff_names_a_changed_tensor_in_a_sharded_fused_and_quantized_one(
    run_cli: Cli, tmp_path: Path, kind: str
) -> None:
    """Different names, split scales, and codes and scales in different shards, combined."""
    original = make_llama(tmp_path / "original", seed=5, num_hidden_layers=2, torch_dtype="float32")
    right = weights(original)
    code, out, _ = run_cli("diff", original, quantized_shards(tmp_path / "right", right, original, kind))
    assert code == 0, out
    assert "0 differs" in out
    right[UP][3, 4] += 0.5
    code, out, _ = run_cli("diff", original, quantized_shards(tmp_path / "wrong", right, original, kind))
    assert code == 1
    assert "what      model.layers.1.mlp.up_proj (param[weight]) differs" in out
    assert "1 differs" in out


def test_checkpoint_of_torch_files_is_read(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    torch.save(weights(sharded), tmp_path / "torch" / "pytorch_model.bin")
    shutil.copy(sharded / "config.json", tmp_path / "torch")
    assert run_cli("diff", sharded, tmp_path / "torch")[0] == 0


def test_checkpoint_is_read_by_the_other_verbs(run_cli: Cli, sharded: Path) -> None:
    assert "25 with values" in run_cli("info", sharded)[1]
    assert run_cli("verify", sharded)[0] == 0
    assert "model.norm:param[weight]" in run_cli("ls", sharded)[1]
    with open_run(sharded) as run:
        assert run.model_config["num_attention_heads"] == 4


def test_checkpoint_against_a_run_names_what_it_holds(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    with Dumper(nn.Linear(2, 2), tmp_path / "run") as dumper, dumper.step():
        dumper.dump("x", torch.ones(2))
    code, _, err = run_cli("diff", tmp_path / "run", sharded)
    assert code == 3
    assert "is a checkpoint, which holds parameters only; compare it with a checkpoint, or with a run" in err


def test_checkpoint_of_torch_save_files_is_accepted_before_it_is_opened(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/config.json").write_text((sharded / "config.json").read_text())
    torch.save(weights(sharded), tmp_path / "bin/pytorch_model.bin")
    require_run(tmp_path / "bin")
    with open_run(tmp_path / "bin") as run:
        assert len(run.records) == len(weights(sharded))


def test_checkpoint_with_zero_biases_has_no_anomaly(run_cli: Cli, sharded: Path, tmp_path: Path) -> None:
    changed = weights(sharded) | {UP.replace("weight", "bias"): torch.zeros(64)}
    code, out, _ = run_cli("info", write(tmp_path / "biased", changed, sharded))
    assert (code, "anomalies  none" in out) == (0, True), out
    changed[UP].zero_()
    code, out, _ = run_cli("info", write(tmp_path / "zeroed", changed, sharded))
    assert code == 1
    assert "anomalies  ∅ model.layers.1.mlp.up_proj:param[weight]  zeros in 1 record" in out


def test_folder_of_checkpoints_is_refused_unless_their_names_are_steps(
    run_cli: Cli, sharded: Path, tmp_path: Path
) -> None:
    for name in ("trained/checkpoint-500", "trained/checkpoint-1000", "steps/step_1", "steps/step_2"):
        shutil.copytree(sharded, tmp_path / name)
    code, _, error = run_cli("diff", tmp_path / "trained", sharded)
    assert code == 3
    assert "it contains 2 checkpoints (checkpoint-1000, checkpoint-500); give one of them, such as " in error
    with pytest.raises(RunNotFoundError, match="it contains 2 checkpoints"):
        require_run(tmp_path / "trained")
    with open_run(tmp_path / "steps") as run:
        assert list(run.steps) == [1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_states_that_a_distributed_checkpoint_also_holds_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {name: torch.ones(4) for name in ("norm.weight", "optimizer.state.exp_avg.norm.weight", "rng_state")}
    distributed_checkpoint.save(values, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert list(open_run(tmp_path / "saved").sites) == ["norm:param[weight]"]
    assert main(["info", str(tmp_path / "saved")]) == 0
    assert "tensors=2 reason=optimizer and random states" in capsys.readouterr().out
