"""Ray workers: the report is byte-identical to that of one process, and a task whose worker is killed runs again."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tapscope.cli import main
from tapscope.comparator import CompareOptions
from tapscope.comparator.pair_analysis.pool import batches_of
from tapscope.comparator.pipeline.match_runs import MatchedRuns, match_runs
from tapscope.comparator.pipeline.measure_pairs import analyzer_of
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.pipeline.ray_workers import PairSource, TaskSchedule, measure_batches
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.core.errors import ConfigError, DataError
from tapscope.sources import open_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs with two ranks each, with an equal, a rounded, a wrong and a missing site per layer."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 64, 64)).astype(np.float32)
    for name in ("base", "target"):
        is_target = name == "target"
        with RunFactory(tmp_path / name, mesh={"tp": 2}) as run:
            run.step()
            for i, value in enumerate(values):
                rounded = value.astype(np.float16).astype(np.float32) if is_target else value
                run.put(f"model.layers.{i}.norm:out", {0: value, 1: value})
                run.put(f"model.layers.{i}.mlp:out", dict(enumerate(np.split(rounded, 2, axis=1))), dims="t h[tp]")
                run.put(f"model.layers.{i}.attn:out", {0: value + (i == 4 and is_target), 1: value})
                run.put(f"model.layers.{i}.{name}:out", {0: value})
    return [str(tmp_path / "base"), str(tmp_path / "target")]


def matched_runs(runs: list[str]) -> MatchedRuns:
    baseline, target = map(open_run, runs)
    return match_runs(open_runs(baseline, target, CompareOptions(), (CorruptRecords(baseline), CorruptRecords(target))))


def test_a_task_finds_and_measures_the_same_pairs(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    matched = matched_runs(runs)
    source = pickle.loads(pickle.dumps(PairSource.of(matched)))  # noqa: S301
    monkeypatch.chdir("/")
    batches, begin = [batch for batch, _ in batches_of(matched.pairs)], 0
    expected = [analyzer_of(matched).packed(batch) for batch in batches]
    _, found = measure_batches(source, begin, [len(batch) for batch in batches])
    assert repr(found) == repr(expected)


def test_other_data_or_another_version_at_a_worker_is_one_sentence(runs: list[str]) -> None:
    source = PairSource.of(matched_runs(runs))
    _, error = measure_batches(structs.replace(source, id="1", digest=""), 0, [1])
    assert isinstance(error, DataError)
    assert "has different records on the worker than for the caller" in str(error)
    _, error = measure_batches(structs.replace(source, id="2", version="0.0"), 0, [1])
    assert isinstance(error, ConfigError)
    assert f"Ray worker on {socket.gethostname()}: it has tapscope" in str(error)


@given(st.lists(st.integers(1, 1 << 30), max_size=50), st.integers(1, 9), st.floats(1e6, 1e10))
def test_tasks_hold_every_batch_once_and_take_a_second(costs: list[int], num_workers: int, rate: float) -> None:
    schedule, found, seconds = TaskSchedule(costs), [], []
    while schedule.num_left:
        part = schedule.next(num_workers)
        seconds.append(sum(costs[at] for at in part) / rate)
        schedule.observe(part, seconds[-1])
        found += part
    assert found == list(range(len(costs)))
    assert all(each > 1.0 for each in seconds[1:-1])
    assert all(each < 20.1 + max(costs) / rate for each in seconds[1:])


def test_invalid_addresses_are_one_sentence(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *runs, "--ray", "auto", "--jobs", "2"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
    pytest.importorskip("ray", reason="needs the extra tapscope[ray]")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["diff", *runs, "--ray", address]) == 4
    err = capsys.readouterr().err
    assert err.startswith(f"tapscope: error: --ray {address}: no Ray cluster answers there (")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a local Ray cluster with two CPUs and a token."""
    pytest.importorskip("ray", reason="needs the extra tapscope[ray]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    log, token = tmp_path_factory.mktemp("ray") / "log", tmp_path_factory.mktemp("token") / "token"
    token.write_text(uuid4().hex)
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "token")
    patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with log.open("w") as out:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", *flags]
        head = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(30)
        patch.undo()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def diff(runs: list[str], *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tapscope", "diff", *runs, *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd="/"
    )


def tasks() -> list[int]:
    """Return the process ids of the workers that run a task of a diff below this process."""
    parents, found = dict[int, int](), list[int]()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(each.name)
            parents[pid] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            if (each / "cmdline").read_bytes().startswith(b"ray::tapscope diff"):
                found.append(pid)
    return [pid for pid in found if os.getpid() in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


@pytest.mark.soak
@pytest.mark.parametrize("flags", [(), ("--detail", "--verify"), ("--rtol", "0.01", "--all")])
def test_ray_does_not_change_a_byte_of_the_report(cluster: str, runs: list[str], flags: tuple[str, ...]) -> None:
    for more in ((), ("--json",)):
        alone, spread = diff(runs, *flags, *more), diff(runs, *flags, *more, "--ray", cluster)
        assert spread.communicate(timeout=120) == alone.communicate()
        assert spread.returncode == alone.returncode == 1


@pytest.mark.soak
def test_a_task_whose_worker_is_killed_runs_again(cluster: str, runs: list[str]) -> None:
    expected = diff(runs, "--json").communicate()[0]
    process, killed = diff(runs, "--json", "--ray", cluster), []
    while process.poll() is None and not killed:
        for pid in tasks()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        time.sleep(0.005)
    out, err = process.communicate(timeout=120)
    assert killed
    assert out == expected
    assert f"Worker PID: {killed[0]}" in err


@pytest.mark.soak
def test_a_task_that_is_lost_every_time_is_one_sentence(cluster: str, runs: list[str]) -> None:
    process, killed = diff(runs, "--ray", cluster), set[int]()
    while process.poll() is None:
        for pid in tasks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.005)
    out, err = process.communicate()
    assert (process.returncode, out) == (3, ""), err
    assert err.splitlines()[-1].startswith("tapscope: error: Ray lost a task 4 times")
    assert len(killed) >= 4
