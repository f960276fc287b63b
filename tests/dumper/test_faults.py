"""Faults around a capture: the model continues, the run stays readable, and the fault is reported."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from jobs import Job, wait_until
from rank_worker import build

from tapscope.cli import main
from tapscope.core.errors import ConfigError, ListenError, RecorderError, RuleError, RunExistsError, StepError
from tapscope.core.observe import RankInfo
from tapscope.dumper import Dumper
from tapscope.dumper.pipeline import sender
from tapscope.sources import open_run


def test_dumper_killed_rank_leaves_a_readable_run_that_states_so(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="full", control="127.0.0.1:0") as job:
        wait_until(lambda: min(job.steps()) > 5, "both ranks record")
        job.processes[1].send_signal(signal.SIGKILL)
        wait_until(lambda: job.ask("state")[1]["ranks"][1]["status"] == "died", "the recorder notices")
        at_death = job.steps()[0]
        wait_until(lambda: job.steps()[0] > at_death + 3, "rank 0 goes on")
        assert job.end()[0] == 0
    run = open_run(tmp_path / "run")
    for record in run.records:
        run.array(record)
    lost = [event for event in run.events(1) if event.kind == "lost"]
    assert "died" in lost[0].fields["reason"]
    account = run.ledger()
    assert (account.lost_ranks, account.open_ranks, account.complete) == ([1], [], False)
    assert max(r.key.step for r in run.records if r.key.rank == 0) > at_death


def test_dumper_killed_recorder_never_stops_the_model(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 1, keep="full", control="127.0.0.1:0") as job:
        wait_until(lambda: min(job.steps()) > 5, "it records")
        os.kill(json.loads((tmp_path / "run/recorder.json").read_text())["pid"], signal.SIGKILL)
        (tmp_path / "run/recorder.json").unlink()
        assert job.end() == [0]
    run = open_run(tmp_path / "run")
    assert run.records
    for record in run.records:
        run.array(record)
    assert not run.closed


def test_dumper_killed_recorder_is_named_and_a_reset_continues_with_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, first = build(), tmp_path / "run"
    with Dumper(model, first, keep="full") as dumper:
        model(torch.ones(1, 8))
        dumper.configure(keep="stats")
        assert dumper.flush()
        os.kill(json.loads((first / "recorder.json").read_text())["pid"], signal.SIGKILL)
        model(torch.ones(1, 8))
        assert not dumper.flush(60.0)  # the recorder is known to be lost, so flush() does not wait
        wait_until(lambda: "was killed by SIGKILL" in caplog.text, "it is logged")
        with dumper.step(), pytest.raises(StepError, match="still open"):
            dumper.reset()
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken/notes.txt").write_text("mine")
        with pytest.raises(RunExistsError, match="taken"):
            dumper.reset("taken")
        dumper.reset("second")
        model(torch.ones(1, 8))
    assert len(open_run(first).steps) == 1
    assert open_run(first).ledger().killed_ranks == [0]
    assert main(["diff", str(first), str(first)]) == 1  # equal, but unwritten values are unknown
    second = open_run(tmp_path / "second")
    assert (sorted(second.steps), second.ledger().complete) == ([0], True)
    assert second.records
    assert all(record.entry is None for record in second.records)  # the configuration still applies


def test_dumper_recorder_outlasts_one_sigterm_and_states_why_it_ends_at_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Dumper(build(), tmp_path / "run") as dumper:
        recorder = json.loads((tmp_path / "run/recorder.json").read_text())["pid"]

        def is_lost_after_one_more() -> bool:
            with suppress(ProcessLookupError):  # the recorder may have exited already
                os.kill(recorder, signal.SIGTERM)
            dumper.dump("x", torch.ones(2))
            return not dumper.flush(60.0)

        assert not is_lost_after_one_more()
        wait_until(is_lost_after_one_more, "it ends")
        wait_until(lambda: "the recorder was stopped by a signal" in caplog.text, "it is logged")


def test_dumper_ranks_whose_recorder_was_killed_continue_together(tmp_path: Path) -> None:
    ranks = [Dumper(build(), tmp_path / "run", info=RankInfo(rank=rank, world_size=2)) for rank in range(2)]
    with ranks[0], ranks[1]:
        os.kill(json.loads((tmp_path / "run/recorder.json").read_text())["pid"], signal.SIGKILL)
        for dumper in ranks:
            dumper.dump("x", torch.ones(2))
            assert not dumper.flush(60.0)
        for dumper in ranks:
            dumper.reset()
            dumper.dump("x", torch.ones(2))
    run = open_run(tmp_path / "run-2")
    assert ([record.key.rank for record in run.records], run.ledger().complete) == ([0, 1], True)


def test_dumper_strict_raises_at_the_end_of_the_step_when_something_was_lost(tmp_path: Path) -> None:
    model = build()
    dumper = Dumper(model, tmp_path / "run", keep="full", backpressure="strict").open()
    os.kill(json.loads((tmp_path / "run/recorder.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(RecorderError, match="values up to step .* were lost"):
        for _ in range(100_000):
            model(torch.ones(1, 8))
    with pytest.raises(RecorderError, match="is incomplete"):
        dumper.close()


def test_dumper_captured_run_is_refused_and_replaced_only_by_force(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run"):
        model(torch.ones(1, 8))
    with pytest.raises(RunExistsError, match="--force"):
        Dumper(model, tmp_path / "run").open()
    with Dumper(model, tmp_path / "run", force=True):
        model(torch.ones(1, 8))
        model(torch.ones(1, 8))
    assert len(open_run(tmp_path / "run").steps) == 2


def test_dumper_second_dumper_of_the_same_rank_and_run_is_refused(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run"), pytest.raises(RecorderError, match="rank 0 .* already has a writer"):
        Dumper(build(), tmp_path / "run").open()


def test_dumper_control_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}"):
            Dumper(build(), tmp_path / "run", control=f"127.0.0.1:{port}").open()
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0") as dumper:
        assert dumper.http is not None


def test_dumper_control_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need a token; set the environment variable TAPSCOPE_CONTROL_TOKEN"):
        Dumper(build(), tmp_path / "run", control="0.0.0.0:0").open()


def test_dumper_rule_that_matches_no_site_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"no site matches 'layers.9'; layers are 0-1"):
        Dumper(build(), tmp_path / "run", rules=["layers.9=full"]).open()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keep": "some"}, "keep='some': must be one of off, stats, sketch, full"),
        ({"queue_bytes": 0}, "queue_bytes=0: must be an integer ≥ 1"),
        ({"queue": 5}, "unknown setting 'queue'"),
        ({"backpressure": None}, "backpressure=None"),
    ],
)
def test_dumper_bad_setting_names_field_value_and_rule(tmp_path: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Dumper(build(), tmp_path / "run", **settings)


def test_dumper_steps_neither_nest_nor_go_back(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run") as dumper:
        with dumper.step(), pytest.raises(StepError, match="do not nest"), dumper.step():
            pass
        assert dumper.next_step == 1


def test_dumper_exception_in_the_model_passes_through_and_ends_the_step(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run") as dumper:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(1, 5))
        model(torch.ones(1, 8))
        assert dumper.next_step == 2
    account = open_run(tmp_path / "run").ledger()
    assert account.aborted_steps == [(0, 0, "RuntimeError")]
    assert (account.lost, account.complete) == (0, False)


def test_dumper_drop_policy_never_waits_and_counts_what_it_dropped(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", backpressure="drop", queue_bytes=4096), torch.no_grad():
        for _ in range(20):
            model(torch.ones(64, 8))
    account = open_run(tmp_path / "run").ledger()
    assert account.dropped > 0
    assert account.seen == account.dropped + account.recorded
    assert not account.complete


def test_dumper_stopped_recorder_costs_one_timeout_and_no_more(tmp_path: Path) -> None:
    model = build()
    dumper = Dumper(model, tmp_path / "run", keep="full", queue_bytes=4096, block_timeout_s=0.3).open()
    recorder = json.loads((tmp_path / "run/recorder.json").read_text())["pid"]
    os.kill(recorder, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with torch.no_grad():
            for _ in range(30):
                model(torch.ones(64, 8))
        waited = time.monotonic() - began
    finally:
        os.kill(recorder, signal.SIGCONT)
    dumper.close()
    account = open_run(tmp_path / "run").ledger()
    assert account.dropped > 60  # with one timeout per value, this would take 18 seconds
    assert waited < 9
    assert account.lost == 0


def test_dumper_ranks_that_never_came_are_named(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", info=RankInfo(rank=0, world_size=3)):
        model(torch.ones(1, 8))
    assert open_run(tmp_path / "run").ledger().missing_ranks == [1, 2]


def test_last_messages_of_a_recorder_that_has_ended_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The recorder exits right after its close message, and its exit may be detected before the message is read."""
    closing, close = threading.Event(), sender.Sender.close
    monkeypatch.setattr(sender.Sender, "close", lambda self, message: (closing.set(), close(self, message))[1])
    monkeypatch.setattr(sender, "is_alive", lambda pid: not closing.is_set())
    monkeypatch.setattr(sender, "_PING_S", 0.0)
    monkeypatch.setattr(sender, "_LAST_MESSAGE_MS", 20_000)
    model = torch.nn.Linear(2, 2)
    with Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(1, 2))
    assert not caplog.text
    assert open_run(tmp_path / "run").ledger().complete
