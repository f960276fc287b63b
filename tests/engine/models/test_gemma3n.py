"""Gemma 3n text models: shared keys under preemption, multimodal checkpoints, unsupported settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, with_config
from engine_helpers import reference_logits
from safetensors.torch import load_file, save_file

from tapscope.core.errors import CheckpointError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig

PROMPTS = [[5, 6, 7], [(11 * i + i // 3) % 500 for i in range(50)], [300]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma3n") / "model", "gemma3n", seed=3)


def test_preemption_does_not_change_tokens(path: Path) -> None:
    """Layers that share another layer's keys cache none of their own."""
    assert ModelConfig.read(path).attention_layers == (0, 1)
    with LLM(path, page_size=4, num_pages=22, max_num_batched_tokens=9, check_invariants=True) as llm:
        generations = llm.generate([*PROMPTS, PROMPTS[1][:20]], max_new_tokens=20, ignore_eos=True)
        assert llm.engine.scheduler.stats.num_preemptions > 0
    for generation in generations:
        tokens = [*generation.prompt_ids, *generation.token_ids]
        assert list(generation.token_ids) == reference_logits(path, tokens[:-1]).argmax(-1)[-20:].tolist()


def test_multimodal_checkpoint_loads_its_text_part(path: Path, tmp_path: Path) -> None:
    """With vision and audio towers and with the unused keys of sharing layers, like published checkpoints."""
    weights = load_file(path / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    unused = ("model.vision_tower.x", "model.embed_audio.y", "model.language_model.layers.2.self_attn.k_proj.weight")
    save_file(weights | {name: torch.ones(2) for name in unused}, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    found = []
    for folder in (path, tmp_path):
        with LLM(folder) as llm:
            found.append([each.token_ids for each in llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"intermediate_size": [96, 80]},
            "intermediate_size is .96, 80.; expected an integer above 0, or one for each",
        ),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; expected an integer from 0 to 3"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; no layer of full_attention is left"),
        ({"altup_active_idx": 3}, "altup_active_idx is 3; expected an integer from 0 to 2"),
        ({"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern is .*; expected 4 numbers from 0 to"),
    ],
)
def test_gemma3n_config_errors_name_field_and_rule(
    path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(with_config(tmp_path, path, change))
