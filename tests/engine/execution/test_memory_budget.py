"""The KV cache gets the GPU memory left by a step and the CUDA graphs; a CPU imitates both."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from draft_heads import make_speculating
from graph_imitation import imitate_prefill_graphs
from moe_checkpoints import make_moe
from soak_cases import mostly_soak

from tapscope.core.errors import ConfigError
from tapscope.engine import LLM
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution import decode_graphs, draft_runner
from tapscope.engine.execution.decode_graphs import DecodeGraphs
from tapscope.engine.execution.memory_budget import MemoryBudget
from tapscope.engine.execution.model_runner import ModelRunner

pytest.importorskip("triton")

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300]]
MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Memory sizes that a CPU reports as a GPU: ``total``, ``free``, and ``reserved`` by a step."""
    memory = {"total": 1000 * MIB, "free": 400 * MIB, "reserved": 50 * MIB}
    imitate_prefill_graphs(monkeypatch)
    monkeypatch.setattr(ModelRunner, "_fills_free_memory", lambda self, config: config.num_pages is None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (memory["free"], memory["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: memory["reserved"])
    monkeypatch.setattr(DecodeGraphs, "measure", lambda self, num_tap_sets=0: 100 * MIB)
    return memory


@pytest.mark.parametrize(
    "family", mostly_soak(["llama", "gemma3", "deepseek_v3", "falcon_h1"], default=["llama", "falcon_h1"])
)
def test_cache_takes_what_is_left(
    tmp_path: Path, gpu: dict[str, int], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """400 MiB are free; a step takes 50, two kinds of graphs 100 each, and 50 stay free."""
    make: Any = make_checkpoint if family in FAMILIES else make_moe
    path = make(tmp_path / "model", family, seed=1)
    with LLM(path, cuda_graphs="off") as llm:
        expected = [g.token_ids for g in llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)]
    caplog.clear()
    with caplog.at_level("INFO"), LLM(path, kv_cache_memory_bytes=300 * MIB, max_num_batched_tokens=600) as llm:
        assert [g.token_ids for g in llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)] == expected
        cache = llm.engine.runner.cache_config
        kinds = 1 if family in ("deepseek_v3", "falcon_h1") else 2
        assert sum(cache.group_bytes) <= (300 - 100 * (kinds - 1)) * MIB
        if kinds == 2:
            assert caplog.text.count("is more than the GPU has left; the KV cache takes 104857600 bytes") == 1
    assert caplog.text.count("GPU memory of 0.98 GiB: 0.59 GiB weights and libraries, 0.05 GiB the largest step") == 1


@pytest.mark.parametrize(
    "algorithm",
    mostly_soak(["STANDALONE", "NEXTN", "EAGLE", "EAGLE3"], default=["STANDALONE", "EAGLE3"]),
)
def test_draft_is_counted_before_the_cache_is_made(
    tmp_path: Path,
    gpu: dict[str, int],
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The draft takes 30 MiB, and one page in its own cache per target page; 3 MiB remain for both caches."""
    kinds = 0 if algorithm == "NEXTN" else 2  # kinds of graphs; experts on a CPU cannot be captured
    gpu["free"] = (50 + kinds * 100 + 50 + 30 + 3) * MIB
    path, settings = make_speculating(tmp_path, algorithm)
    limits: dict[str, Any] = {"kv_cache_memory_bytes": 1000 * MIB, "max_num_seqs": 16, "max_num_batched_tokens": 600}
    with LLM(path, cuda_graphs="off", num_pages=64) as llm:
        expected = [g.token_ids for g in llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)]
    free: Iterator[int] = iter([400 * MIB, 370 * MIB])
    monkeypatch.setattr(draft_runner, "free_memory", lambda: next(free))
    with caplog.at_level("INFO"), LLM(path, **limits, **settings) as llm:
        assert next(free, None) is None
        target, draft = llm.engine.runner.cache_config, llm.engine.draft_runner.cache_config
        assert 2.9 * MIB < sum(target.group_bytes) + sum(draft.group_bytes) <= 3 * MIB
        assert [g.token_ids for g in llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)] == expected
        assert llm.engine.speculator.stats.num_draft_tokens > 0
    assert "0.03 GiB the draft" in caplog.text


def test_no_memory_for_the_cache_is_refused_with_the_numbers(tmp_path: Path, gpu: dict[str, int]) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=1)
    gpu["free"] = 299 * MIB
    wanted = r"no memory is left for the KV cache; of 0.98 GiB: .* 0.20 GiB CUDA graphs.*; lower max_num_batched_tokens"
    with pytest.raises(ConfigError, match=wanted):
        LLM(path)
    with LLM(path, num_pages=8) as llm:  # sized by the user
        assert llm.engine.runner.cache_config.num_pages == 8


def test_step_that_does_not_fit_is_refused(
    tmp_path: Path, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(self: ModelRunner, config: Any) -> int:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(ModelRunner, "_measure_step", measured)
    needed = "the largest step with the CUDA graphs does not fit into the free memory of cpu; lower max_num_batched_tok"
    with pytest.raises(ConfigError, match=needed):
        LLM(make_checkpoint(tmp_path / "model", "llama", seed=1))


def test_budget_of_the_fullest_rank_counts() -> None:
    budget = MemoryBudget(total=1000, free=500, step=100, graphs=50)
    assert budget.for_cache == 300
    assert [budget.limit(asked, 200) for asked in (100, 200, 300)] == [100, 200, 200]
    with_draft = MemoryBudget(total=1000, free=500, step=100, graphs=50, draft=60, cache_share=0.75)
    assert with_draft.for_cache == 180


def test_graphs_are_measured_by_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six buckets, the largest takes 40 bytes and the next three 6; so two more, and 6 with taps, take 16."""
    free: Iterator[int] = iter([100, 60, 57, 56, 54])
    monkeypatch.setattr(decode_graphs, "free_memory", lambda: next(free))
    monkeypatch.setattr(decode_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs.cuda, "Stream", lambda: None)
    model: Any = torch.nn.Linear(1, 1)
    model.tp, model.chosen = TensorParallel(), "of the last step"
    graphs = DecodeGraphs(model, SimpleNamespace(), [1, 2, 4, 8, 16, 24])  # type: ignore[arg-type]
    seen: list[int] = []

    def capture(size: int) -> Any:
        model.chosen = size
        return SimpleNamespace(graph=SimpleNamespace(reset=lambda: seen.append(size)))

    monkeypatch.setattr(graphs, "_capture", capture)
    assert graphs.measure(num_tap_sets=1) == 40 + 2 * 11
    assert sorted(seen) == [4, 8, 16, 24]
    assert model.chosen == "of the last step"
    assert not graphs._graphs
