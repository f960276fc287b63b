"""Multi-head latent attention matches transformers, expanded or absorbed, and caches one latent per position."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ThreadRanks, reference_logits
from engine_observers import Memory
from gpu_helpers import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checkpoints import LATENT, YARN, make_moe
from safetensors.torch import load_file, save_file

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.engine import LLM
from tapscope.engine.execution.input_buffers import InputBuffers
from tapscope.engine.hf_config.mla_config import MlaConfig
from tapscope.engine.kv_cache.cache_layout import CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.layers.mla import LatentAttention
from tapscope.engine.models.deepseek import DeepseekAttention
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "v2-dynamic": (
        "deepseek_v2",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "num_hidden_layers": 2},
    ),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "v3-direct-query": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 16, "qk_nope_head_dim": 4}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tp", "device"), [(2, "cpu"), pytest.param(1, "cuda", marks=ON_GPU)])
def test_mla_logits_equal_transformers_in_chunks_and_mixed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, tp: int, device: str
) -> None:
    family, config = SHAPES[shape]
    path = make_moe(tmp_path / "model", family, seed=7, **config)
    for absorb in (True, False):
        monkeypatch.setattr(DeepseekAttention, "absorb", absorb)
        settings = {"page_size": 4, "max_num_batched_tokens": 12, "device": device}
        ranks = ThreadRanks(path, tmp_path / f"store-{absorb}", tp, **settings)
        for request in ranks.generate(PROMPTS, 8):
            expected = reference_logits(path, request.tokens[:-1])
            assert list(request.generated) == expected[len(request.prompt_ids) - 1 :].argmax(-1).tolist()
            assert (ranks.runners[-1].observer.logits_of(request.id) - expected).abs().max() <= 1e-4
        ranks.close()


def test_mla_reads_published_yarn_settings(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3", rope_parameters=YARN)
    expected = reference_logits(path, PROMPTS[1])
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (path / "config.json").write_text(json.dumps(config))
    with LLM(path, logits="all", observer=Memory) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        assert (llm.observer.logits_of("0") - expected).abs().max() <= 1e-4


def test_mla_cache_layout_has_one_latent_per_position(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3")
    ranks = ThreadRanks(path, tmp_path / "store", 2)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    exact = LATENT["qk_rope_head_dim"]
    expected = CacheLayout(kv_heads=1, key_dim=width, value_dim=0, exact_dim=exact)
    assert [runner.model.cache_layout(2) for runner in ranks.runners] == [expected] * 2
    assert expected.position_bytes(KVFormat(torch.bfloat16, torch.bfloat16)) == width * 2
    ranks.close()


def test_mla_reuses_latents_of_a_shared_prefix(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v2", seed=2)
    with LLM(path, page_size=4) as llm:
        first = llm.generate([PROMPTS[1]], max_new_tokens=8, ignore_eos=True)[0]
        again = llm.generate([[*PROMPTS[1][:30], 7, 8]], max_new_tokens=8, ignore_eos=True)[0]
        assert llm.engine.scheduler.stats.cached_tokens == 28  # the seven full pages of the 30-token common prefix
    for generation in (first, again):
        tokens = [*generation.prompt_ids, *generation.token_ids]
        choices = reference_logits(path, tokens[:-1]).argmax(-1).tolist()
        assert list(generation.token_ids) == choices[len(generation.prompt_ids) - 1 :]


def test_mla_calls_kv_b_proj_if_it_has_hooks(tmp_path: Path) -> None:
    """An absorbed step skips ``kv_b_proj``, but hooks must still receive the step's rows with the module's values."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with LLM(make_moe(tmp_path / "model", "deepseek_v3")) as llm:
        module = llm.model.model.layers[1].self_attn.kv_b_proj
        handle = module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
        (watched,) = llm.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)
        handle.remove()
        assert [len(latent) for latent, _ in seen] == [3, 1, 1, 1, 1]
        for latent, output in seen[1:]:
            torch.testing.assert_close(output, latent @ module.weight.T, rtol=1e-5, atol=1e-6)
        (unwatched,) = llm.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)
    assert (len(seen), unwatched.token_ids) == (5, watched.token_ids)


def test_mtp_layers_are_skipped(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=1)
    with LLM(path) as llm:
        expected = llm.generate(PROMPTS, max_new_tokens=2)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.3.enorm.weight"] = torch.ones(64)
    save_file(weights, path / "model.safetensors")
    with LLM(path) as llm:
        assert llm.generate(PROMPTS, max_new_tokens=2) == expected
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model.layers.3.enorm.weight is unexpected"):
        LLM(path)


def test_mla_rejects_invalid_head_sizes_and_splits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tp=5 is more than the model's 4 heads"):
        LLM(make_moe(tmp_path / "model", "deepseek_v3"), tp=5)
    path = make_moe(tmp_path / "odd", "deepseek_v3", qk_rope_head_dim=6)
    config = json.loads((path / "config.json").read_text()) | {"qk_rope_head_dim": 7}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="qk_rope_head_dim is 7; rotary embedding needs an even one"):
        LLM(path)


@settings(max_examples=40)
@given(
    cuts=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    heads=st.integers(1, 4),
    page_size=st.integers(1, 5),
    sizes=st.sampled_from([(8, 4, 2, 6), (5, 3, 4, 3), (16, 8, 8, 8)]),
    seed=st.integers(0, 1000),
)
def test_mla_absorbed_equals_expanded(
    cuts: list[list[int]], heads: int, page_size: int, sizes: tuple[int, int, int, int], seed: int
) -> None:
    rank, nope, rope, value = sizes
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=rank, nope_dim=nope, rope_dim=rope, value_dim=value)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads * (nope + value), rank, generator=generator)
    core = LatentAttention(0, mla, 0.3, weight)
    lengths = [sum(counts) for counts in cuts]
    queries = [torch.randn(n, heads, nope + rope, generator=generator) for n in lengths]
    latents = [torch.randn(n, rank + rope, generator=generator) for n in lengths]
    most = -(-max(lengths) // page_size)
    layout = CacheLayout(kv_heads=1, key_dim=rank + rope, value_dim=0)
    cache = KVCache([CacheGroup({0: layout}, most * len(cuts))], page_size, KVFormat(torch.float32, torch.float32))
    buffers, done = InputBuffers(cache, sum(lengths), len(cuts), most), [0] * len(cuts)
    for step in range(max(len(counts) for counts in cuts)):
        live = [i for i, counts in enumerate(cuts) if step < len(counts)]
        scheduled = tuple(
            ScheduledRequest(
                request=str(i),
                row=i,
                position=done[i],
                visits=((cuts[i][step], 0),),
                tokens=(0,) * cuts[i][step],
                pages=tuple(range(i * most, (i + 1) * most)) if step == 0 else (),
            )
            for i in live
        )
        view = buffers.load(StepPlan(step=step, phase="mixed", scheduled=scheduled, kv_pages_used=0)).cache
        spans = {i: slice(done[i], done[i] + cuts[i][step]) for i in live}
        query, rows = (torch.cat([whole[i][spans[i]] for i in live]) for whole in (queries, latents))
        view.write(0, rows.unsqueeze(1), rows.new_empty(len(rows), 1, 0))
        kv = rows[:, :rank] @ weight.T
        expected = torch.cat([written_out(core, queries[i], latents[i])[spans[i]] for i in live])
        for actual in (core.absorbed(query, view), core.expanded(query, kv, view), core.mixed(query, kv, view)):
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        for i in live:
            done[i] += cuts[i][step]


def written_out(core: LatentAttention, query: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of one request by arXiv:2405.04434, equations 40 to 45: [length, heads, value]."""
    mla, length = core.mla, len(query)
    kv = (latents[:, : mla.kv_lora_rank] @ core.weight.T).view(length, -1, mla.nope_dim + mla.value_dim)
    rotated = latents[:, None, mla.kv_lora_rank :].expand(-1, kv.shape[1], -1)
    keys = torch.cat((kv[..., : mla.nope_dim], rotated), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * core.scale
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), kv[..., mla.nope_dim :])
