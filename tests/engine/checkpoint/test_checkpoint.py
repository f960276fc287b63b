"""Any defect of a checkpoint raises one CheckpointError that names the file and the tensor or key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import reference_tokens
from safetensors import safe_open
from safetensors.torch import save_file

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine import LLM

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "model")


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118  (no mapping)
    change(tensors)
    save_file(tensors, file)


def _reconfigure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def _fails(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


def test_load_weights_names_a_missing_tensor(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.pop(Q_PROJ))
    _fails(path, rf"{Q_PROJ} is missing from the checkpoint")


def test_load_weights_names_an_unexpected_tensor_and_its_file(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    _fails(path, r"model\.safetensors: model\.layers\.0\.self_attn\.q_norm\.weight is unexpected")


def test_load_weights_ignores_stored_rotary_frequencies(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    with LLM(path) as llm:
        assert llm.generate([[5, 6]], max_new_tokens=3)[0].token_ids == tuple(reference_tokens(path, [5, 6], 3))


def test_checkpoint_read_names_both_shapes_of_a_misshaped_tensor(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 63)}))
    _fails(path, rf"{Q_PROJ} in .*model\.safetensors has shape \[64, 63\]; config\.json requires \[64, 64\]")


def test_checkpoint_read_rejects_integer_weights(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 64, dtype=torch.int8)}))
    _fails(path, rf"{Q_PROJ} in .* has dtype I8; supported: F64")


@pytest.mark.parametrize("size", [4, 300, 40_000])
def test_open_checkpoint_names_the_truncated_file_and_tensor(path: Path, size: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    _fails(path, r"model\.safetensors is truncated: " + ("model|lm_head" if size == 40_000 else f"its {size} bytes"))


def test_open_checkpoint_rejects_invalid_safetensors(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]" + b"x" * 64)
    _fails(path, r"model\.safetensors is not a safetensors file")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_llm_names_a_git_lfs_pointer(path: Path, name: str) -> None:
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9437184\n")
    _fails(path, rf"{re.escape(name)} is a Git LFS pointer, not the file itself; download it with: git lfs pull")


def test_open_checkpoint_names_the_missing_index_of_shards(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", max_shard_size="100KB")
    (path / "model.safetensors.index.json").unlink()
    _fails(path, r"index\.json is missing; it names the file of each tensor, such as model-00001-of-\d+\.safetensors")


def test_open_checkpoint_names_the_tensors_of_a_missing_shard(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", max_shard_size="100KB")
    victim = sorted(path.glob("model-*.safetensors"))[1]
    victim.unlink()
    _fails(path, rf"{victim.name} is missing; it contains [a-z_.0-9]+ and \d+ more tensors")


def test_open_checkpoint_rejects_an_index_with_a_wrong_shard(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", max_shard_size="100KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    first, last = min(index["weight_map"].values()), max(index["weight_map"].values())
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = last
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    _fails(path, rf"maps {name} to {last}, but that file has no such tensor")


@pytest.mark.parametrize("file", ["../model.safetensors", 3])
def test_open_checkpoint_rejects_index_paths_outside_the_folder(path: Path, file: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    _fails(path, "must be a file name in")


def test_open_checkpoint_rejects_an_index_without_weight_map(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{}")
    _fails(path, r"index\.json has no readable weight_map")


def test_llm_names_the_missing_checkpoint_file(path: Path) -> None:
    (path / "model.safetensors").unlink()
    _fails(path, r"model\.safetensors is missing; weights must be safetensors")
    (path / "config.json").unlink()
    _fails(path, r"config\.json is missing")
    _fails(path / "nowhere", "no model directory at .*safetensors$")


def test_an_id_of_the_hub_is_answered_with_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _fails(Path("some-org/Some-8B"), "hf download some-org/Some-8B --local-dir DIR")


def test_load_weights_rejects_tied_embeddings_that_differ(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", tie_word_embeddings=True)
    _rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    LLM(path).close()
    _rewrite(path, lambda t: t["lm_head.weight"].add_(1))
    _fails(path, r"lm_head\.weight differs from model\.embed_tokens\.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": "remove", "model_type": "gemma"}, "'gemma' is not supported"),
        ({"hidden_size": "remove"}, "hidden_size is None; expected an integer above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 4.0}, r"num_attention_heads is 4\.0"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 heads"),
        ({"head_dim": 15}, "head_dim is 15; the head size is 15; rotary embedding needs an even one"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; supported: silu, gelu, gelu_pytorch_tanh, relu"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; only causal attention"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0; this architecture has no soft-cap"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types is .*; this architecture has layers of full_a",
        ),
        ({"model_type": [1], "architectures": []}, r"architecture '\[1\]' is not supported"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; supported rope types: default, lin"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is None; expected a number above 0"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "mrope_section is None; rope type 'mrope' needs the three"),
        (
            {"rope_parameters": {"mrope_section": [4, 4]}},
            "mrope_section is .*; it must be three sizes .* 8",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention is {}; this architecture has one rope"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor is None"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; expected a JSON object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5; only whole heads"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        ({"eos_token_id": "x"}, "eos_token_id is"),
        ({"intermediate_size": 10**30}, "intermediate_size is 1.*; expected an integer from 1 to 281474976710655"),
    ],
)
def test_model_config_errors_name_field_and_rule(path: Path, changes: dict[str, Any], message: str) -> None:
    (path / "generation_config.json").unlink(missing_ok=True)
    _reconfigure(path, **changes)
    _fails(path, rf"config\.json: .*{message}")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_model_config_rejects_other_json(path: Path, text: str) -> None:
    (path / "config.json").write_text(text)
    _fails(path, r"config\.json (is not readable JSON|must contain a JSON object, not a list)")


def test_model_config_with_a_byte_order_mark_is_refused(path: Path) -> None:
    file = path / "config.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    _fails(path, r"config\.json begins with a byte order mark \(BOM\); save it as UTF-8 without one$")


def test_tokenizer_rejects_a_broken_file(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")
    _fails(path, r"tokenizer\.json is not a readable tokenizer\.json")


def test_resolve_dtype_rejects_unsupported_dtypes(path: Path) -> None:
    _reconfigure(path, dtype="float64")
    with pytest.raises(
        ConfigError, match="config.json has unsupported dtype 'float64'; set dtype to one of float32, bfloat16, float16"
    ):
        LLM(path)
    LLM(path, dtype="float32").close()
