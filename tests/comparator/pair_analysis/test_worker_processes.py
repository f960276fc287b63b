"""Worker processes: the report is byte-identical to that of one process, and a worker that is killed is reported."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st

from tapscope.cli import main
from tapscope.comparator import CompareOptions, compare
from tapscope.comparator.pair_analysis import pair_analyzer, pool
from tapscope.comparator.pair_analysis.worker_processes import shares_of
from tapscope.core.observe import RowSpan


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two runs with equal, rounded, wrong, missing, joined, replicated and unlike sites, and batches of 3 pairs."""
    monkeypatch.setattr(pool, "MAX_BATCH", 3)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(10)]
    for name, mesh in (("base", {}), ("target", {"tp": 2})):
        with RunFactory(tmp_path / name, mesh=mesh) as run:
            for step in range(2):
                rows = [RowSpan("0", 6 * step, 6, 0, 0)]
                run.step(rows=rows, token_ids=range(6 * step, 6 * step + 6), grid=(6,))
                for i, value in enumerate(values):
                    value = value if not (mesh and i == 4) else value + 0.5
                    value = value if not (mesh and i in (6, 7)) else value.astype(np.float16).astype(np.float32)
                    halves = dict(enumerate(np.split(value, 2, axis=1)))
                    run.put(f"model.layers.{i}.mlp:out", halves if mesh else value, dims="t h[tp]" if mesh else "t h")
                    run.put(f"model.layers.{i}.norm:out", {0: value, 1: value + (i == 5)} if mesh else value, dims=None)
                run.put("model.layers.3.odd:out", values[0][:, :3] if mesh else values[0])
                run.put(f"only.{name}:out", values[0])
                run.put("model.layers.9.unjoined:out", halves if mesh else values[9])
                run.put("model.layers.2.codes:out", np.arange(6) + (np.arange(6) > 3) * len(mesh))
    return [str(tmp_path / "base"), str(tmp_path / "target")]


FLAGS = [(), ("--detail", "--verify"), ("--rtol", "0.01", "--all")]


@pytest.mark.parametrize("flags", [FLAGS[0], pytest.param(FLAGS[1], marks=pytest.mark.soak), FLAGS[2]])
def test_jobs_do_not_change_a_byte_of_the_report(
    runs: list[str], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for jobs in ("1", "2", "5"):
        code = main(["diff", *runs, "--json", "--jobs", jobs, *flags])
        text = main(["diff", *runs, "--jobs", jobs, *flags])
        said.append((code, text, *capsys.readouterr()))
    assert said[0] == said[1] == said[2]
    assert said[0][:2] == (1, 1)
    assert "would fit" in said[0][2]  # dims are suggested in order, in the calling process


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_killed_worker_is_one_sentence(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_sending: bool
) -> None:
    caller, analyze = os.getpid(), pair_analyzer.PairAnalyzer.analyze_batch

    def cut_off(self, data):  # type: ignore[no-untyped-def]
        os.write(self.fileno(), bytes(data[: len(data) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    def killed(self, pairs):  # type: ignore[no-untyped-def]
        if os.getpid() != caller and any("layers.4" in (pair.target or pair.baseline).site for pair in pairs):
            os.kill(os.getpid(), signal.SIGKILL)
        return analyze(self, pairs)

    if is_sending:
        monkeypatch.setattr(Connection, "_send", cut_off)
    else:
        monkeypatch.setattr(pair_analyzer.PairAnalyzer, "analyze_batch", killed)
    assert main(["diff", *runs, "--jobs", "2"]) == 3
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("tapscope: error: a worker process of --jobs ended before it returned its results (signal 9;")
    assert err.count("\n") == 1


def test_an_exception_of_a_worker_is_raised(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self, pairs):  # type: ignore[no-untyped-def]
        raise KeyError("a bug")

    monkeypatch.setattr(pair_analyzer.PairAnalyzer, "analyze_batch", fails)
    with pytest.raises(KeyError, match="a bug"):
        compare(*runs, CompareOptions(jobs=2))


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1000"])
def test_invalid_jobs_are_a_usage_error(runs: list[str], jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *runs, f"--jobs={jobs}"]) == 2
    assert f"invalid number of processes {jobs!r}: expected 1 to 256" in capsys.readouterr().err


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1 << 30)), max_size=30), st.integers(1, 8))
def test_shares_hold_every_batch_once_and_are_balanced(sizes: list[tuple[int, int]], count: int) -> None:
    batches = [([None] * num, nbytes) for num, nbytes in sizes]
    shares = shares_of(batches, count)  # type: ignore[arg-type]
    assert sorted(at for share in shares for at in share) == list(range(len(batches)))
    assert all(share == sorted(share) for share in shares)
    costs = [(1 << 16) * num + nbytes for num, nbytes in sizes]
    loads = [sum(costs[at] for at in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
