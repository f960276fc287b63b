"""`tapscope ctl` as a process: by address over HTTP, by run over ZMQ."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_http import TOKEN, ctl
from jobs import Job, wait_until
from rank_worker import build

from tapscope.dumper import Dumper
from tapscope.dumper.pipeline.recorder_process import find


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("ctl") / "run", 2, keep="off", control="127.0.0.1:0") as job:
        yield job


@pytest.mark.parametrize("by", ["address", "run"])
def test_ctl_every_verb_works_by_address_and_by_run(job: Job, by: str) -> None:
    where = job.http if by == "address" else job.run
    state = json.loads(ctl(where, "state").stdout)
    assert [rank["status"] for rank in state["ranks"]] == ["connected", "connected"]
    changed = json.loads(ctl(where, "configure", "keep=stats", "rules=layers.0:out=full").stdout)
    assert (set(changed["ranks"]), changed["config"]["rules"]) == ({"0", "1"}, ["layers.0:out=full"])
    captured = json.loads(ctl(where, "capture", "--steps", "1000000", "--json").stdout)
    assert captured["config"]["capture_steps"] == 1_000_000
    refused = ctl(where, "capture", "keep=stats")
    assert (refused.returncode, "is in progress" in refused.stderr) == (2, True)
    replaced = ctl(where, "capture", "--replace", "keep=stats")
    first, ended = replaced.stdout.splitlines()
    assert re.fullmatch(r"capture of 1 step: rank(s 0-1|.*, rank .) (from step \d+|from its next step)", first)
    assert ended.startswith("ended: the capture of 1000000 steps")
    assert json.loads(ctl(where, "sites", "layers.1:out").stdout)["num_sites"] == 1
    assert json.loads(ctl(where, "reset", f"by-{by}").stdout)["run"] == str(job.run.with_name(f"by-{by}"))
    text = ctl(where, "metrics").stdout
    assert '\ntapscope_rank_up{rank="1"} 1.0\n' in text
    past = ctl(where, "capture", "--flight-recorder", "3")
    assert (past.returncode, "no flight recorder is on" in past.stderr) == (2, True)


def test_ctl_state_as_a_table_is_a_line_a_rank(job: Job) -> None:
    lines = ctl(job.run, "state", "--table").stdout.splitlines()
    assert lines[0].startswith(str(job.run.parent))
    assert lines[0].endswith("2 of 2 ranks")
    assert lines[1].split()[:4] == ["rank", "status", "step", "epoch"]
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "connected"], ["1", "connected"]]


def test_ctl_full_disk_refuses_a_capture_and_is_in_the_table(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="full", control="127.0.0.1:0", min_free_bytes=1 << 60) as job:
        wait_until(lambda: all(rank["stopped"] for rank in job.ask("state")[1]["ranks"]), "both ranks have stopped")
        table = ctl(job.run, "state", "--table").stdout
        assert "ranks 0-1 do not capture: " in table
        refused = ctl(job.run, "capture", "--steps", "2")
        assert refused.returncode == 2
        assert "nothing would be captured" in refused.stderr
        assert "min_free_bytes" in refused.stderr
        assert json.loads(ctl(job.run, "configure", "enabled=true").stdout)["warning"].startswith("nothing would be")
        assert "warning" not in json.loads(ctl(job.run, "configure", "enabled=false").stdout)
        assert ctl(job.run, "capture", "--steps", "2", "min_free_bytes=0").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["configure", "keep=some"], 2, "must be one of off, stats, sketch, full"),
        (["configure"], 2, "nothing to configure"),
        (["configure", "keep"], 2, "write NAME=VALUE"),
        (["sites", "nothing"], 2, "no site matches 'nothing'"),
        (["state", "x"], 2, "state: unexpected argument 'x'"),
        (["state", "--steps", "2"], 2, "--steps is an option of capture"),
        (["configure", "--replace"], 2, "--replace is an option of capture"),
        (["sites", "--table"], 2, "--table is an option of state"),
        (["capture", "--flight-recorder", "2", "--steps", "2"], 2, "--flight-recorder writes steps"),
        (["reset", "a/b"], 2, "must be a plain name"),
        (["nothing"], 2, "invalid choice"),
    ],
)
@pytest.mark.parametrize("by", ["address", "run"])
def test_ctl_wrong_call_is_exit_2_and_one_sentence(job: Job, by: str, words: list[str], code: int, says: str) -> None:
    done = ctl(job.http if by == "address" else job.run, *words)
    assert (done.returncode, done.stdout, says in done.stderr) == (code, "", True), done.stderr
    assert "Traceback" not in done.stderr


def test_ctl_token_comes_from_the_environment_or_a_flag(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0", control_token=TOKEN) as dumper:
        assert dumper.http is not None
        done = ctl(dumper.http, "state")
        assert (done.returncode, "this needs a token" in done.stderr) == (2, True)
        assert ctl(dumper.http, "state", TAPSCOPE_CONTROL_TOKEN=TOKEN).returncode == 0
        assert ctl(dumper.http, "metrics", "--token", TOKEN).returncode == 0
        assert ctl(dumper.http, "state", "--token", TOKEN + "x", TAPSCOPE_CONTROL_TOKEN=TOKEN).returncode == 2
        assert ctl(tmp_path / "run", "state").returncode == 0  # read access to the run's address permits control


def test_ctl_run_that_nobody_records_is_exit_4_and_states_why(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run"):
        pass
    wait_until(lambda: not (tmp_path / "run/recorder.json").exists(), "the recorder ends")
    done = ctl(tmp_path / "run", "state")
    assert (done.returncode, "its capture has ended or not begun" in done.stderr) == (4, True), done.stderr
    with Dumper(build(), tmp_path / "killed"):
        pid = find(tmp_path / "killed")["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), "it is gone")
        done = ctl(tmp_path / "killed", "state")
        assert (done.returncode, f"(pid {pid}) was killed" in done.stderr) == (4, True), done.stderr
    done = ctl(tmp_path / "nothing", "state")
    assert (done.returncode, "is neither the directory of a run nor [HOST:]PORT" in done.stderr) == (2, True), (
        done.stderr
    )


@pytest.mark.soak
def test_ctl_stopped_recorder_is_reported_within_the_limit(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0"):
        pid = find(tmp_path / "run")["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            done = ctl(tmp_path / "run", "state")
            assert (done.returncode, "did not answer within 10 s: is it stopped?" in done.stderr) == (4, True)
        finally:
            os.kill(pid, signal.SIGCONT)
