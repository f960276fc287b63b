"""Single layers: bit-equal to transformers' in bfloat16; attention does not depend on how a prompt is chunked."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import ThreadRanks, reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tapscope.engine import LLM
from tapscope.engine.execution.input_buffers import InputBuffers
from tapscope.engine.kv_cache.cache_layout import CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.kv_cache.step_cache import MAX_ELEMENTS, StepMasks
from tapscope.engine.layers import paged_attention
from tapscope.engine.layers.norm import GemmaRMSNorm, RMSNorm
from tapscope.engine.layers.paged_attention import AttentionSpec, attend, attend_one
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("norm", "reference_norm"), [(RMSNorm, LlamaRMSNorm), (GemmaRMSNorm, Gemma2RMSNorm)])
def test_rms_norm_rounds_like_transformers(norm: type, reference_norm: type, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = reference_norm(64, 1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight, 1.0, 0.3, generator=generator)
    ours = norm(64, 1e-5, dtype)
    ours.weight.data.copy_(theirs.weight.data)
    x = torch.randn(50, 64, generator=generator).to(dtype)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@settings(max_examples=80)
@given(
    cuts=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=3),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 9),
    softcap=st.none() | st.just(1.5),
    seed=st.integers(0, 1000),
)
def test_attention_is_causal_for_any_batching_and_chunking(
    cuts: list[list[int]],
    group: int,
    kv_heads: int,
    page_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    dim, value_dim, generator = 8, 6, torch.Generator().manual_seed(seed)
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    lengths = [sum(counts) for counts in cuts]
    qkv = [
        tuple(torch.randn(n, heads, width, generator=generator) for heads, width in _shapes(kv_heads, group, dim))
        for n in lengths
    ]
    expected = [_written_out(q, k, v[..., :value_dim], spec) for q, k, v in qkv]
    most = -(-max(lengths) // page_size)
    num_pages = most * len(cuts) + 2
    layout = CacheLayout(kv_heads=kv_heads, key_dim=dim, value_dim=value_dim)
    cache = KVCache([CacheGroup({0: layout}, num_pages)], page_size, KVFormat(torch.float32, torch.float32))
    for pool in cache.tensors():
        pool[:, :-1].fill_(torch.nan)  # reading an unwritten slot yields NaN
    pages = torch.randperm(num_pages, generator=generator)[: most * len(cuts)].view(len(cuts), most).tolist()
    buffers = InputBuffers(cache, sum(lengths), len(cuts), most)
    outputs: list[list[torch.Tensor]] = [[] for _ in cuts]
    done = [0] * len(cuts)
    for step in range(max(len(counts) for counts in cuts)):
        live = [i for i, counts in enumerate(cuts) if step < len(counts)]
        spans = {i: slice(done[i], done[i] + cuts[i][step]) for i in live}
        scheduled = [
            ScheduledRequest(
                request=str(i), row=i, position=done[i], visits=((cuts[i][step], 0),), tokens=(0,) * cuts[i][step],
                pages=tuple(pages[i]) if step == 0 else (),
            )
            for i in live
        ]  # fmt: skip
        view = buffers.load(StepPlan(step=step, phase="mixed", scheduled=tuple(scheduled), kv_pages_used=0)).cache
        q, k, v = (torch.cat([qkv[i][part][spans[i]] for i in live]) for part in range(3))
        view.write(0, k, v[..., :value_dim])
        parts = attend(q, 0, view, spec).split([cuts[i][step] for i in live])
        for i, part in zip(live, parts, strict=True):
            outputs[i].append(part)
            done[i] = spans[i].stop
    for parts, whole in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 230),
    before=st.integers(0, 150),
    heads=st.sampled_from([(4, 4), (8, 4), (8, 1)]),
    window=st.none() | st.integers(1, 400),
    softcap=st.none() | st.just(1.5),
)
def test_attend_one_in_blocks_equals_full_attention(
    count: int, before: int, heads: tuple[int, int], window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(count)
    shapes = (count, heads[0], 8), (before + count, heads[1], 8), (before + count, heads[1], 6)
    query, keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = torch.cat((torch.zeros(before, heads[0], 8, dtype=torch.float64), query))
    spec = AttentionSpec(scale=0.3, window=window, softcap=softcap)
    expected = _written_out(whole, keys, values, spec)[before:]
    torch.testing.assert_close(attend_one(query, keys, values, before, spec), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 60), before=st.integers(1, 50), most=st.integers(1, 4000), window=st.none() | st.just(9))
def test_attend_one_limits_mask_size_on_devices(count: int, before: int, most: int, window: int | None) -> None:
    shapes = (count, 8, 8), (before + count, 2, 8)
    query, keys = (torch.empty(shape, device="meta") for shape in shapes)
    sizes = []
    attend_folded = paged_attention._attend_folded

    def noting(*tensors: torch.Tensor) -> torch.Tensor:
        sizes.append(tensors[3].numel())
        return attend_folded(*tensors)

    with (
        mock.patch.object(paged_attention, "MAX_ELEMENTS", most),
        mock.patch.object(paged_attention, "_attend_folded", noting),
    ):
        assert attend_one(query, keys, keys, before, AttentionSpec(scale=0.3, window=window)).shape == (count, 8, 8)
    assert max(sizes) <= max(most, 4 * (before + count))
    assert len(sizes) == 1 or most < 4 * (before + 2 * count) * count


def test_step_masks_cache_masks_up_to_the_limit() -> None:
    made: list[int] = []
    masks = StepMasks()
    for _ in range(3):
        for size in (MAX_ELEMENTS // 2, MAX_ELEMENTS, 7):
            mask = masks.get(size)
            if mask is None:
                made.append(size)
                masks.add(size, torch.empty(size, dtype=torch.bool, device="meta"))
            else:
                assert mask.numel() == size
    assert made == [MAX_ELEMENTS // 2, MAX_ELEMENTS, 7, MAX_ELEMENTS, MAX_ELEMENTS]


def test_step_masks_are_made_once_per_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def noting(*arguments: Any) -> torch.Tensor:
        steps.append(llm.engine.scheduler.num_steps)
        return made(*arguments)

    made = paged_attention._piece_mask
    patched = mock.patch.object(paged_attention, "_piece_mask", noting)
    with LLM(make_llama(tmp_path / "model", seed=1), max_num_batched_tokens=20) as llm, patched:
        llm.generate([list(range(5, 65))], max_new_tokens=1)
    assert steps == [1, 2, 3], "of three layers each"


_MAPPED = """
import ctypes, torch
from tapscope.engine.execution.allocation import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ord sm hblks hblkhd usm fs uord ford keep".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def mapped():
    before = mallinfo().hblks
    block = torch.empty(31 << 20, dtype=torch.uint8)
    return mallinfo().hblks - before

keep_freed_memory()
print(mapped())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc's allocator keeps")
def test_keep_freed_memory_reuses_memory_between_steps() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _MAPPED], capture_output=True, text=True, env=environment, timeout=120)
    if "mallinfo2" in done.stderr:
        pytest.skip("an older glibc, which does not tell")
    assert done.stdout.split() == ["0"], done.stderr  # allocated from the heap, not by mmap


def _shapes(kv_heads: int, group: int, dim: int) -> list[tuple[int, int]]:
    return [(kv_heads * group, dim), (kv_heads, dim), (kv_heads, dim)]


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Apply the definition: softmax over the positions visible to a row; head h reads key/value head h // group."""
    group, length = q.shape[1] // k.shape[1], len(q)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    for i in range(length):
        scores[:, i, i + 1 :] = -torch.inf
        if spec.window is not None:
            scores[:, i, : max(0, i - spec.window + 1)] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))


def test_chunked_prefill_logits_equal_whole_prefill(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    tokens = tuple(range(30, 50))
    ranks = ThreadRanks(path, tmp_path / "store", 1, page_size=4)
    (runner,) = ranks.runners
    for step, (start, end) in enumerate([(0, 7), (7, 8), (8, 20)]):
        share = ScheduledRequest(
            request="a",
            position=start,
            visits=((end - start, 0),),
            tokens=tokens[start:end],
            pages=(9, 3, 5, 4, 0),
            num_logits=end - start,
        )
        plan = StepPlan(step=step, phase="prefill", scheduled=(share,), kv_pages_used=5)
        runner.execute(plan)
        runner.finish(plan)
    assert (runner.observer.logits_of("a") - reference_logits(path, tokens)).abs().max() <= 1e-4
    ranks.close()
