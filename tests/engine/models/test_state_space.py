"""State space models: Mamba and Mamba-2 alone, alternating with attention, or parallel to attention in one layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from engine_helpers import reference_logits
from engine_observers import Memory
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    JambaConfig,
    Mamba2Config,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig

PROMPTS = [[5, 6, 7], [(11 * i + i // 3) % 500 for i in range(50)], [300]]


@pytest.fixture(scope="module", params=["falcon_h1", "mamba2", "bamba", "jamba", "nemotron_h", "zamba2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_checkpoint if request.param in FAMILIES else make_moe
    return make(tmp_path_factory.mktemp(request.param) / "model", request.param, seed=3)


def test_preemption_does_not_change_tokens(path: Path) -> None:
    settings: dict[str, Any] = {"num_pages": 22, "num_state_slots": 7, "max_num_batched_tokens": 9}
    with LLM(path, page_size=4, state_checkpoint_interval=8, check_invariants=True, **settings) as llm:
        generations = llm.generate([*PROMPTS, PROMPTS[1][:20]], max_new_tokens=20, ignore_eos=True)
        assert llm.engine.scheduler.stats.num_preemptions > 0
    for generation in generations:
        tokens = [*generation.prompt_ids, *generation.token_ids]
        assert list(generation.token_ids) == reference_logits(path, tokens[:-1]).argmax(-1)[-20:].tolist()


def test_batch_invariant_bits_do_not_depend_on_chunks(path: Path) -> None:
    found = []
    for rows in (7, 64):
        with LLM(path, batch_invariant=True, observer=Memory, logits="all", max_num_batched_tokens=rows) as llm:
            llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
            found.append(llm.observer.logits_of("1"))
    assert torch.equal(*found)


def test_falcon_h1_without_norm_equals_transformers(tmp_path: Path) -> None:
    """The output is gated, and there is one group."""
    path = make_checkpoint(tmp_path / "model", "falcon_h1", mamba_rms_norm=False, mamba_n_groups=1)
    with LLM(path, observer=Memory, logits="all") as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        assert (llm.observer.logits_of("0") - reference_logits(path, PROMPTS[1])).abs().max() <= 1e-4


def test_falcon_h1_config_errors_name_field_and_rule(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "falcon_h1")
    text = (path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"mamba_n_groups": 2', '"mamba_n_groups": 4'))
    with pytest.raises(CheckpointError, match="mamba_n_groups is 4; it must divide the 6 heads"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 8'))
    with pytest.raises(UsageError, match="tp=7 is more than the 6 heads of the Mamba layers"):
        ModelConfig.read(tmp_path).check_split(7)


REFUSED: list[tuple[type[PreTrainedConfig], dict[str, Any], str]] = [
    (Mamba2Config, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; the convolution of Mamba-2 is followed by silu"),
    (Qwen3NextConfig, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; the convolution of the linear attention is"),
    (Mamba2Config, {"num_heads": 7}, "num_heads is 7; times head_dim=64 it must be expand=2 times 4096"),
    (Mamba2Config, {"n_groups": 3}, "n_groups is 3; it must divide the 128 heads"),
    (Mamba2Config, {"conv_kernel": 1}, "conv_kernel is 1; expected an integer above 1"),
    (
        BambaConfig,
        {"attn_layer_indices": [32]},
        "attn_layer_indices is .32.; expected a list of layer",
    ),
    (JambaConfig, {"expert_layer_offset": 2}, "expert_layer_offset is 2; expected an integer from 0 to 1"),
    (JambaConfig, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms is False; Jamba has norms within"),
    (NemotronHConfig, {"layers_block_type": ["rnn"]}, "layers_block_type is .'rnn'.; expected linear_attention .M., "),
    (NemotronHConfig, {"attention_bias": True}, "attention_bias is True; it is not supported"),
    (Zamba2Config, {"use_long_context": True}, "use_long_context is True; the extended rotary embedding of Zamba2"),
    (Zamba2Config, {"n_mamba_heads": 7}, "n_mamba_heads is 7; it must divide the 5120 features"),
    (
        Zamba2Config,
        {"attention_head_dim": 80},
        "attention_head_dim is 80; 2 . hidden_size / num_attention_heads is 160",
    ),
    (Zamba2Config, {"layers_block_type": ["rnn"] * 54}, "layers_block_type is .*; expected linear_attention or hybrid"),
    (
        Zamba2Config,
        {"use_shared_attention_adapter": True, "num_key_value_heads": 8},
        "num_key_value_heads is 8; adapters of keys and values",
    ),
    (NemotronHConfig, {"sliding_window": 9}, "sliding_window is 9; the attention of Nemotron-H has no window"),
]


@pytest.mark.parametrize(("config_class", "change", "message"), REFUSED)
def test_state_space_config_errors_name_field_and_rule(
    tmp_path: Path, config_class: type[PreTrainedConfig], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads(config_class().to_json_string(use_diff=False)) | change)
    )
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(tmp_path)


def test_zamba2_without_adapters_of_attention_or_rope_equals_transformers(tmp_path: Path) -> None:
    """With grouped keys, one block for all layers, and an epsilon that differs from the mixer norms'."""
    plain = {"use_shared_attention_adapter": False, "use_mem_rope": False, "add_bias_linear": False}
    sizes = {"num_key_value_heads": 2, "num_mem_blocks": 1, "rms_norm_eps": 1e-3}
    path = make_checkpoint(tmp_path / "model", "zamba2", **plain, **sizes)
    with LLM(path, observer=Memory, logits="all") as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        assert (llm.observer.logits_of("0") - reference_logits(path, PROMPTS[1])).abs().max() <= 1e-4


def test_zamba2_layers_share_the_weights_of_their_block(tmp_path: Path) -> None:
    """With dummy and loaded weights; a checkpoint that repeats a block must repeat its values."""
    path = make_checkpoint(tmp_path / "model", "zamba2")
    block = "layers.{}.shared_transformer.self_attn.linear_q_adapter_list.0.1.weight"
    for load_format in ("auto", "dummy"):
        with LLM(path, load_format=load_format) as llm:
            first, other = (llm.model.decoder.get_parameter(block.format(layer)) for layer in (0, 3))
            assert first is other
            assert torch.equal(first, load_file(path / "model.safetensors")[f"model.{block.format(0)}"]) == (
                load_format == "auto"
            )
    weights = load_file(path / "model.safetensors")
    weights[f"model.{block.format(3)}"] = weights[f"model.{block.format(0)}"] * 2
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.3.shared_transformer.* differs from model.layers.0.shared"):
        LLM(path)


def test_nemotron_h_reads_the_pattern_of_published_files(tmp_path: Path) -> None:
    values = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*E", "hidden_size": 64}
    sizes = {"vocab_size": 9, "num_attention_heads": 4, "num_key_value_heads": 2, "n_groups": 8}
    (tmp_path / "config.json").write_text(json.dumps(values | sizes))
    config = ModelConfig.read(tmp_path)
    assert config.layer_types == ("linear_attention", "mlp", "linear_attention", "full_attention", "moe")
    assert (config.linear_layers, config.attention_layers) == ((0, 2), (3,))
