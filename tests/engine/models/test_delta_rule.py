"""Recurrent states of Qwen3-Next and Kimi-Linear: chunks, checkpoints, preemption, both forms of the delta rule."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama, with_config
from engine_helpers import ThreadRanks, reference_logits
from engine_observers import Memory
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from soak_cases import mostly_soak

from tapscope.core.errors import CheckpointError, ConfigError, UsageError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.gated_delta import chunked, recurrent
from tapscope.engine.layers.short_conv import causal_conv

SHARED = [(11 * i + i // 3) % 500 for i in range(50)]
PROMPTS = [[5, 6, 7], SHARED, [300], [*SHARED[:30], 9, 8], [*SHARED, 11, 12, 13]]


FAMILIES = ["qwen3_next", "kimi_linear"]
both = pytest.mark.parametrize("path", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = getattr(request, "param", "qwen3_next")
    return make_moe(tmp_path_factory.mktemp(family) / "model", family, seed=3)


@pytest.fixture(scope="module")
def kimi_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A valid config.json of Kimi-Linear."""
    folder = tmp_path_factory.mktemp("kimi")
    values: dict[str, Any] = json.loads((make_moe(folder / "model", "kimi_linear") / "config.json").read_text())
    return values


def _greedy(path: Path, prompt: list[int], tokens: tuple[int, ...]) -> list[int]:
    """Return transformers' greedy choice for each position of ``tokens``, from one forward without a cache."""
    return reference_logits(path, [*prompt, *tokens][:-1]).argmax(-1)[-len(tokens) :].tolist()


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (7, 8), (64, 1), (200, 1), (200, 8)])
def test_chunked_form_equals_the_recurrent_one(rows: int, features: int) -> None:
    """With one decay per head and with one per key feature."""
    torch.manual_seed(rows)
    query, key = (torch.nn.functional.normalize(torch.randn(rows, 3, 8), dim=-1) for _ in range(2))
    value, beta, decay = torch.randn(rows, 3, 5), torch.rand(rows, 3), -torch.rand(rows, 3, features)
    state = torch.randn(1, 3, 8, 5)
    output, after = chunked(query, key, value, decay, beta, state[0])
    expected = []
    for row in range(rows):
        one = (part[row : row + 1] for part in (query, key, value, decay, beta))
        step, state = recurrent(*one, state)
        expected.append(step)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, state[0], atol=1e-5, rtol=1e-5)


def test_causal_conv_equals_torch() -> None:
    rows, window, weight = torch.randn(9, 6), torch.randn(6, 3), torch.randn(6, 4)
    output, after = causal_conv(rows, window, weight)
    seen = torch.cat((window, rows.T), dim=1)
    expected = torch.nn.functional.conv1d(seen.unsqueeze(0), weight.unsqueeze(1), groups=6)[0].T
    torch.testing.assert_close(output, expected)
    assert torch.equal(after, seen[:, -3:])


CHUNKS = [(family, rows, tp) for family in FAMILIES for rows in (1, 5, 64) for tp in (1, 2)]


@pytest.mark.parametrize(
    ("path", "rows", "tp"),
    mostly_soak(CHUNKS, default=[*CHUNKS[:4], ("kimi_linear", 5, 2)]),
    indirect=["path"],
)
def test_chunks_of_any_size_equal_transformers(path: Path, tmp_path: Path, rows: int, tp: int) -> None:
    settings: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": rows, "prefix_cache": True}
    ranks = ThreadRanks(path, tmp_path / "store", tp, state_checkpoint_interval=8, **settings)
    for request in ranks.generate(PROMPTS[:3], 8):
        expected = reference_logits(path, request.tokens[:-1])
        for runner in ranks.runners:
            assert (runner.observer.logits_of(request.id) - expected).abs().max() <= 1e-4
    ranks.close()


@both
def test_prefix_hits_continue_from_checkpoints(path: Path) -> None:
    with LLM(path, page_size=4, state_checkpoint_interval=16, max_num_batched_tokens=64, check_invariants=True) as llm:
        llm.generate([SHARED], max_new_tokens=4, ignore_eos=True)
        hits = []
        for length in range(3, len(SHARED), 6):
            prompt = [*SHARED[:length], 7, 9]
            (generation,) = llm.generate([prompt], max_new_tokens=8, ignore_eos=True)
            assert list(generation.token_ids) == _greedy(path, prompt, generation.token_ids)
            hits.append(generation.cached_tokens)
        # The first prompt leaves checkpoints at 16, 32 and 48; a prompt that diverges from it adds one at that point.
        assert all(hit <= length // 4 * 4 for hit, length in zip(hits, range(3, len(SHARED), 6), strict=True))
        assert hits[3] >= 16
        assert hits[-1] >= 32
        branch = [*SHARED[:length], 8, 8]
        (generation,) = llm.generate([branch], max_new_tokens=2, ignore_eos=True)
        assert generation.cached_tokens == length // 4 * 4


@pytest.mark.parametrize(
    ("path", "is_async"),
    mostly_soak(
        [(family, is_async) for family in FAMILIES for is_async in (False, True)],
        default=[("qwen3_next", True), ("kimi_linear", False)],
    ),
    indirect=["path"],
)
def test_preemption_and_few_states_do_not_change_tokens(path: Path, is_async: bool) -> None:
    settings: dict[str, Any] = {"num_pages": 22, "num_state_slots": 7, "max_num_batched_tokens": 9}
    with LLM(path, page_size=4, state_checkpoint_interval=8, check_invariants=True, **settings) as llm:
        llm.engine.async_scheduling = is_async
        generations = llm.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
        assert llm.engine.scheduler.stats.num_preemptions > 0
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
        llm.engine.scheduler.flush()
        assert llm.engine.scheduler.kv_cache_manager.num_free_states == 7
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert list(generation.token_ids) == _greedy(path, prompt, generation.token_ids)


@both
def test_batch_invariant_bits_do_not_depend_on_chunks_batches_or_hits(path: Path) -> None:
    found = []
    changes: tuple[dict[str, Any], ...] = (
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 7},
        {"prefix_cache": False},
    )
    for change in changes:
        settings = {"page_size": 4, "state_checkpoint_interval": 8, **change}
        with LLM(path, observer=Memory, logits="all", batch_invariant=True, **settings) as llm:
            llm.generate([SHARED], max_new_tokens=2)
            llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)
            found.append(llm.observer.logits_of("2")[-6:])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_fp8_cache_reads_scales_of_the_layers_that_cache_keys(path: Path, tmp_path: Path) -> None:
    full = [i for i, kind in enumerate(ModelConfig.read(path).layer_types) if kind == "full_attention"]
    scaled = tmp_path / "scaled"
    shutil.copytree(path, scaled)
    weights = load_file(scaled / "model.safetensors")
    for layer in full:
        weights |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    save_file(weights, scaled / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": dict.fromkeys(map(str, full), 0.25)}}}))
    for folder, expected, settings in ((scaled, 0.5, {}), (path, 0.25, {"quantization_param_path": str(file)})):
        with LLM(folder, kv_cache_dtype="fp8", **settings) as llm:
            cache = llm.engine.runner.kv_cache
            assert {layer: cache.scales(layer) for layer in cache.layers} == dict.fromkeys(full, (expected, expected))


def test_ranks_with_different_numbers_of_heads_have_equal_pools(tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    path = make_moe(tmp_path / "model", "qwen3_next", seed=3, **heads)
    ranks = ThreadRanks(path, tmp_path / "store", 2, kv_cache_memory_bytes=150_000)
    first, second = (runner.cache_config for runner in ranks.runners)
    assert (first.num_state_slots, first.group_pages) == (second.num_state_slots, second.group_pages)
    assert first.num_state_slots < 4 * 64  # limited by memory
    ranks.close()


def test_unsupported_settings_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 key heads of linear attention"):
        ModelConfig.read(path).check_split(3)
    with pytest.raises(ConfigError, match="num_state_slots=1: a request needs 2"):
        LLM(path, num_state_slots=1)
    with pytest.raises(ConfigError, match=r"num_state_slots=1000000: slots of \d+ bytes leave no page of .* use"):
        LLM(path, num_state_slots=1_000_000)
    for change, match in (
        ({"layer_types": ["linear_attention"] * 3}, "full_attention at least once"),
        ({"linear_num_value_heads": 3}, "2 key heads do not divide it"),
        ({"linear_conv_kernel_dim": 1}, "above 1"),
    ):
        with pytest.raises(CheckpointError, match=match):
            ModelConfig.read(with_config(tmp_path, path, change))


def test_kimi_linear_as_published_equals_transformers(tmp_path: Path) -> None:
    """Layers listed by number in ``linear_attn_config``, other setting names, and ``mlp`` in dense layers."""
    path = make_moe(tmp_path / "model", "kimi_linear", seed=3)
    values = json.loads((path / "config.json").read_text())
    kinds = values.pop("layer_types")
    values["linear_attn_config"] = {
        "head_dim": values.pop("linear_head_dim"),
        "num_heads": values.pop("linear_num_heads"),
        "short_conv_kernel_size": values.pop("linear_conv_kernel_dim"),
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
    }
    values |= {"first_k_dense_replace": values.pop("mlp_layer_types").count("dense"), "mla_use_nope": True}
    values |= {"moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
    (path / "config.json").write_text(json.dumps(values))
    weights = load_file(path / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    weights = {name.replace(dense, "model.layers.0.mlp."): value for name, value in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with LLM(path, observer=Memory, logits="all") as llm:
        (generation,) = llm.generate([SHARED], max_new_tokens=3, ignore_eos=True)
        expected = reference_logits(path, [*SHARED, *generation.token_ids][:-1])
        assert (llm.observer.logits_of("0") - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; the latent attention of Kimi-Linear has no rotary embedding"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the convolution"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; latent attention"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; MTP layers"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'; Kimi-Linear scores"),
        ({"num_expert_group": 3}, "num_expert_group is 3; it must divide the 8 experts"),
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9; there are 8 experts"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types is .*; expected full_attention or linear_attention for each",
        ),
        (
            {"linear_attn_config": {"short_conv_kernel_size": 1}},
            "short_conv_kernel_size is 1; expected an integer above",
        ),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
            r"full_attn_layers is \[1\]; with kda_layers it must name each layer from 1 to 3 once",
        ),
    ],
)
def test_unsupported_settings_of_kimi_linear_are_refused(
    tmp_path: Path, change: dict[str, Any], match: str, kimi_config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kimi_config | change))
    with pytest.raises(CheckpointError, match=match):
        ModelConfig.read(tmp_path)


def test_models_without_state_have_no_slots(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama")
    with LLM(path) as llm:
        assert llm.engine.runner.cache_config.num_state_slots == 0
    with pytest.raises(ConfigError, match="num_state_slots=8: .* has no recurrent state; leave it out"):
        LLM(path, num_state_slots=8)
    with pytest.raises(ConfigError, match="swa_full_tokens_ratio=0.5: .* does not mix"):
        LLM(path, swa_full_tokens_ratio=0.5)
