"""What happens where CUDA graphs cannot be had; without a GPU, whose functions are replaced."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution import cuda_graphs
from tapscope.engine.execution.cuda_graphs import DecodeGraphs
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.kernels import triton


def graphs_without_memory(monkeypatch: pytest.MonkeyPatch, tp: TensorParallel) -> DecodeGraphs:
    """Graphs of four buckets, of which two find memory."""
    monkeypatch.setattr(cuda_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    model: Any = torch.nn.Linear(1, 1)
    model.tp = tp
    graphs = DecodeGraphs(model, SimpleNamespace(), [1, 2, 4, 8])  # type: ignore[arg-type]

    def record(size: int) -> Any:
        if size < 4:
            raise torch.cuda.OutOfMemoryError
        return size

    monkeypatch.setattr(graphs, "_record", record)
    return graphs


def test_decode_graphs_out_of_memory_ends_one_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_without_memory(monkeypatch, TensorParallel(rank=1, size=2))
    with pytest.raises(ConfigError, match="rank 1: out of memory while capturing the CUDA graph of 2 rows; lower kv_c"):
        graphs.record()


def test_decode_graphs_out_of_memory_keeps_the_captured_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_without_memory(monkeypatch, TensorParallel())
    graphs.record()
    assert list(graphs._graphs) == [8, 4]
    warnings = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "out of memory while capturing the CUDA graph of 2 rows" in warnings[0]
    assert "lower kv_cache_memory_bytes, or set cuda_graphs='off'" in warnings[0]


def test_missing_triton_turns_graphs_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "_is_installed", lambda: False)
    plain, device = SimpleNamespace(is_plain=True, is_fp8=False), torch.device("cuda")
    cache = SimpleNamespace(is_split=False, kv_format=plain, device=device)
    model: Any = torch.nn.Identity()
    model.config = SimpleNamespace(num_layers=0, index=None, chunk=lambda layer: None)
    sizes = SimpleNamespace(num_state_slots=0)
    runner: Any = SimpleNamespace(device=device, cache_config=sizes, dtype="bfloat16", model=model, kv_cache=cache)
    config = EngineConfig(model="unused")
    assert not ModelRunner._can_capture_graphs(runner, config)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("CUDA graphs are off, steps run eagerly: Triton is not installed (pip")
