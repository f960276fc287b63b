"""The KV cache takes the remaining GPU memory, and the largest step and the CUDA graphs still fit."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from draft_heads import make_speculating

from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM

pytestmark = pytest.mark.gpu
SIZE = 6 << 30


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A 6 GiB GPU without other processes; torch's allocator is limited to that size."""
    torch.cuda.empty_cache()
    whole = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (SIZE - torch.cuda.memory_reserved(), SIZE))
    torch.cuda.set_per_process_memory_fraction(SIZE / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("graphs", ["off", "decode", "all"])
def test_cache_takes_what_is_left(
    tmp_path: Path, small_gpu: None, graphs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting above the available memory means all of it; the largest step and all graphs still fit."""
    path = make_llama(tmp_path / "model", seed=1, hidden_size=512, max_position_embeddings=8192, dtype="bfloat16")
    more: dict[str, Any] = {"max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 50, "cuda_graphs": graphs}
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig(keep="off"))
    with caplog.at_level("INFO"), LLM(path, device="cuda", observer=observer, **more) as llm:
        cache, runner = llm.engine.runner.cache_config, llm.engine.runner
        assert SIZE // 2 < sum(cache.group_bytes) < SIZE
        llm.generate([[7 + i % 90 for i in range(length)] for length in (8000, 130, 40, 5)], max_new_tokens=3)
        kinds = () if runner.graphs is None else (runner.graphs.decode, runner.graphs.prefill)
        taken = [each.num_bytes for each in kinds if each is not None]
    found = re.search(r"GPU memory of .* ([0-9.]+) GiB CUDA graphs, ([0-9.]+) GiB left free", caplog.text)
    assert found is not None
    assert "out of memory" not in caplog.text
    assert sum(taken) <= float(found[1]) * 2**30 + (64 << 20)
    assert len(taken) == {"off": 0, "decode": 1, "all": 2}[graphs]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3", "NEXTN"])
def test_cache_leaves_memory_for_the_draft(
    tmp_path: Path, small_gpu: None, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Reserves the draft's weights, graphs and cache; the largest step still fits."""
    path, settings = make_speculating(tmp_path, algorithm)
    more: dict[str, Any] = {"max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 50}
    with caplog.at_level("INFO"), LLM(path, device="cuda", dtype="bfloat16", **more, **settings) as llm:
        configs = [runner.cache_config for runner in (llm.engine.runner, llm.engine.draft_runner)]
        assert configs[0].num_pages == configs[1].num_pages
        llm.generate([[7 + i % 90 for i in range(length)] for length in (200, 130, 40, 5)] * 8, max_new_tokens=30)
        assert llm.engine.speculator.stats.num_draft_tokens > 0
    found = re.search(r"([0-9.]+) GiB the draft, ", caplog.text)
    assert found is not None
    print(algorithm, [sum(config.group_bytes) >> 20 for config in configs], "MiB;", found[0])
    assert "out of memory" not in caplog.text
