"""Sparse attention to the keys that an indexer selects: the selection, its site, unsupported settings."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import with_config
from compare_runs import diff
from engine_helpers import reference, reference_logits
from moe_checkpoints import INDEXED, LATENT, make_moe

from tapscope.core.errors import CheckpointError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, Generation, SamplingParams
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import IndexKeys
from tapscope.engine.layers import indexer, mla
from tapscope.engine.layers.indexer import Indexer
from tapscope.kernels import triton
from tapscope.sources import open_run

PROMPT = [(11 * i + i // 3) % 500 for i in range(23)]


@pytest.mark.parametrize("rows", [5, 64])
def test_chosen_keys_are_those_of_transformers(tmp_path: Path, rows: int) -> None:
    """Each row selects six keys; a row with fewer positions selects all of them."""
    path, theirs, ours = make_moe(tmp_path / "model", "deepseek_v32", seed=3), [], []
    hook = (
        reference(path)
        .model.layers[2]
        .self_attn.indexer.register_forward_hook(lambda _, args, output: theirs.append(output[0]))
    )
    reference_logits(path, PROMPT)
    hook.remove()
    with LLM(path, page_size=4, max_num_batched_tokens=rows, prefix_cache=False) as llm:
        probe = llm.model.model.layers[2].self_attn.indexer.topk_indices
        probe.register_forward_hook(lambda _, args, output: ours.append(output))
        llm.generate([PROMPT], max_new_tokens=1)
    chosen = torch.cat(ours)
    assert chosen.shape == (len(PROMPT), 6)
    for row, (mine, other) in enumerate(zip(chosen.tolist(), theirs[0].tolist(), strict=True)):
        known = [position for position in mine if position >= 0]
        assert known == sorted(known)
        assert set(known) == {position for position in other if position <= row}


def test_kernels_choose_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU kernels in Triton's interpreter: single-row requests in one call, next to a chunked prompt."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    path, counts = make_moe(tmp_path / "model", "deepseek_v32", seed=3), []
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, full_logprobs=True)

    def run(name: str) -> list[Generation]:
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(path, page_size=4, max_num_batched_tokens=8, prefix_cache=False, observer=observer) as llm:
            return llm.generate([PROMPT[:2], PROMPT], params, request_ids=["a", "b"])

    plain = run("plain")
    attend_slots = mla.attend_slots

    def counted(query: torch.Tensor, *args: Any) -> torch.Tensor:
        counts.append(len(query))
        return attend_slots(query, *args)

    monkeypatch.setattr(indexer, "may_run_on", lambda device: True)
    monkeypatch.setattr(mla, "attend_slots", counted)
    for one, other in zip(run("kernels"), plain, strict=True):
        assert one.token_ids == other.token_ids
        found, expected = (torch.tensor([each.full for each in g.logprobs or ()]) for g in (one, other))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert {1, 2} == set(counts)
    ours, theirs = (open_run(tmp_path / name) for name in ("kernels", "plain"))
    site = "self_attn.indexer:tap[topk_indices]"
    pairs = [pair for pair in zip(ours.records, theirs.records, strict=True) if pair[0].key.site.endswith(site)]
    assert len(pairs) > 20
    for one, other in pairs:
        assert one.key == other.key
        np.testing.assert_array_equal(ours.array(one), theirs.array(other))


def test_diff_counts_the_keys_that_a_wrong_indexer_does_not_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one layer, a row may not attend to itself, which changes one of six keys."""
    path = make_moe(tmp_path / "model", "deepseek_v32", seed=3)

    def record(name: str) -> Path:
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer, prefix_cache=False) as llm:
            llm.generate([PROMPT], max_new_tokens=1, request_ids=["a"])
        return tmp_path / name

    sound, choose = record("sound"), Indexer._choose

    def without_own(self: Indexer, query: Any, weights: Any, segment: Any, cache: Any) -> torch.Tensor:
        ids = choose(self, query, weights, segment, cache)
        own = segment.position + torch.arange(len(ids)).unsqueeze(1)
        return torch.where((ids == own) & (own >= 6), -1, ids) if self.layer == 1 else ids

    monkeypatch.setattr(Indexer, "_choose", without_own)
    report = diff(sound, record("wrong"))
    site = "model.layers.1.self_attn.indexer:tap[topk_indices]"
    assert report.first_divergence is not None
    assert report.first_divergence.site == site, str(report)
    found = next(finding for finding in report.findings if finding.site == site)
    assert found.choices is not None
    assert (found.choices.k, found.choices.num_rows, found.choices.max_different) == (6, len(PROMPT), 1)
    assert 0 < found.choices.num_different == found.choices.num_rows_different < len(PROMPT)
    assert "1 of 6 keys differ in the worst row" in str(report)


@pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.soak)])
def test_batch_invariant_mode_chooses_the_same_keys_alone_and_in_any_batch(tmp_path: Path, family: str) -> None:
    """With chunks, prefix hits and preemption; fewer and more positions than selected keys and than a block of keys."""
    path = make_moe(tmp_path / "model", family, seed=3, max_position_embeddings=256)
    prompts = [PROMPT, PROMPT[:3], [(7 * i + i // 5) % 500 for i in range(150)], [*PROMPT[:13], 9, 8], [7, 7, 7, 7, 7]]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=2)
    alone = []
    for prompt in prompts:
        with LLM(path, batch_invariant=True, prefix_cache=False, max_num_batched_tokens=256) as llm:
            alone += llm.generate([prompt], params)
    options: dict[str, Any] = {"page_size": 4, "num_pages": 46, "max_num_batched_tokens": 13, "check_invariants": True}
    with LLM(path, batch_invariant=True, **options) as llm:
        for count in (5, 1, 1):
            found = llm.generate(prompts[:count], params)
            assert [(each.token_ids, each.logprobs) for each in found] == [
                (each.token_ids, each.logprobs) for each in alone[:count]
            ]
        assert llm.engine.scheduler.stats.cached_tokens > 0
        assert llm.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is None; the indexer reads the queries' latent"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim is 4; it is less than qk_rope_head_dim"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .'dense'.; expected dense or sparse for"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types is .*; .* layers of indexed_attention"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared"] * 3},
            "indexer_types is .*; expected full or shared for each of 3",
        ),
    ],
)
def test_sparse_attention_config_errors_name_field_and_rule(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    path = make_moe(tmp_path / "model", family)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(with_config(tmp_path, path, change))


def test_index_keys_are_cached_where_a_layer_has_an_indexer(tmp_path: Path) -> None:
    """Index keys share the latents' pages, in the model's dtype; the second layer reuses the first's keys."""
    index, latent, rotated = INDEXED["index_head_dim"], LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    for dtype, stored in (("auto", 4), ("fp8", 1)):
        with LLM(make_moe(tmp_path / dtype, "glm_moe_dsa"), kv_cache_dtype=dtype) as llm:
            latents, keys = 3 * (latent * stored + rotated * 4), 2 * index * 4
            assert llm.engine.runner.cache_config.position_bytes == latents + keys
            cache = llm.engine.runner.kv_cache
            assert cache.layers == (0, 1, 2)
            assert cache.group_of(IndexKeys(0)) == cache.group_of(0)
            with pytest.raises(KeyError):
                cache.group_of(IndexKeys(1))
