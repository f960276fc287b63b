"""Failures of CUDA graph capture, with the GPU functions replaced."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapscope.core.errors import ConfigError, RankLostError
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution import decode_graphs
from tapscope.engine.execution.decode_graphs import DecodeGraphs


def graphs_without_memory(monkeypatch: pytest.MonkeyPatch, tp: TensorParallel) -> DecodeGraphs:
    """Return graphs of four buckets, two of which fit into memory."""
    monkeypatch.setattr(decode_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    model: Any = torch.nn.Linear(1, 1)
    model.tp = tp
    graphs = DecodeGraphs(model, SimpleNamespace(), [1, 2, 4, 8])  # type: ignore[arg-type]

    def capture(size: int) -> Any:
        if size < 4:
            raise torch.cuda.OutOfMemoryError
        return size

    monkeypatch.setattr(graphs, "_capture", capture)
    return graphs


def test_decode_graphs_out_of_memory_ends_one_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_without_memory(monkeypatch, TensorParallel(rank=1, size=2))
    with pytest.raises(ConfigError, match="rank 1: out of memory while capturing the CUDA graph of 2 rows; lower kv_c"):
        graphs.capture()


def test_decode_graphs_out_of_memory_keeps_the_captured_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_without_memory(monkeypatch, TensorParallel())
    graphs.capture()
    assert list(graphs._graphs) == [8, 4]
    warnings = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "out of memory while capturing the CUDA graph of 2 rows" in warnings[0]
    assert "lower kv_cache_memory_bytes, or set cuda_graphs='off'" in warnings[0]


def test_lost_rank_destroys_graphs_with_taps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort waits until no graph contains collectives; a step that is about to replay one fails."""
    graphs = graphs_without_memory(monkeypatch, TensorParallel(rank=1, size=2))
    destroyed: list[int] = []

    def capture(size: int, observer: Any = None, *, is_alone: bool = False) -> Any:
        return SimpleNamespace(graph=SimpleNamespace(reset=lambda: destroyed.append(size)), chosen=(), hidden=None)

    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.capture()
    captured = graphs.tapped(4, SimpleNamespace(tap_state="taps"))  # type: ignore[arg-type]
    assert captured is not None
    graphs.release()
    assert sorted(destroyed) == [1, 2, 4, 4, 8]
    with pytest.raises(RankLostError, match="rank 1 lost a peer"):
        graphs.replay(captured)


def test_peer_lost_while_graphs_are_measured_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort waits until no graph contains collectives, and this rank waits in NCCL.

    A graph whose capture ends afterwards is destroyed as well.
    """
    destroyed: list[int] = []
    is_free = threading.Event()

    class Group:
        def abort(self) -> None:
            assert is_free.wait(20)

    stream = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    tp = TensorParallel(0, 2, object(), Group())
    graphs = graphs_without_memory(monkeypatch, tp)

    def reset(size: int) -> None:
        destroyed.append(size)
        is_free.set()

    def capture(size: int) -> Any:
        if size == 4:
            peers = threading.Thread(target=tp._abort)  # as when a peer process has exited
            peers.start()
            peers.join(25)
            assert not peers.is_alive()
        return SimpleNamespace(graph=SimpleNamespace(reset=lambda: reset(size)))

    monkeypatch.setattr(graphs, "_capture", capture)
    with pytest.raises(RankLostError, match="rank 0 lost a peer"):
        graphs.measure()
    assert destroyed == [8, 4]
    assert not tp._graph_releases


@pytest.mark.parametrize("observed", [False, True])
def test_measured_graphs_are_not_released_twice(monkeypatch: pytest.MonkeyPatch, observed: bool) -> None:
    tp = TensorParallel(0, 2)
    graphs = graphs_without_memory(monkeypatch, tp)
    destroyed: list[int] = []
    again = SimpleNamespace(reset=lambda: destroyed.append(1))
    monkeypatch.setattr(graphs, "_capture", lambda size: SimpleNamespace(graph=again))
    graphs.measure(int(observed))
    assert len(destroyed) == 4
    tp._release_graphs()
    assert len(destroyed) == 4
    graphs.capture()
    assert list(graphs._graphs) == [8, 4, 2, 1]
