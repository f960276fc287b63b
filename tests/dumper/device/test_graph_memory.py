"""What taps record during a capture and fire after a replay, as far as a CPU can show it; tests/gpu has the rest."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from tapscope.dumper import Dumper
from tapscope.dumper.device import cuda_graphs
from tapscope.dumper.device.graph_memory import Fetch, GraphMemory, fetch_here, fetching
from tapscope.sources import open_run


def captured(model: nn.Module, *args: torch.Tensor) -> cuda_graphs.GraphCapture:
    """What a capture of a call of the model leaves behind."""
    capture = cuda_graphs.GraphCapture()
    cuda_graphs._enter(capture)
    try:
        model(*args)
    finally:
        cuda_graphs._leave()
    return capture


def test_graph_taps_fire_a_step_for_each_replay_and_none_for_the_capture(tmp_path: Path) -> None:
    model, ids = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.arange(6)[None]
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="full"):
        for _ in range(3):
            model(ids)
    launches: list[int] = []
    with torch.no_grad(), Dumper(model, tmp_path / "graph", keep="full") as dumper:
        with dumper.rehearsal():
            model(ids)
        model(ids)
        capture = captured(model, ids)
        for step in (1, 2):
            assert capture.replayed(lambda step=step: launches.append(step)) is None
    capture.replayed(lambda: launches.append(3))  # the Dumper is closed
    assert launches == [1, 2, 3]
    eager, run = open_run(tmp_path / "eager"), open_run(tmp_path / "graph")
    assert [(r.key, r.hash) for r in run.records] == [(r.key, r.hash) for r in eager.records]
    assert [run.steps[n][0].info for n in range(3)] == [eager.steps[n][0].info for n in range(3)]
    assert run.ledger().complete


def test_graph_memory_rules_of_other_steps_leave_a_replay_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=["0:out=full every=2"]):
        capture = captured(model, torch.ones(2, 4))
        for _ in range(4):
            capture.replayed(lambda: None)
    assert [(r.key.step, r.key.site) for r in open_run(tmp_path / "run").records] == [(0, "0:out"), (2, "0:out")]


def test_graph_memory_capture_with_other_rules_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=["0:out=stats"]) as dumper:
        before = dumper.tap_state
        capture = captured(model, torch.ones(2, 4))
        dumper.configure(rules=["1:out=full"])
        assert dumper.tap_state != before
        capture.replayed(lambda: None)
        capture.replayed(lambda: None)
        dumper.configure(rules=["0:out=stats"])
        assert dumper.tap_state == before
    assert caplog.text.count("captured with other taps than those in place") == 1


def test_graph_memory_snapshots_what_a_replay_wrote() -> None:
    memory = GraphMemory(torch.device("cpu"))
    source = torch.arange(12.0).reshape(3, 4).t()
    kept, other = memory.keep(source), memory.keep(torch.ones(1 << 20, dtype=torch.bfloat16))
    fetch = Fetch(memory)
    with fetching(fetch):
        assert fetch_here() is fetch
        handle = fetch.handle_of(kept)
    assert fetch_here() is None
    assert handle is not None
    kept.zero_()  # the next replay
    handle.wait()
    found = torch.frombuffer((ctypes.c_ubyte * 48).from_address(handle.address), dtype=torch.float32)
    assert torch.equal(found.reshape(4, 3), source)
    assert fetch.handle_of(source) is None
    assert fetch.handle_of(kept[:, 1:]) is None
    assert (tail := fetch.handle_of(other[8:])) is not None
    assert tail.address % 16 == 0
    assert memory.keep(empty := torch.empty(0, 4)) is empty


def test_graph_memory_replays_of_graphs_captured_before_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with Dumper(model, tmp_path / "run", keep="full"):
        monkeypatch.setattr(cuda_graphs, "num_unknown_replays", cuda_graphs.num_unknown_replays + 2)
    assert "2 replays of CUDA graphs that were captured before the Dumper was opened" in caplog.text
    assert [e.fields["where"] for e in open_run(tmp_path / "run").events() if e.kind == "failed"] == ["step"]
