"""The engine matches transformers for every model family, including randomly drawn shapes."""

import inspect
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, LLAMA3_ROPE, PHI4_ROPE, make_checkpoint
from engine_helpers import ThreadRanks, check_parity, reference_logits, reference_tokens
from gpu_helpers import DEVICES, ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from soak_cases import mostly_soak
from transformers import AutoModelForCausalLM

from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.models.registry import MODELS

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


CHUNKED = ("mamba2", "bamba", "gemma3n", "gemma4", "zamba2")
"""Families that the chunked prefill below covers in the default suite; it covers all of them on one rank."""


@pytest.mark.parametrize(
    ("family", "tp"),
    mostly_soak(
        product(FAMILIES, (1, 2)),
        default=[("llama", 1), ("mistral", 1), ("gemma2", 1), *((f, 2) for f in FAMILIES if f not in CHUNKED)],
    ),
)
def test_families_continue_ragged_prompts_like_transformers(tmp_path: Path, family: str, tp: int) -> None:
    """Prompts cross the window of 7 to 11 positions inside the prompt, at its end, and while decoding."""
    path = make_checkpoint(tmp_path / "model", family, seed=3)
    requests = check_parity(path, tp, PROMPTS, 12 if tp == 1 else 6)
    if tp == 1:
        assert list(requests[1].generated) == reference_tokens(path, PROMPTS[1], 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_chunked_prefill_and_prefix_hits_equal_transformers(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=7)
    check_parity(path, 1, PROMPTS, 6, max_num_batched_tokens=5)
    with LLM(path, page_size=4, max_num_batched_tokens=7) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=4)
        for length in range(5, len(PROMPTS[1]), 9):
            prompt = [*PROMPTS[1][:length], 7, 9]
            (generation,) = llm.generate([prompt], max_new_tokens=4, ignore_eos=True)
            assert generation.cached_tokens == length // 4 * 4
            greedy = reference_logits(path, [*prompt, *generation.token_ids][:-1]).argmax(-1)
            assert list(generation.token_ids) == greedy[-4:].tolist()


WINDOWED = ("mistral", "qwen2", "qwen3", "smollm3", "olmo3", "gemma2", "gemma3")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3_ROPE,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@st.composite
def odd_models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a family and an unusual configuration of it."""
    # The RoPE or the layers of these families do not support every value below.
    special = ("falcon", "mamba", "bamba", "gemma3n", "gemma4", "glm", "lfm", "ministral3", "zamba")
    family = draw(st.sampled_from([family for family in FAMILIES if not family.startswith(special)]))
    kv_heads, group, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(31, 99)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "hidden_size": kv_heads * group * draw(st.integers(2, 9)),
        "head_dim": 2 * draw(st.integers(2, 13)),
        "intermediate_size": draw(st.integers(2, 70)),
        "num_hidden_layers": layers,
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "max_position_embeddings": 64,
    }
    kinds_of_rope = ["default"] if family == "phi3" else list(ROPES)
    rope = {"rope_theta": draw(st.sampled_from([100.0, 10000.0]))} | ROPES[draw(st.sampled_from(kinds_of_rope))]
    config["rope_parameters"] = rope
    if family not in ("mistral", "qwen2", "phi3"):
        config["attention_bias"] = draw(st.booleans())
    if family == "llama":
        config |= {"mlp_bias": draw(st.booleans()), "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu"]))}
    if family in WINDOWED:
        config["sliding_window"] = draw(st.integers(1, 12))
    if family in WINDOWED[1:]:
        config["use_sliding_window"] = True
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        config["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    if family.startswith("gemma"):
        config["query_pre_attn_scalar"] = draw(st.integers(1, 40))
        config["final_logit_softcapping"] = draw(st.sampled_from([None, 2.0, 30.0]))
    if family == "gemma2":
        config["attn_logit_softcapping"] = draw(st.sampled_from([None, 1.0, 50.0]))
    if family in ("gemma3", "olmo3"):
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    return family, config


@settings(max_examples=30)
@given(model=odd_models(), prompt=st.lists(st.integers(0, 30), min_size=1, max_size=30), tp=st.integers(1, 2))
def test_families_logits_equal_transformers_for_unusual_configs(
    model: tuple[str, dict[str, Any]], prompt: list[int], tp: int
) -> None:
    family, config = model
    if tp == 2 and (config["num_key_value_heads"] % 2 or config["intermediate_size"] % 2):
        tp = 1
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", family, seed=9, **config)
        ranks = ThreadRanks(path, Path(folder) / "store", tp, page_size=3)
        (request,) = ranks.generate([prompt], 3)
        hf = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        with torch.no_grad():
            expected = hf(torch.tensor([request.tokens[:-1]])).logits[0]
        for runner in ranks.runners:
            assert (runner.observer.logits_of(request.id) - expected).abs().max() <= 1e-4
        ranks.close()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("chunk", [5, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_sliding_windows_with_any_chunk_size(tmp_path: Path, family: str, chunk: int, device: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=3)
    with LLM(path, page_size=4, max_num_batched_tokens=chunk, device=device) as llm:
        for generation in llm.generate(PROMPTS, max_new_tokens=24, ignore_eos=True):
            tokens = [*generation.prompt_ids, *generation.token_ids]
            greedy = reference_logits(path, tokens[:-1]).argmax(-1)
            assert list(generation.token_ids) == greedy[-24:].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_rope_is_independent_of_the_batch(tmp_path: Path, family: str, device: str) -> None:
    """Prompts and generated tokens exceed the 32 trained positions, in chunks and in one batch."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ropes = {"full_attention": rope, "sliding_attention": dict(rope)} if family == "gemma3" else rope
    path = make_checkpoint(tmp_path / "model", family, max_position_embeddings=32, rope_parameters=ropes)
    prompts = [[5, 6, 7], list(range(40, 75)), list(range(100, 165))]
    expected = []
    for prompt in prompts:
        reference_tokens(path, [1], 1)  # a short call resets transformers' rope, which remembers the longest one
        expected.append(reference_tokens(path, prompt, 32))
    for max_tokens in (512, 13):
        with LLM(path, max_num_batched_tokens=max_tokens, device=device) as llm:
            assert not llm.engine.model_config.is_prefix_shareable
            actual = llm.generate(prompts, max_new_tokens=32, ignore_eos=True)
        assert [list(generation.token_ids) for generation in actual] == expected


@pytest.mark.parametrize("tp", [1, 2])
def test_longrope_depends_on_its_request_only(tmp_path: Path, tp: int) -> None:
    """Requests below and above the 16 original positions share a batch and are chunked."""
    rope = PHI4_ROPE | {"original_max_position_embeddings": 16}
    sizes = {"max_position_embeddings": 128, "original_max_position_embeddings": 16}
    path = make_checkpoint(tmp_path / "model", "phi3", sliding_window=None, rope_parameters=rope, **sizes)
    config = ModelConfig.read(path)
    assert (config.rope.rotary_dim(config.head_dim), config.head_dim) == (12, 16)
    assert not config.is_prefix_shareable
    check_parity(path, tp, [[5, 6, 7], list(range(40, 75)), list(range(100, 117))], 8, max_num_batched_tokens=13)


@pytest.mark.parametrize(
    ("family", "tp", "dtype", "device"),
    [
        *((family, 1, "bfloat16", "cpu") for family in FAMILIES),
        ("llama", 2, "bfloat16", "cpu"),
        ("qwen3", 1, "float16", "cpu"),
        ("gemma2", 2, "float16", "cpu"),
        *(pytest.param(family, 1, "bfloat16", "cuda", marks=ON_GPU) for family in FAMILIES),
        pytest.param("qwen3", 1, "float16", "cuda", marks=ON_GPU),
    ],
)
def test_families_16_bit_logits_within_rounding_of_transformers(
    tmp_path: Path, family: str, tp: int, dtype: str, device: str
) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=5, dtype=dtype)
    ranks = ThreadRanks(path, tmp_path / "store", tp, device=device)
    (request,) = ranks.generate([PROMPTS[1]], 4)
    actual, expected = ranks.runners[0].observer.logits_of("0"), reference_logits(path, request.tokens[:-1])
    assert actual.dtype == getattr(torch, dtype)
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4 * torch.finfo(actual.dtype).eps / 2  # a few half-ulps, accumulated over three layers
    ranks.close()


@pytest.mark.parametrize("name", MODELS)
def test_layers_accept_the_observer_of_their_input(name: str) -> None:
    """The fused GPU path passes the observer of the layer's input; no run on a CPU would notice its absence."""
    assert "on_input" in inspect.signature(MODELS[name].layer_class.summands).parameters
