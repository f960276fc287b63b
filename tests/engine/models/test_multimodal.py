"""The text model of a multimodal checkpoint matches transformers without images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, tokenizer_json
from engine_helpers import check_parity, reference, reference_logits
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from tapscope.core.errors import CheckpointError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 8, "sliding_window_pattern": 2},
        {"model_type": "siglip_vision_model"},
    ),
    "gemma4": (
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        {"model_type": "gemma4_text", "head_dim": 24, "global_head_dim": 40, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 12}
        | {"use_bidirectional_attention": "vision"},
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
    ),
    "mistral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16},
    ),
}


def make_multimodal(path: Path, family: str, *, is_published: bool, **config: Any) -> Path:
    """Save a random model, named like published checkpoints if ``is_published``, otherwise like the modules."""
    config_class, model_class, text, vision = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(
            config_class(text_config=TINY | text, vision_config=VISION | vision, mm_tokens_per_image=1, **config)
        )
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 0.0 if family == "gemma3" else 1.0, 0.1)
    model.save_pretrained(path, save_original_format=is_published)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("is_published", "is_tied", "tp"), [(True, True, 1), (False, False, 2)])
def test_text_part_logits_equal_transformers(
    tmp_path: Path, family: str, is_published: bool, is_tied: bool, tp: int
) -> None:
    path = make_multimodal(tmp_path / "model", family, is_published=is_published, tie_word_embeddings=is_tied)
    check_parity(path, tp, PROMPTS, 12, max_num_batched_tokens=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_part_prefix_hits_equal_transformers(tmp_path: Path, family: str) -> None:
    path = make_multimodal(tmp_path / "model", family, is_published=True)
    with LLM(path, page_size=4) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=4)
        for length in (6, 17, 30):
            prompt = [*PROMPTS[1][:length], 7, 9]
            (generation,) = llm.generate([prompt], max_new_tokens=8, ignore_eos=True)
            assert generation.cached_tokens == length // 4 * 4
            greedy = reference_logits(path, [*prompt, *generation.token_ids][:-1]).argmax(-1)
            assert list(generation.token_ids) == greedy[-8:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_part_has_transformers_module_names(tmp_path: Path, family: str) -> None:
    path = make_multimodal(tmp_path / "model", family, is_published=True)
    expected = {
        name
        for name, _ in reference(path).named_modules()
        if not name.startswith(("model.vision", "model.multi", "model.embed_vision"))
    }
    with LLM(path) as llm:
        assert expected <= dict(llm.model.named_modules()).keys()


def test_text_part_errors_name_the_section(tmp_path: Path) -> None:
    path = make_multimodal(tmp_path / "model", "gemma3", is_published=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"text_config": None}))
    with pytest.raises(
        CheckpointError, match="text_config is None; expected a JSON object with the decoder's settings"
    ):
        ModelConfig.read(path)


def test_text_part_reads_published_gemma3_settings(tmp_path: Path) -> None:
    """google/gemma-3-4b-it omits the settings that equal the defaults of Gemma3TextConfig."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = ModelConfig.read(tmp_path), Gemma3Config(**values).text_config
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads) == (262208, 8, 4)
    assert (ours.head_dim, ours.layer_types, ours.dtype) == (theirs.head_dim, tuple(theirs.layer_types), "bfloat16")
    assert (ours.eos_token_ids, ours.tie_word_embeddings) == ((1, 106), True)
