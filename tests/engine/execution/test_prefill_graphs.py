"""CUDA graphs of steps with prompts, imitated on a CPU: a graph reads and writes static memory only."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, make_llama
from graph_imitation import Imitating, imitate_prefill_graphs
from hypothesis import given
from hypothesis import strategies as st
from lora_adapters import ATTENTION, make_adapter
from moe_checkpoints import make_moe
from msgspec import structs
from torch import Tensor

from tapscope.core.errors import ConfigError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution import batch_invariant, decode_graphs, prefill_graphs
from tapscope.engine.execution.prefill_graphs import (
    PrefillGraphs,
    max_prefill_tokens,
    prefill_buckets,
)
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.paged_attention import AttentionSpec
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.kernels import triton
from tapscope.sources import open_run

pytest.importorskip("triton")
from tapscope.kernels.triton.paged_prefill import paged_prefill

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8], list(range(100, 109))]
PARAMS = [SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]


def attend_prompts(
    query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec, *, is_batch_invariant: bool
) -> Tensor | None:
    """Attend as on a GPU, in Triton's interpreter."""
    pools: Any = cache.pools(layer)
    tables = cache.page_table_of(layer), cache.starts, cache.lengths
    return paged_prefill(query, *pools, *tables, spec.scale, is_batch_invariant=is_batch_invariant)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps replayed by graphs, in engines created afterwards."""
    return imitate_prefill_graphs(monkeypatch)


def make(path: Path, family: str) -> Path:
    return make_checkpoint(path, family, seed=1) if family in FAMILIES else make_moe(path, family, seed=1)


def tokens_of(path: Path, **settings: Any) -> list[list[tuple[int, ...]]]:
    more = {"page_size": 4, "max_num_seqs": 4, "num_pages": 24, "max_num_batched_tokens": 24} | settings
    with LLM(path, check_invariants=True, **more) as llm:
        found = [[g.token_ids for g in llm.generate(PROMPTS, params)] for params in PARAMS]
        assert llm.engine.scheduler.stats.num_preemptions
    return found


def with_prompts(replays: list[StepPlan]) -> list[StepPlan]:
    return [plan for plan in replays if any(len(item.tokens) > 1 and not item.num_drafts for item in plan.scheduled)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_prefill_graphs_keep_the_tokens(tmp_path: Path, replays: list[StepPlan], family: str) -> None:
    """With full and chunked prompts, mixed with decoding requests, after prefix hits and preemption."""
    path = make(tmp_path / "model", family)
    assert tokens_of(path, cuda_graphs="all") == tokens_of(path, cuda_graphs="off")
    found = with_prompts(replays)
    counts = [[len(item.tokens) for item in plan.scheduled] for plan in found]
    assert any(1 in each and max(each) > 1 for each in counts)
    assert any(sum(count > 1 for count in each) > 1 for each in counts)
    assert any(not item.num_logits for plan in found for item in plan.scheduled)
    assert any(item.position and len(item.tokens) > 1 for plan in found for item in plan.scheduled)


def test_prefill_graphs_may_be_switched_off(tmp_path: Path, replays: list[StepPlan]) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    with LLM(path, page_size=4, cuda_graphs="decode") as llm:
        llm.generate(PROMPTS, max_new_tokens=2)
    assert replays
    assert not with_prompts(replays)


def test_prefill_graphs_with_drafts_keep_the_tokens(tmp_path: Path, replays: list[StepPlan]) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=2, seed=1)
    speculating = {"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 1}
    assert tokens_of(path, cuda_graphs="all", **speculating) == tokens_of(path, cuda_graphs="off")
    assert any(any(item.num_drafts for item in plan.scheduled) for plan in with_prompts(replays))


def test_prefill_graphs_are_batch_invariant(
    tmp_path: Path, replays: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logprob has the bits of the request alone in eager steps; attention runs in Triton's interpreter."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    monkeypatch.setattr(batch_invariant, "attend_prompts", attend_prompts)
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    asked = SamplingParams(max_new_tokens=3, ignore_eos=True, full_logprobs=True)
    found = []
    for more in ({"cuda_graphs": "all", "max_num_seqs": 4}, {"cuda_graphs": "off", "max_num_seqs": 1}):
        with LLM(path, page_size=4, batch_invariant=True, **more) as llm:
            found.append([[each.full for each in g.logprobs or ()] for g in llm.generate(PROMPTS, asked)])
    assert with_prompts(replays)
    assert found[0] == found[1]


def test_values_of_prompt_rows_come_from_the_graph(tmp_path: Path, replays: list[StepPlan]) -> None:
    path = make_moe(tmp_path / "model", "mixtral", seed=1)
    asked = SamplingParams(
        max_new_tokens=4, ignore_eos=True, routed_experts=True, hidden_states=True, prompt_logprobs=1
    )
    found = []
    for graphs in ("all", "off"):
        with LLM(path, page_size=4, max_num_seqs=4, cuda_graphs=graphs) as llm:
            found.append(llm.generate(PROMPTS, asked))
    assert with_prompts(replays)
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.routed_experts.array() == other.routed_experts.array()).all()
        np.testing.assert_allclose(one.hidden_states.array(), other.hidden_states.array(), rtol=1e-4, atol=1e-5)
        logprobs = [[each.logprob for each in g.prompt_logprobs if each is not None] for g in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


def test_padding_writes_to_the_dummy_page_alone(tmp_path: Path, replays: list[StepPlan]) -> None:
    with LLM(make_llama(tmp_path / "model"), page_size=4, cuda_graphs="all", prefix_cache=False) as llm:
        llm.generate([PROMPTS[1], PROMPTS[0]], max_new_tokens=1)
        for pool in llm.engine.runner.kv_cache.tensors():
            written = pool.flatten(3).any(-1)[0]  # of the first layer: [pages, slots]
            assert written[:-1].sum() == 35 + 12
            assert written[-1].any()
    assert with_prompts(replays)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tapped_steps_with_prompts_run_eagerly_in_as_many_rows(
    tmp_path: Path, replays: list[StepPlan], family: str
) -> None:
    """Padding is not recorded. Matrices have the sizes of the graph, so that their products have the same bits."""
    path = make(tmp_path / "model", family)
    rows: dict[str, set[int]] = {}
    runs = []
    for graphs in ("off", "all"):
        out = tmp_path / graphs
        observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer, cuda_graphs=graphs, page_size=4, max_num_batched_tokens=24) as llm:
            seen = rows[graphs] = set()
            llm.model.model.register_forward_pre_hook(lambda _module, args, seen=seen: seen.add(len(args[0])))
            llm.generate(PROMPTS, max_new_tokens=2)
        runs.append(open_run(out))
    assert not replays
    assert rows["all"] <= {1, 2, 4, 8, 16, 24}
    assert rows["off"] - rows["all"]
    compared = ([record for record in run.records if record.key.site != ":in[logits_to_keep]"] for run in runs)
    for one, other in zip(*compared, strict=True):
        assert (one.key, one.rows) == (other.key, other.rows)
        if one.entry:
            np.testing.assert_allclose(runs[1].array(other), runs[0].array(one), rtol=1e-4, atol=1e-5)
    assert all(run.ledger().complete for run in runs)


def test_graphs_captured_again_forget_the_last_step(tmp_path: Path, replays: list[StepPlan]) -> None:
    """Adapters and recorded experts of the last step are not captured."""
    path = make_moe(tmp_path / "model", "mixtral", seed=1)
    adapter = make_adapter(tmp_path / "a", path, ATTENTION, seed=1)
    asked = SamplingParams(max_new_tokens=6, ignore_eos=True, routed_experts=True)
    other = [token + 9 for token in PROMPTS[1]]
    with LLM(path, cuda_graphs="all", lora_paths=[f"a={adapter}"], page_size=4, prefix_cache=False) as llm:
        plain = llm.generate([PROMPTS[1]], asked)[0].token_ids
        recorded = llm.generate([other], asked)[0].routed_experts
        for more in ({"adapter": "a"}, {"experts": recorded}):
            llm.submit(other, max_new_tokens=3, **more)
            while llm.has_work:
                llm.step()
            llm.engine.runner.recapture_graphs()
            assert llm.generate([PROMPTS[1]], asked)[0].token_ids == plain
    assert with_prompts(replays)


def plan_of(counts: list[int], position: int = 5) -> StepPlan:
    scheduled = [
        ScheduledRequest(request=str(i), row=i, position=position, visits=((count, 0),), tokens=(7,) * count, pages=())
        for i, count in enumerate(counts)
    ]
    return StepPlan(step=0, phase="mixed", scheduled=tuple(scheduled), kv_pages_used=0)


def bucket_of(plan: StepPlan, sizes: list[int]) -> int | None:
    nothing: Any = torch.nn.Identity()
    return PrefillGraphs(nothing, nothing, sizes).bucket_of(plan)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=4), st.integers(1, 3000))
def test_prefill_bucket_is_the_smallest_that_fits(counts: list[int], max_tokens: int) -> None:
    sizes = prefill_buckets(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_tokens, 2048)
    fitting = [size for size in sizes if size >= sum(counts)]
    assert bucket_of(plan_of(counts), sizes) == (fitting[0] if fitting else None)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_limit_of_prefill_graphs_counts_the_weights_of_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(prefill_graphs, "_LAYER_FLOPS", 2e8)
    with LLM(make(tmp_path / "model", family)) as llm:
        config, layers = llm.model.config, llm.model.decoder.layers
        weights = sum(p.numel() for p in layers.parameters())
        if config.moe is not None:
            experts = sum(p.numel() for layer in layers for p in layer.mlp.experts.parameters())
            assert 0 < experts < weights
            weights -= experts * (1 - config.moe.top_k / config.moe.num_experts)
        assert max_prefill_tokens(llm.model) == pytest.approx(1e8 * len(layers) / weights, abs=64)
        assert max_prefill_tokens(llm.model) % 64 == 0


def test_prefill_bucket_of_steps_that_run_eagerly() -> None:
    chain = plan_of([3])
    tree = replace(chain, scheduled=(structs.replace(chain.scheduled[0], tree=(-1, 0, 0)),))
    plans = chain, tree, plan_of([3, 1], 100_000), plan_of([17])
    assert [bucket_of(plan, [16]) for plan in plans] == [16, None, 16, None]


def test_prefill_graphs_out_of_memory_leave_buckets_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At startup the largest bucket that fits into memory is captured; later failing steps run eagerly from then on."""
    monkeypatch.setattr(decode_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    buffers: Any = SimpleNamespace(fill=lambda plan, size, by_request: filled.append(size))
    model: Any = torch.nn.Linear(1, 1)
    model.tp = TensorParallel()
    graphs = PrefillGraphs(model, buffers, [2, 8, 32, 64])
    filled: list[int] = []

    def capture(size: int, *, is_alone: bool) -> Any:
        assert is_alone == bool(graphs._graphs)
        if size in (8, 64):
            raise torch.cuda.OutOfMemoryError
        nothing = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(graph=nothing, hold=lambda count: None, hidden=torch.zeros(size, 1))

    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.capture()
    assert list(graphs._graphs) == [32]
    sizes = [None if (hidden := graphs.run(plan_of([count]))) is None else len(hidden) for count in (1, 7, 6, 40)]
    assert sizes == [1, None, None, None]
    assert filled == [2]
    assert len(graphs.run(plan_of([30]))) == 30  # type: ignore[arg-type]
    warnings = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert [f"CUDA graph of {size} tokens" in warning for size, warning in zip((64, 8), warnings, strict=True)]
    assert "lower kv_cache_memory_bytes, or set cuda_graphs='decode'" in warnings[0]
    model.tp = TensorParallel(rank=1, size=2)
    with pytest.raises(ConfigError, match="rank 1: out of memory while capturing the CUDA graph of 64 tokens"):
        graphs.capture()


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("deepseek_v3", "latent attention (MLA)"),
        ("mamba2", "a recurrent state"),
        ("llama4", "attention within chunks"),
        ("llama", "heads of 320 features"),
    ],
)
def test_log_says_which_steps_with_prompts_run_eagerly(
    tmp_path: Path, replays: list[StepPlan], caplog: pytest.LogCaptureFixture, family: str, what: str
) -> None:
    shape = {"head_dim": 320} if family == "llama" else {}
    make_any: Any = make_checkpoint if family in FAMILIES else make_moe
    with caplog.at_level(logging.INFO), LLM(make_any(tmp_path / "model", family, **shape)) as llm:
        llm.generate(PROMPTS[:2], max_new_tokens=2)
    assert not with_prompts(replays)
    assert [entry.message for entry in caplog.records if "prompts" in entry.message] == [
        f"steps with prompts run eagerly: those with {what} cannot be captured"
    ]


@pytest.mark.parametrize("case", ["clean", "hooked", "taps on one rank", "taps"])
def test_prefill_graphs_of_two_ranks_keep_the_tokens(tmp_path: Path, replays: list[StepPlan], case: str) -> None:
    """A rank with hooks or taps computes as many rows as the other rank's graph, or gloo would reject the sum."""
    path = make_moe(tmp_path / "model", "mixtral", seed=1)
    asked = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with LLM(path, page_size=4, cuda_graphs="off", device="cpu") as llm:
        expected = [g.token_ids for g in llm.generate(PROMPTS, asked)]
    config = {
        "taps on one rank": DumperConfig(keep="off", rules=["layers.0.mlp:out=full rank=0"]),
        "taps": DumperConfig(keep="stats"),
    }.get(case, DumperConfig(keep="off"))
    observer = Imitating(partial(make_observer, out=str(tmp_path / "run"), config=config))
    rows: set[int] = set()
    with LLM(path, page_size=4, tp=2, device="cpu", observer=observer) as llm:
        if case == "hooked":
            llm.model.model.register_forward_pre_hook(lambda _module, args: rows.add(len(args[0])))
        assert [g.token_ids for g in llm.generate(PROMPTS, asked)] == expected
    assert bool(with_prompts(replays)) == (case == "clean")
    if case == "hooked":
        assert rows & {16, 24, 64}
    if case.startswith("taps"):
        with open_run(tmp_path / "run") as run:
            assert run.ledger().complete, run.ledger().sentences()
            assert {record.key.rank for record in run.records} == ({0} if case == "taps on one rank" else {0, 1})
