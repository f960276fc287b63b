"""Qwen3.5: dense models, and the text model of checkpoints with vision."""

import json
from pathlib import Path

import pytest
import torch
from engine_helpers import check_parity, reference_logits
from moe_checkpoints import make_moe, make_qwen3_5
from safetensors.torch import load_file, save_file

from tapscope.engine import LLM

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300]]


@pytest.mark.parametrize("tp", [1, 2])
def test_dense_qwen3_5_equals_transformers(tmp_path: Path, tp: int) -> None:
    path = make_qwen3_5(tmp_path / "model", seed=3)
    check_parity(path, tp, PROMPTS, 8, max_num_batched_tokens=9)


def test_text_part_of_a_qwen3_5_checkpoint_with_vision_loads(tmp_path: Path) -> None:
    path, folder = make_moe(tmp_path / "text", "qwen3_5_moe", seed=3), tmp_path / "vision"
    folder.mkdir()
    tensors = load_file(path / "model.safetensors")
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"model.visual.x": torch.zeros(2), "mtp.x": torch.zeros(2)}
    save_file(stored | others, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    rope = text["rope_parameters"] | {"rope_type": "mrope", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    config |= {"text_config": text | {"rope_parameters": rope}}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder) as llm:
        assert "model.language_model.layers.0.linear_attn" in dict(llm.model.named_modules())
        (generation,) = llm.generate([PROMPTS[1]], max_new_tokens=6, ignore_eos=True)
    tokens = [*PROMPTS[1], *generation.token_ids]
    assert list(generation.token_ids) == reference_logits(path, tokens[:-1]).argmax(-1)[-6:].tolist()
