"""A real recorder on real disks: full, synced, killed."""

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from jobs import wait_until
from small_disk import small_disk as small_disk

from tapscope import Dumper, cli
from tapscope.core.errors import RecorderError
from tapscope.dumper.recorder import recorder
from tapscope.run_format.directory import RECORDER_LOG
from tapscope.run_format.repair import repair_run
from tapscope.sources import open_run


class Toy(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def complete(path: Path) -> bool:
    return cli.main(["verify", str(path)]) == 0


@pytest.mark.parametrize("fsync", ["never", "close", "segment", "batch"])
def test_recorder_every_fsync_policy_gives_a_complete_run(tmp_path: Path, fsync: str) -> None:
    model = Toy()
    with Dumper(model, out=tmp_path / "run", keep="full", fsync=fsync, segment_bytes=50_000) as dumper:
        for _ in range(6):
            with dumper.step():
                model(torch.randn(16, 64))
    assert complete(tmp_path / "run")
    assert len(open_run(tmp_path / "run").records) == 36


def test_recorder_disk_that_fills_up_ends_the_recording_and_not_the_model(
    small_disk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, path = Toy(256), small_disk / "run"
    dumper = Dumper(model, out=path, keep="full", min_free_bytes=None).open()
    for _ in range(12):
        with dumper.step():
            assert model(torch.randn(64, 256)).shape == (64, 256)
    dumper.close()
    assert not complete(path)
    with open_run(path) as run:
        assert 0 < len(run.records) < 72
        assert all(len(run.array(rec)) == 64 for rec in run.records if rec.entry)
        assert not any("unreadable" in problem or "truncated" in problem for problem in run.problems)
        assert f"{72 - len(run.records)} values were dropped" in caplog.text, "those that were on their way, too"
        (event,) = [event for event in run.events() if event.kind == "lost"]
        assert "No space left on device" in event.fields["reason"]
    wait_until(lambda: cli.main(["repair", str(path), "--check"]) == 0, "the recorder ends")
    capsys.readouterr()
    assert cli.main(["repair", str(path)]) == 0
    assert capsys.readouterr().out == "nothing to repair\n"


def test_recorder_what_a_killed_recorder_had_acknowledged_is_there_and_repaired(tmp_path: Path) -> None:
    model, path = Toy(), tmp_path / "run"
    dumper = Dumper(model, out=path, keep="full").open()
    for _ in range(3):
        with dumper.step():
            model(torch.randn(16, 64))
    wait_until(lambda: len(open_run(path).steps) == 3 and len(open_run(path).records) == 18, "three steps are on disk")
    os.kill(json.loads((path / "recorder.json").read_text())["pid"], signal.SIGKILL)
    with dumper.step():
        model(torch.randn(16, 64))
    dumper.close()
    assert not complete(path)
    assert [one.sealed for one in repair_run(path)] == [["seg-000000.safetensors"]]
    with open_run(path) as run:
        assert len([rec for rec in run.records if rec.key.step < 3]) == 18
        assert run.problems == []


def test_recorder_log_keeps_the_traceback_of_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: recorder.Recorder) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(recorder.Recorder, "open", lambda _: None)
    monkeypatch.setattr(recorder.Recorder, "run", fail)
    monkeypatch.setattr(recorder.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"segment_bytes": 1 << 20, "fsync": "never"})))
    with (tmp_path / RECORDER_LOG).open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        assert recorder.main([str(tmp_path)]) == RecorderError.exit_code
    assert "ZeroDivisionError: planted" in (tmp_path / RECORDER_LOG).read_text()
