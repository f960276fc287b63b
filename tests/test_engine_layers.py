"""Layers alone: bit-equal to transformers' in bfloat16, and attention that does not care how a prompt is cut."""

from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA3_ROPE, make_llama
from engine_helpers import ThreadRanks, reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tapscope.engine.attention import attend
from tapscope.engine.cache import KVCache, Segment, StepCache
from tapscope.engine.layers.norm import RMSNorm
from tapscope.engine.layers.rope import RotaryEmbedding
from tapscope.engine.model_config import ModelConfig
from tapscope.engine.models.attention import rotate
from tapscope.engine.plan import Share, StepPlan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_where_transformers_rounds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = LlamaRMSNorm(64, 1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight, 1.0, 0.3, generator=generator)
    ours = RMSNorm(64, 1e-5, dtype)
    ours.weight.data.copy_(theirs.weight.data)
    x = torch.randn(50, 64, generator=generator).to(dtype)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500000.0}, LLAMA3_ROPE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_is_transformers_to_the_last_bit_or_two(
    tmp_path: Path, rope: dict, dtype: torch.dtype
) -> None:
    config = LlamaConfig(head_dim=32, num_attention_heads=4, hidden_size=128, rope_parameters=dict(rope))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    ours, theirs = RotaryEmbedding(ModelConfig.read(tmp_path)), LlamaRotaryEmbedding(config)
    # Llama 3.1's blend is written in another order of operations: its frequencies may differ by an ulp.
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=2**-22, atol=0)
    ours.inv_freq.copy_(theirs.inv_freq)
    positions = torch.tensor([0, 1, 2, 31, 32, 1000, 2047])
    x = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = ours(x, positions)
    expected_cos, expected_sin = theirs(x, positions[None])
    assert torch.equal(cos, expected_cos[0])
    assert torch.equal(sin, expected_sin[0])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], expected_cos, expected_sin)
    assert torch.equal(rotate(x, cos, sin), expected[0].transpose(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_attention_is_causal_and_the_same_however_a_sequence_is_cut(
    cuts: list[int], group: int, kv_heads: int, page_size: int, seed: int
) -> None:
    length, dim = sum(cuts), 8
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
    # The definition, written out: softmax over earlier positions, head h reading key/value head h // group.
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))

    num_pages = -(-length // page_size)
    cache = KVCache(1, num_pages + 2, page_size, kv_heads, dim, torch.float32)
    cache.keys.fill_(torch.nan)  # whatever is read before it was written shows
    cache.values.fill_(torch.nan)
    pages = torch.randperm(num_pages + 2, generator=generator)[:num_pages]
    outputs, position = [], 0
    for count in cuts:
        segment = Segment(0, count, position, pages)
        view, rows = StepCache(cache, [segment]), slice(position, position + count)
        view.write(0, k[rows], v[rows])
        outputs.append(attend(q[rows], *view.read(0, segment), segment))
        position += count
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_computed_in_chunks_has_the_logits_of_the_whole(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    tokens = tuple(range(30, 50))
    ranks = ThreadRanks(path, tmp_path / "store", 1, page_size=4)
    (runner,) = ranks.runners
    for step, (start, end) in enumerate([(0, 7), (7, 8), (8, 20)]):
        share = Share(request="a", position=start, visit=0, tokens=tokens[start:end], pages=(9, 3, 5, 4, 0))
        plan = StepPlan(step=step, phase="prefill", shares=(share,), all_logits=True, kv_pages_used=5)
        runner.execute(plan)
        runner.finish(plan)
    assert (runner.observer.logits_of("a") - reference_logits(path, tokens)).abs().max() <= 1e-4
    ranks.close()
