"""Rotary position embedding: every type has transformers' angles, and only dynamic RoPE depends on lengths."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.rope import RotaryEmbedding, rotate

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
}
POSITIONS = torch.tensor([0, 1, 2, 31, 32, 255, 256, 1000, 2047])


def _read(folder: Path, rope: dict[str, Any], head_dim: int = 32) -> tuple[ModelConfig, LlamaConfig]:
    config = LlamaConfig(
        head_dim=head_dim,
        num_attention_heads=4,
        hidden_size=128,
        max_position_embeddings=256,
        rope_parameters=dict(rope),
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return ModelConfig.read(folder), config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_bit_identical_to_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    ours_config, config = _read(tmp_path, KINDS[kind])
    ours, theirs = RotaryEmbedding(ours_config.rope, 32), LlamaRotaryEmbedding(config)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == theirs.attention_scaling
    x = torch.randn(len(POSITIONS), 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = ours(x, POSITIONS)
    expected_cos, expected_sin = theirs(x, POSITIONS[None])
    assert torch.equal(cos, expected_cos[0])
    assert torch.equal(sin, expected_sin[0])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], expected_cos, expected_sin)
    assert torch.equal(rotate(x, cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize("kind", [*KINDS, "dynamic"])
def test_rope_config_reads_rope_scaling(tmp_path: Path, kind: str) -> None:
    rope = KINDS.get(kind, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    new, _ = _read(tmp_path, rope)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    scaling = values.pop("rope_parameters")
    values |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling | {"type": scaling.pop("rope_type")}}
    path.write_text(json.dumps(values))
    assert ModelConfig.read(tmp_path) == new


@settings(max_examples=40)
@given(
    prompt=st.integers(1, 60), new=st.integers(0, 8), factor=st.sampled_from([1.0, 2.0, 3.5]), half=st.integers(2, 9)
)
def test_dynamic_rope_depends_on_its_request_only(prompt: int, new: int, factor: float, half: int) -> None:
    """transformers sees the prompt in one call and then one token at a time; here one call has all rows."""
    dim = 2 * half
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
    config = LlamaConfig(head_dim=dim, num_attention_heads=4, max_position_embeddings=32, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    x = torch.zeros(1)
    calls = [torch.arange(prompt)[None], *(torch.tensor([[position]]) for position in range(prompt, prompt + new))]
    expected = [torch.cat(parts, dim=1)[0] for parts in zip(*(theirs(x, call) for call in calls), strict=True)]

    positions = torch.arange(prompt + new)
    ours = RotaryEmbedding(_dynamic(factor), dim)
    for actual, wanted in zip(ours(x, positions, (positions + 1).clamp(min=prompt)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


def _dynamic(factor: float) -> Any:
    from tapscope.engine.hf_config.rope_config import Rope

    return Rope(kind="dynamic", factor=factor, original_max_positions=32)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["side-by-side", "interleaved"])
def test_mrope_sections_equal_transformers(tmp_path: Path, scaling: dict[str, Any], interleaved: bool) -> None:
    rope = {"rope_theta": 10000.0} | scaling | {"mrope_section": [6, 5, 5]}
    if interleaved:
        kind, module, rope["mrope_interleaved"] = Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, True
    else:
        kind, module = Qwen2VLTextConfig, Qwen2VLRotaryEmbedding
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
    extra = {"head_dim": 32} if interleaved else {}
    theirs = module(kind(**sizes, **extra, rope_parameters=dict(rope)))
    ours = RotaryEmbedding(_read(tmp_path, rope)[0].rope, 32)
    positions = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(2))
    x = torch.zeros(1)
    for actual, expected in zip(ours(x, positions), theirs(x, positions[:, None]), strict=True):
        assert torch.equal(actual, expected[0])
    # Text has equal positions on all three axes, so the sections change nothing.
    for actual, expected in zip(ours(x, positions[0]), ours(x, positions[:1].expand(3, -1)), strict=True):
        assert torch.equal(actual, expected)


def test_rope_config_reads_mrope_type(tmp_path: Path) -> None:
    read, _ = _read(tmp_path, {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]})
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["rope_parameters"] |= {"rope_type": "mrope"}
    path.write_text(json.dumps(values))
    assert ModelConfig.read(tmp_path) == read
    assert read.rope.sections == (8, 4, 4)


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
        (YARN, 256),
        (YARN | {"original_max_position_embeddings": 256}, 1024),
    ],
)
def test_rope_reach(tmp_path: Path, rope: dict[str, Any], reach: int) -> None:
    assert _read(tmp_path, {"rope_theta": 1e4} | rope)[0].max_positions == reach
