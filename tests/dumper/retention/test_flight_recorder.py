"""The flight recorder: keeps the last steps in bounded memory, writes them on request, each value at most once."""

import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import LIMIT_S, Job, wait_until
from rank_worker import build

from tapscope.core.errors import ConfigError
from tapscope.core.observe import StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.pipeline.record_batch import RecordBatch
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.retention.flight_recorder import FlightRecorder
from tapscope.dumper.selection.site_decision import CaptureSpec, SiteDecision
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.run import Run
from tapscope.sources import open_run

PORT = SitePort("layer:out", SiteDecision(default=CaptureSpec("full")), {})


class Bench:
    """A flight recorder in front of a real send queue, from which the test receives."""

    def __init__(self, num_steps: int, limit: int) -> None:
        self.backlog = SendQueue(1 << 30, None, None)
        self.flight = FlightRecorder(self.backlog, num_steps, limit)
        self.steps: dict[int, OpenStep] = {}
        self.number = -1
        self.num_values = 0
        self.taken: dict[int, list[int]] = {}
        """step -> values accepted while the step was current."""
        self.written: list[tuple[int, int]] = []
        """(step, value) in order of arrival."""
        self.events: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.number += 1
        self.steps[self.number] = OpenStep(StepInfo(step=self.number), self.number)
        self.flight.begin(self.number)
        self.taken[self.number] = []

    def put(self, nbytes: int) -> bool:
        """Put one value: a payload filled with a unique number."""
        slot = self.flight.reserve(nbytes)
        if slot is None:
            return False
        assert slot.buffer is not None
        self.num_values += 1
        slot.buffer[:] = self.num_values % 251
        stamp = Firing(self.steps[self.number], self.num_values)
        layout = RecordLayout(',"dtype":"uint8"', "uint8", [nbytes], nbytes, nbytes)
        pending = InflightRecord(PORT, stamp, self.num_values, layout, b'"x":0', self.number, self.num_values, slot)
        accepted = self.flight.put(pending)
        if accepted:
            self.taken[self.number].append(self.num_values)
        return accepted

    def drain(self) -> None:
        """Receive and acknowledge all queued items, as the pipeline and the recorder do."""
        self.backlog.flush()
        while items := self.backlog.take(0):
            batch = RecordBatch()
            for item in items:
                if isinstance(item, InflightRecord):
                    batch.add(item)
                    assert item.slot is not None
                    assert item.slot.buffer is not None
                    assert set(item.slot.buffer) <= {item.firing.occurrence % 251}
                    self.written.append((item.firing.step.info.step, item.firing.occurrence))
                elif isinstance(item, bytes):
                    self.events.append(json.loads(item))
            self.backlog.sent(1)
            self.backlog.acknowledged(batch)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("put"), st.integers(1, 3000)),
        st.tuples(st.just("release"), st.integers(1, 5)),
        st.tuples(st.just("drain"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=100)
@given(num_steps=st.integers(1, 4), limit=st.integers(2000, 20_000), operations=OPERATIONS)
def test_flight_recorder_releases_whole_steps_in_order_within_its_memory(
    num_steps: int, limit: int, operations: list[tuple[str, int]]
) -> None:
    bench = Bench(num_steps, limit)
    bench.begin()
    wanted: dict[int, set[int]] = {}
    flowing: set[int] = set()
    for name, amount in operations:
        if name == "begin":
            bench.begin()
        elif name == "put":
            if bench.put(amount) and bench.number in flowing:
                wanted[bench.number].add(bench.num_values)
        elif name == "drain":
            bench.drain()
        else:
            released = bench.flight.release(*bench.flight.window(amount), "test")
            assert released.steps == sorted(released.steps)
            assert released.num_values == sum(len(bench.taken[step]) for step in released.steps)
            for step in released.steps:
                assert step > bench.number - min(num_steps, amount)
                assert step not in wanted
                wanted[step] = set(bench.taken[step])
                if step == bench.number:
                    flowing.add(step)
        assert bench.flight.used <= limit
        assert bench.flight.used >= 0
    bench.drain()
    written: dict[int, set[int]] = {}
    for step, value in bench.written:
        written.setdefault(step, set()).add(value)
    assert written == {step: values for step, values in wanted.items() if values}
    assert len(bench.written) == sum(map(len, written.values()))
    assert bench.flight.take_discarded().num_values + len(bench.written) == sum(map(len, bench.taken.values()))
    assert bench.flight.used == 0
    assert sum(event["num_values"] for event in bench.events) <= len(bench.written)


def test_flight_recorder_long_loop_stays_within_its_memory() -> None:
    bench = Bench(50, 1 << 20)
    for step in range(2000):
        bench.begin()
        for nbytes in (1000, 2000 + step % 7, 300_000):
            assert bench.put(nbytes)
        bench.flight.append(b"x" * 100)
        assert bench.flight.used <= 1 << 20
        assert bench.flight._pool.held_bytes <= 1 << 20
    assert bench.flight.take_discarded().number == 2000


def test_flight_recorder_truncates_a_step_larger_than_its_memory() -> None:
    bench = Bench(3, 10_000)
    bench.begin()
    assert bench.put(3000)
    bench.begin()
    assert [bench.put(4000) for _ in range(4)] == [True, True, False, False]
    released = bench.flight.release(*bench.flight.window(3), "test")
    assert released.steps == [1]
    assert released.num_dropped == 2


def test_flight_recorder_releases_from_another_thread_lose_nothing_and_repeat_nothing() -> None:
    bench = Bench(3, 1 << 20)
    bench.begin()
    stop = threading.Event()

    def release() -> None:
        while not stop.is_set():
            bench.flight.release(*bench.flight.window(2), "thread")

    threads = [threading.Thread(target=release) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        if number % 5 == 0:
            bench.begin()
        assert bench.put(500 + number % 9)
        if number % 50 == 0:
            bench.drain()
    stop.set()
    for thread in threads:
        thread.join()
    bench.flight.release(*bench.flight.window(3), "last")
    bench.drain()
    values = [value for _, value in bench.written]
    assert len(values) == len(set(values))
    steps = {step for step, _ in bench.written}
    for step in steps:
        assert [v for s, v in bench.written if s == step] == bench.taken[step]


# ---- through the Dumper


def values_at(run: Run, step: int) -> dict[str, Any]:
    return {rec.key.site: run.array(rec) for rec in run.records if rec.key.step == step}


def steps_of(run: Run) -> list[int]:
    return sorted({rec.key.step for rec in run.records})


def forward(model: torch.nn.Module, dumper: Dumper, value: float) -> None:
    with torch.no_grad(), dumper.step(phase="toy"):
        model(torch.full((2, 8), value))


def test_flight_recorder_nan_releases_its_step_and_the_two_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    settings = {"keep": "full", "flight_recorder_steps": 3, "triggers": ["layers.*:out: nan -> keep"]}
    with Dumper(model, tmp_path / "run", **settings) as dumper:
        for step in range(12):
            forward(model, dumper, float("nan") if step == 7 else float(step))
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == sorted(run.steps) == [5, 6, 7]
        for step in (5, 6):
            assert set(values_at(run, step)) == {":in[x]", ":out"} | {
                f"layers.{n}:{p}" for n in (0, 1) for p in ("in[input]", "out")
            }
            assert (values_at(run, step)[":in[x]"] == step).all()
        assert np.isnan(values_at(run, 7)["layers.0:out"]).all()
        account = run.ledger()
        assert account.complete, account.sentences()
        (released,) = [event.fields for event in run.events() if event.kind == "released"]
        assert released["steps"] == [5, 6, 7]
        assert "nan" in released["reason"]
        assert "layers.0:out" in released["reason"]
        sites = [event.fields["site"] for event in run.events() if event.kind == "trigger"]
        assert sites == ["layers.0:out", "layers.1:out"]
        (rest,) = [event.fields for event in run.events() if event.kind == "unreleased"]
        assert rest["num_steps"] == 9
    assert any("layers.0:out" in message and "step 7" in message for message in caplog.messages)
    from tapscope.cli import main

    assert main(["info", str(tmp_path / "run")]) in (0, 1)
    assert "released" in capsys.readouterr().out


def test_flight_recorder_deduplicates_within_a_released_step(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=2) as dumper, torch.no_grad():
        for step in range(4):
            with dumper.step():
                model(torch.full((64, 128), float(step)))
        assert dumper.release(1, "asked").steps == [3]
    with open_run(tmp_path / "run") as run:
        assert run.ledger().complete, run.ledger().sentences()
        assert len({rec.entry for rec in run.records}) == 1
        assert len(run.records) == 6
        assert all((run.array(rec) == 3).all() for rec in run.records)


def test_flight_recorder_without_a_request_nothing_but_the_opening_reaches_the_disk(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=3) as dumper:
        for step in range(5):
            forward(model, dumper, float(step))
    with open_run(tmp_path / "run") as run:
        assert (run.records, run.steps) == ([], {})
        assert run.ledger().complete


def test_flight_recorder_exception_in_a_step_releases_it_and_its_past(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=3) as dumper:
        for step in range(6):
            forward(model, dumper, float(step))
        with pytest.raises(TypeError):
            forward(model, dumper, "no number")  # type: ignore[arg-type]
        with pytest.raises(RuntimeError), dumper.step():
            model(torch.ones(2, 7))
        forward(model, dumper, 9.0)
    with open_run(tmp_path / "run") as run:
        assert sorted(run.steps) == [4, 5, 6, 7]
        assert [step for _, step, _ in run.ledger().aborted_steps] == [6, 7]
        assert len(values_at(run, 5)) == 6


SCRIPT = """
import os, sys, time
import torch
sys.path.insert(0, {tests!r})
from rank_worker import build
from tapscope.dumper import Dumper
model = build()
dumper = Dumper(model, {run!r}, keep="full", flight_recorder_steps=3).open()
def step(value):
    with torch.no_grad(), dumper.step():
        model(torch.full((2, 8), float(value)))
for n in range(6):
    step(n)
{body}
"""


def script(tmp_path: Path, body: str) -> "subprocess.Popen[str]":
    text = SCRIPT.format(
        tests=str(Path(__file__).resolve().parents[2] / "support"), run=str(tmp_path / "run"), body=body
    )
    return warm.start("-c", text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended_recorder(run: Path) -> None:
    wait_until(lambda: not (run / "recorder.json").exists(), "the recorder ends")


def test_flight_recorder_uncaught_exception_writes_the_past(tmp_path: Path) -> None:
    process = script(tmp_path, "raise LookupError('gone')")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "LookupError: gone" in errors
    ended_recorder(tmp_path / "run")
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == [3, 4, 5]
        assert [e.fields["reason"] for e in run.events() if e.kind == "released"] == ["uncaught LookupError"]


def test_flight_recorder_end_of_a_process_that_closed_nothing_writes_the_past(tmp_path: Path) -> None:
    process = script(tmp_path, "sys.exit(3)")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    ended_recorder(tmp_path / "run")
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == [3, 4, 5]


@pytest.mark.parametrize("when", ["idle", "in a step"])
def test_flight_recorder_signal_writes_the_past_and_calls_who_listened_before(tmp_path: Path, when: str) -> None:
    # Many short waits: a signal that arrives between Python's last check and a wait is only handled after the wait.
    told = "assert any(told.wait(0.1) for _ in range(600))"
    wait = f"print('ready', flush=True)\n{told}"
    body = wait if when == "idle" else ""
    if when != "idle":
        body = f"""
with torch.no_grad(), dumper.step():
    model(torch.full((2, 8), 6.0))
    print('ready', flush=True)
    {told}
    model(torch.full((2, 8), 6.5))
"""
    body += "\nfor n in range(20, 24): step(n)\ndumper.close()\nprint('heard', *heard, flush=True)"
    before = """import logging, signal, threading
heard, told, log = [], threading.Event(), logging.getLogger("tapscope")
signal.signal(signal.SIGUSR2, lambda *a: heard.append(1))
log.addFilter(lambda record: told.set() or True if "flight recorder wrote" in record.getMessage() else True)
"""
    text = SCRIPT.replace("model = build()", before.replace("{", "{{").replace("}", "}}") + "model = build()")
    text = text.format(tests=str(Path(__file__).resolve().parents[2] / "support"), run=str(tmp_path / "run"), body=body)
    process = warm.start("-c", text, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGUSR2)
    rest, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, rest.strip()) == (0, "heard 1")
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == ([3, 4, 5] if when == "idle" else [4, 5, 6])
        assert run.ledger().complete, run.ledger().sentences()
        if when != "idle":
            assert {rec.key.occurrence for rec in run.records if rec.key.step == 6} == {0, 1}


def test_flight_recorder_release_over_http_reaches_every_rank_also_while_it_is_idle(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="full", flight_recorder_steps=4, control="127.0.0.1:0", pause_s=0.02) as job:
        wait_until(lambda: min(job.steps()) > 6, "both ranks are under way")
        status, answer = job.ask("capture", {"past": 3})
        assert status == 200, answer
        assert set(answer["ranks"]) == {"0", "1"}
        assert all(said["steps"] == 3 and said["bytes"] > 0 for said in answer["ranks"].values())
        status, answer = job.ask("configure", {"flight_recorder_steps": 0, "enabled": False})
        assert status == 200, answer
        status, answer = job.ask("capture", {"past": 3})
        assert (status, answer["error"]) == (400, "no flight recorder is on; configure flight_recorder_steps first")
    with open_run(tmp_path / "run") as run:
        for rank in (0, 1):
            steps = sorted({rec.key.step for rec in run.records if rec.key.rank == rank})
            (released,) = [event.fields for event in run.events(rank) if event.kind == "released"]
            assert steps == released["steps"]
            assert steps == list(range(steps[0], steps[0] + 3))
            assert all(run.steps[step][rank].ended for step in steps)


def test_flight_recorder_trigger_on_one_rank_lets_every_rank_write_the_same_steps(tmp_path: Path) -> None:
    settings = {
        "keep": "full",
        "flight_recorder_steps": 5000,
        "triggers": ["layers.0:out: rank == 1 and step == 12 -> keep"],
    }
    with Job(tmp_path / "run", 2, pause_s=0.05, control="127.0.0.1:0", **settings) as job:
        wait_until(lambda: min(job.steps()) > 16, "both ranks are past the step")
    with open_run(tmp_path / "run") as run:
        for rank in (0, 1):
            steps = {rec.key.step for rec in run.records if rec.key.rank == rank}
            assert steps == set(range(13)), rank
            reasons = [event.fields["reason"] for event in run.events(rank) if event.kind == "released"]
            assert reasons
            assert all("step 12, rank 1" in reason for reason in reasons)


def test_flight_recorder_steps_flow_into_a_full_memory_while_the_disk_is_slow(tmp_path: Path) -> None:
    """Released memory counts until it is written; later steps wait for it and are complete."""
    model = torch.nn.Identity()
    with (
        Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=4, flight_recorder_bytes=4 << 20) as dumper,
        torch.no_grad(),
    ):
        for step in range(8):
            with dumper.step():
                model(torch.full((256, 1024), float(step)))
            assert dumper.release(4, "again").steps == [step]
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == list(range(8))
        assert run.ledger().complete, run.ledger().sentences()


def test_flight_recorder_is_switched_on_and_off_while_the_model_runs(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        forward(model, dumper, 0.0)
        dumper.configure(flight_recorder_steps=2)
        for step in range(1, 5):
            forward(model, dumper, float(step))
        assert dumper.release(1).steps == [4]
        dumper.configure(flight_recorder_steps=4, flight_recorder_bytes="1MiB")
        for step in range(5, 8):
            forward(model, dumper, float(step))
        dumper.configure(flight_recorder_steps=0)
        forward(model, dumper, 8.0)
        with pytest.raises(ConfigError, match="configure flight_recorder_steps first"):
            dumper.release(1)
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == [0, 4, 8]
        assert run.ledger().complete, run.ledger().sentences()
        assert sum(e.fields["num_steps"] for e in run.events() if e.kind == "unreleased") == 6


def test_flight_recorder_forked_child_neither_writes_the_past_nor_hangs(tmp_path: Path) -> None:
    body = """
child = os.fork()
if child == 0:
    model(torch.ones(2, 8))
    sys.exit(5)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
step(6)
dumper.release(1)
dumper.close()
"""
    process = script(tmp_path, body)
    told, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, told.strip()) == (0, "5"), errors
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == [6]
        assert run.ledger().complete, run.ledger().sentences()


def test_flight_recorder_releases_late_gradients_with_their_step(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", grads=True, flight_recorder_steps=2) as dumper:
        for step in range(5):
            loss = model(torch.full((2, 8), float(step))).sum()
            loss.backward()
        assert dumper.release(2).steps == [3, 4]
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == [3, 4]
        assert {rec.key.pass_ for rec in run.records} == {"forward", "backward"}
        account = run.ledger()
        assert account.complete, account.sentences()
        assert account.seen == len(run.records)


def test_flight_recorder_threads_that_call_the_model_while_it_is_released_lose_nothing(tmp_path: Path) -> None:
    model = build()
    stop = threading.Event()
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=3) as dumper, torch.no_grad():

        def release() -> None:
            while not stop.is_set():
                dumper.release(2)

        thread = threading.Thread(target=release)
        thread.start()
        for step in range(60):
            with dumper.step():
                callers = [threading.Thread(target=model, args=(torch.full((2, 8), float(step)),)) for _ in range(3)]
                for caller in callers:
                    caller.start()
                for caller in callers:
                    caller.join()
        stop.set()
        thread.join()
        dumper.release()
    with open_run(tmp_path / "run") as run:
        account = run.ledger()
        assert account.complete, account.sentences()
        assert len({rec.key for rec in run.records}) == len(run.records)
        assert all(sum(rec.key.step == step for rec in run.records) == 3 * 6 for step in run.steps)
