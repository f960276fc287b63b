"""All ranks of a job behind one address, including dead, silent, late and divergent ranks."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from control_http import send
from jobs import LIMIT_S, Job, ask, wait_until
from rank_worker import build
from torch import nn

from tapscope.core import wire
from tapscope.core.errors import ConfigError, RecorderError, RuleError, TapscopeError
from tapscope.core.observe import RankInfo
from tapscope.core.wire import Message
from tapscope.dumper import Dumper
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.job.processes import is_alive
from tapscope.dumper.pipeline.recorder_process import find
from tapscope.dumper.recorder.recorder_state import DRIFT_S
from tapscope.dumper.recording.config_epoch import ConfigEpochs
from tapscope.dumper.transport.network import Endpoint
from tapscope.sources import open_run


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_control_ranks_stopped_rank_is_named_in_a_504_and_nothing_changes_anywhere(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 3, keep="off", control="127.0.0.1:0") as job:
        before = job.ask("state")[1]
        sleeper = job.processes[1]
        sleeper.send_signal(signal.SIGSTOP)
        wait_until(lambda: _stopped(sleeper.pid), "rank 1 stands still")
        try:
            status, answer = job.ask("configure", {"keep": "full"})
            assert (status, answer["ranks"]) == (504, {"0": "accepted", "1": "no answer", "2": "accepted"})
            assert answer["error"].startswith("rank 1 did not answer within 5 s (stopped?); nothing was changed")
            state = job.ask("state")[1]
            assert (state["epoch"], state["config"], state["change_under_way"]) == (0, before["config"], False)
            assert [rank["status"] for rank in state["ranks"]] == ["connected", "silent", "connected"]
            assert any(hint.startswith("no message from rank 1 (pid ") for hint in state["hints"])
            steps = job.steps()
            wait_until(lambda: min(job.steps()[0], job.steps()[2]) > max(steps) + 3, "the others go on")
        finally:
            sleeper.send_signal(signal.SIGCONT)
        wait_until(lambda: job.ask("state")[1]["ranks"][1]["status"] == "connected", "rank 1 is back")
        status, answer = job.ask("configure", {"keep": "stats"})
        assert (status, set(answer["ranks"])) == (200, {"0", "1", "2"}), answer
        wait_until(lambda: {r["epoch"] for r in job.ask("state")[1]["ranks"]} == {answer["epoch"]}, "all apply it")
    configs = [e for e in open_run(tmp_path / "run").events() if e.kind == "config"]
    assert {event.fields["keep"] for event in configs} == {"stats"}


def test_control_ranks_dead_rank_is_named_and_the_others_change_without_it(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 3, keep="off", control="127.0.0.1:0") as job:
        job.processes[2].kill()
        wait_until(lambda: job.ask("state")[1]["ranks"][2]["status"] == "died", "the recorder notices")
        status, answer = job.ask("configure", {"keep": "stats"})
        assert (status, answer["ranks"]["2"]) == (200, "died")
        assert all(isinstance(answer["ranks"][rank], int) for rank in "01")


def test_control_ranks_rank_that_dies_during_a_change_is_named_and_nothing_changes(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="off", control="127.0.0.1:0") as job:
        victim = job.processes[1]
        victim.send_signal(signal.SIGSTOP)
        wait_until(lambda: _stopped(victim.pid), "rank 1 stands still")
        answers: list[tuple[int, dict[str, Any]]] = []
        asking = threading.Thread(target=lambda: answers.append(job.ask("configure", {"keep": "full"})))
        asking.start()
        wait_until(lambda: job.ask("state")[1]["change_under_way"], "the change is under way")
        assert job.ask("configure", {"keep": "stats"})[0] == 409
        victim.kill()
        asking.join()
        status, answer = answers[0]
        assert (status, answer["ranks"]) == (504, {"0": "accepted", "1": "died"})
        assert answer["error"] == "rank 1 left before answering; nothing was changed"
        assert job.ask("state")[1]["epoch"] == 0
        assert job.ask("configure", {"keep": "stats"})[0] == 200


def test_control_ranks_second_capture_is_refused_unless_it_replaces_the_first(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="off", control="127.0.0.1:0", pause_s=0.02) as job:
        assert job.ask("capture", {"steps": 100_000, "rules": ["layers.0:out=stats", "*=off"]})[0] == 200
        status, answer = job.ask("capture", {"steps": 2})
        assert status == 409
        assert "the capture of 100000 steps of epoch 1 (rank 0: " in answer["error"]
        assert '"replace": true' in answer["error"]
        assert job.ask("state")[1]["capture_under_way"].startswith("the capture of 100000 steps")
        status, answer = job.ask("capture", {"steps": 2, "replace": True})
        assert (status, answer["ended"].startswith("the capture of 100000 steps of epoch 1")) == (200, True)
        wait_until(lambda: job.ask("state")[1]["capture_under_way"] is None, "the second capture ends")
        status, answer = job.ask("capture", {"steps": 1})
        assert (status, "ended" in answer) == (200, False)
        wait_until(lambda: job.ask("state")[1]["capture_under_way"] is None, "the third capture ends")
        assert job.ask("capture", {"steps": 100_000})[0] == 200
        status, answer = job.ask("configure", {"keep": "off"})
        assert (status, answer["ended"].startswith("the capture of 100000 steps")) == (200, True)
        wait_until(lambda: job.ask("state")[1]["capture_under_way"] is None, "a configuration ends a capture")
        assert job.ask("capture", {"steps": 1, "replace": 1})[0] == 400


def test_control_ranks_capture_that_no_rank_has_begun_is_under_way_too(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", keep="off", control="127.0.0.1:0") as dumper:
        url = f"http://{dumper.http}/dumper"
        assert ask(f"{url}/capture", {"steps": 3})[1]["ranks"] == {"0": "pending"}
        status, answer = ask(f"{url}/capture", {"steps": 3})
        assert (status, "(rank 0: pending) is in progress" in answer["error"]) == (409, True)
        assert ask(f"{url}/capture", {"steps": 1, "replace": True})[0] == 200


class Stage(nn.Module):
    """A pipeline stage: some layers of the model."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(8, 8) for layer in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@contextmanager
def _stages(run: Path, **settings: Any) -> Iterator[list[tuple[Dumper, nn.Module]]]:
    models = Stage(0, 1), Stage(2, 3)
    mesh = {"pp": 2}
    infos = [RankInfo(rank=rank, world_size=2, mesh=mesh, coords={"pp": rank}) for rank in (0, 1)]
    with (
        Dumper(models[0], run, info=infos[0], control="127.0.0.1:0", **settings) as first,
        Dumper(models[1], run, info=infos[1], **settings) as second,
    ):
        yield [(first, models[0]), (second, models[1])]


def test_control_ranks_rule_for_one_stage_is_accepted_and_one_for_none_refused(tmp_path: Path) -> None:
    with _stages(tmp_path / "run", keep="off") as ranks:
        url = f"http://{ranks[0][0].http}/dumper"
        status, answer = ask(f"{url}/configure", {"rules": ["layers.1:out=full", "layers.2:out=full"]})
        assert (status, answer["unmatched"]) == (200, {"0": ["layers.2:out=full"], "1": ["layers.1:out=full"]})
        status, answer = ask(f"{url}/configure", {"rules": ["layers.1:out=full", "layers.9=full"]})
        assert status == 400
        assert answer["error"] == (
            "rank 0: rule layers.9=full: no site matches 'layers.9'; layers are 0-1; "
            "rank 1: rule layers.9=full: no site matches 'layers.9'; layers are 2-3"
        )
        assert set(answer["ranks"]) == {"0", "1"}
        assert {m["path"] for m in ask(f"{url}/sites?glob=layers.*:out")[1]["modules"]} == {
            f"layers.{n}" for n in range(4)
        }
        for dumper, model in ranks:
            with dumper.step():
                model(torch.ones(1, 8))
            assert dumper.epoch == 1
    run = open_run(tmp_path / "run")
    assert {(r.key.rank, r.key.site) for r in run.records} == {(0, "layers.1:out"), (1, "layers.2:out")}


def test_control_ranks_configuration_may_name_layers_of_another_stage(tmp_path: Path) -> None:
    with _stages(tmp_path / "run", keep="off", rules=["layers.2:out=full", "layers.9:out=full"]) as ranks:
        hints = ask(f"http://{ranks[0][0].http}/dumper/state")[1]["hints"]
        assert len(hints) == 1
        assert hints[0].startswith("rule layers.9:out=full: no site matches 'layers.9:out'")
    info = RankInfo(rank=0, world_size=2, mesh={"tp": 2}, coords={"tp": 0})
    with pytest.raises(RuleError, match="no site matches 'layers.9'"):
        Dumper(Stage(0), tmp_path / "tp", info=info, rules=["layers.9=full"]).open()


CLOCK = """
import time
from pathlib import Path
from types import SimpleNamespace
from tapscope.dumper import state

state.time = SimpleNamespace(monotonic=lambda: time.monotonic() + {seconds} * Path({signal!r}).exists())
"""


@pytest.fixture
def wait_for_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that advances the clock of this test's recorders until drift between ranks becomes a hint."""
    signal, place = tmp_path / "it is later", tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(CLOCK.format(seconds=DRIFT_S + 0.5, signal=str(signal)))
    monkeypatch.syspath_prepend(place)
    return signal.touch


@pytest.mark.soak
def test_control_ranks_hints_name_lagging_and_missing_ranks(tmp_path: Path, wait_for_hints: Callable[[], None]) -> None:
    infos = [RankInfo(rank=rank, world_size=4) for rank in range(3)]
    first, second = build(), build()
    with (
        Dumper(first, tmp_path / "run", info=infos[0], control="127.0.0.1:0") as stepping,
        Dumper(second, tmp_path / "run", info=infos[2]) as idle,
    ):
        url = f"http://{stepping.http}/dumper/state"
        for _ in range(3):
            first(torch.ones(1, 8))
        stepping.configure(keep="full")  # on this rank only
        assert ask(url)[1]["hints"] == []
        wait_for_hints()
        first(torch.ones(1, 8))
        wait_until(lambda: len(ask(url)[1]["hints"]) == 3, "the hints come")
        missing, calls, lagging = ask(url)[1]["hints"]
        assert calls == "rank 2 called configure() less often than the others: do all ranks call it?"
        assert missing.startswith("2 of 4 ranks joined, the last ")
        assert "; ranks 1, 3 did not: does every rank open a Dumper with this run?" in missing
        assert lagging.startswith("rank 2 has not advanced for ")
        assert lagging.endswith("(it is in step -1, rank 0 in step 3): are all ranks calling dumper.step()?")
        for _ in range(4):
            second(torch.ones(1, 8))
        idle.configure(keep="full")
        wait_until(lambda: len(ask(url)[1]["hints"]) == 1, "the lagging rank has caught up")
        assert idle.next_step == 4


class Peer:
    """A fake rank that speaks the wire format directly, and can send messages that our Dumper would not."""

    def __init__(self, run: Path, rank: int, world: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(find(run)["address"])
        opening = {"world_size": world, "mesh": {}, "coords": {}, "pid": os.getpid(), "host": socket.gethostname()}
        self._num_said = self._num_heard = 0
        self._send("join", rank=rank, opening=opening, manifest={}, modules=[], config={})
        assert self.hear("joined").kind == "joined"

    def say(self, kind: str, **fields: Any) -> None:
        self._send(kind, n=self._num_said, **fields)
        self._num_said += 1

    def _send(self, kind: str, **fields: Any) -> None:
        self._socket.send_multipart(wire.encode(Message(kind, fields)))

    def hear(self, kind: str) -> Message:
        """Return the next message of ``kind``, answering heartbeats meanwhile."""
        while True:
            assert self._socket.poll(timeout=10_000), f"no {kind} came"
            message = wire.decode(self._socket.recv_multipart())
            self._num_heard += "n" in message.fields
            if message.kind == kind:
                return message
            self._send("position", current_step=0, sent=self._num_said, received=self._num_heard, has_gap=False)

    def close(self) -> None:
        self.say("close", current_step=0)
        self.hear("closed")
        self._socket.close()


def _release(dumper: Dumper, answers: list[tuple[int, dict[str, Any]]], past: int = 3) -> threading.Thread:
    url = f"http://{dumper.http}/dumper/capture"
    asking = threading.Thread(target=lambda: answers.append(ask(url, {"past": past})))
    asking.start()
    return asking


def test_control_ranks_release_asks_every_rank_and_reports_what_each_sent(tmp_path: Path) -> None:
    info, model = RankInfo(rank=0, world_size=3), build()
    answers: list[tuple[int, dict[str, Any]]] = []
    settings = {
        "keep": "full",
        "rules": ["layers.0:out=full", "*=off"],
        "flight_recorder_steps": 8,
        "control": "127.0.0.1:0",
    }
    with Dumper(model, tmp_path / "run", info=info, **settings) as dumper:
        for _ in range(2):
            model(torch.ones(1, 8))
        peer = Peer(tmp_path / "run", 1, 3)
        asking = _release(dumper, answers)
        message = peer.hear("release")
        assert message["past"] == 3
        peer.say("released", id=message["id"], steps=3, bytes=1000)
        asking.join()
        status, answer = answers.pop()
        nbytes = answer["ranks"]["0"]["bytes"]
        released = {"0": {"steps": 2, "bytes": nbytes}, "1": {"steps": 3, "bytes": 1000}, "2": "missing"}
        assert (status, answer, nbytes >= 2 * 8 * 4) == (200, {"past": 3, "ranks": released}, True)
        released["0"] = {"steps": 0, "bytes": 0}  # sent steps are not sent again

        asking = _release(dumper, answers)
        peer.say("released", id=peer.hear("release")["id"], problem="no flight recorder is on")
        asking.join()
        assert answers.pop() == (200, {"past": 3, "ranks": released | {"1": "no flight recorder is on"}})

        asking = _release(dumper, answers)
        peer.hear("release")
        assert ask(f"http://{dumper.http}/dumper/capture", {"past": 1})[0] == 409
        asking.join()
        status, answer = answers.pop()
        assert (status, answer["ranks"]) == (504, released | {"1": "no answer"})
        assert answer["error"].startswith("rank 1 did not answer within 5 s")
        peer.close()


def test_control_ranks_capture_reaches_the_disk_though_the_flight_recorder_is_on(tmp_path: Path) -> None:
    model = build()
    with Dumper(
        model, tmp_path / "run", keep="stats", flight_recorder_steps=3, mode="core", control="127.0.0.1:0"
    ) as dumper:
        url = f"http://{dumper.http}/dumper"
        for _ in range(4):
            model(torch.ones(1, 8))
        assert ask(f"{url}/capture", {"steps": 2})[1]["config"]["mode"] == "all"
        for _ in range(6):
            model(torch.ones(1, 8))
        assert ask(f"{url}/capture", {"past": 2})[1]["ranks"]["0"]["steps"] == 2
    records = open_run(tmp_path / "run").records
    full = {r.key.step for r in records if r.entry is not None}
    assert (full, {r.key.step for r in records}) == ({4, 5}, {4, 5, 8, 9})
    assert {r.key.site for r in records if r.key.step == 4} > {r.key.site for r in records if r.key.step == 9}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"past": 3}, "no flight recorder is on; configure flight_recorder_steps first"),
        ({"past": 0}, "past=0: must be an integer from 1"),
        ({"past": True}, "past=True: must be an integer"),
        ({"past": 3, "steps": 2}, "unknown field 'steps' of capture with past; the only valid field is past"),
    ],
)
def test_control_ranks_release_that_cannot_be_is_a_400(tmp_path: Path, body: dict[str, Any], says: str) -> None:
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0") as dumper:
        status, answer = ask(f"http://{dumper.http}/dumper/capture", body)
        assert (status, says in answer["error"]) == (400, True), answer


def test_control_ranks_whatever_happens_in_a_release_or_a_check_is_an_answer() -> None:
    def fails(past: int) -> tuple[int, int]:
        raise (ConfigError("not now") if past == 1 else ZeroDivisionError("oops"))

    def breaks(config: Any) -> None:
        raise ZeroDivisionError("oops")

    adoption = ConfigEpochs(breaks, release=fails)
    said = [adoption.on_message(Message("release", {"id": 7, "past": past}), 5) for past in (1, 2)]
    assert [m.fields["problem"] for m in said if m] == [
        "not now",
        "the flight recorder failed: ZeroDivisionError: oops",
    ]
    refused = adoption.on_message(Message("prepare", {"epoch": 1, "config": {}}), 5)
    assert refused is not None
    assert refused["problem"] == "this configuration cannot be checked: ZeroDivisionError: oops"
    assert adoption.take_due(100, None) == []


def test_control_ranks_two_commits_are_each_applied_at_their_own_step() -> None:
    adoption = ConfigEpochs(lambda config: None)
    for epoch, step in ((1, 5), (2, 6)):
        adoption.on_message(Message("prepare", {"epoch": epoch, "config": {}}), 3)
        adoption.on_message(Message("commit", {"epoch": epoch, "step": step}), 3)
    assert adoption.latest == 2
    assert adoption.take_due(4, None) == []
    assert [epoch for epoch, _ in adoption.take_due(5, None)] == [1]
    assert [epoch for epoch, _ in adoption.take_due(6, None)] == [2]
    assert (adoption.applied, adoption.latest) == (2, 2)


def test_control_ranks_word_of_the_host_may_come_before_the_commit() -> None:
    adoption = ConfigEpochs(lambda config: None)
    adoption.on_message(Message("prepare", {"epoch": 1, "config": {}}), 3)
    assert [epoch for epoch, _ in adoption.take_due(4, 1)] == [1]
    adoption.on_message(Message("commit", {"epoch": 1, "step": 4}), 4)
    assert adoption.take_due(5, 1) == adoption.take_due(6, None) == []
    assert adoption.latest == 1


def test_control_ranks_killed_recorder_leaves_an_address_that_is_known_to_be_dead(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0"):
        found = find(tmp_path / "run")
        os.kill(found["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(found["pid"]), "it is gone")
        with pytest.raises(RecorderError, match="was killed; tapscope info shows what it wrote"):
            find(tmp_path / "run")
    model = build()
    with Dumper(model, tmp_path / "run", force=True):
        assert find(tmp_path / "run")["pid"] != found["pid"]


def test_control_ranks_recorder_that_lets_nobody_in_for_a_while_has_not_ended(tmp_path: Path) -> None:
    where = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(where))
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(str(where))
        assert not Endpoint(f"ipc://{where}").has_ended
        for each in waiting:
            each.close()
    assert Endpoint(f"ipc://{where}").has_ended
    assert Endpoint(f"ipc://{tmp_path}/nothing").has_ended


def test_control_ranks_request_to_a_recorder_that_has_just_ended_is_a_503_at_once(tmp_path: Path) -> None:
    with Dumper(build(), tmp_path / "run", control="127.0.0.1:0"):
        client = ControlClient(find(tmp_path / "run")["address"])
    wait_until(lambda: not (tmp_path / "run/recorder.json").exists(), "the recorder ends")
    with pytest.raises(Exception, match="the recorder has ended; its run is closed"):  # and not: it did not answer
        client.call("state")
    with pytest.raises(RecorderError, match="its capture has ended or not begun"):
        find(tmp_path / "run")


@pytest.mark.soak
def test_control_ranks_requests_while_a_recorder_ends_are_all_answered(tmp_path: Path) -> None:
    for number in range(5):
        run = tmp_path / f"run{number}"
        with Dumper(build(), run, control="127.0.0.1:0") as dumper:
            address = str(dumper.http)
            statuses: list[int] = []
            asking = threading.Thread(target=lambda a=address, s=statuses: _ask_until_gone(a, s))
            asking.start()
            wait_until(lambda s=statuses: len(s) > 3, "it is asked")
        asking.join(LIMIT_S)
        assert not asking.is_alive()
        assert set(statuses) <= {200, 503}


def _ask_until_gone(address: str, statuses: list[int]) -> None:
    while True:
        try:
            statuses.append(send(address, "/dumper/state")[0])
        except (ConnectionRefusedError, ConnectionResetError):
            return


def test_control_ranks_run_that_a_reset_opened_states_how_to_reach_its_recorder(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", control="127.0.0.1:0") as dumper:
        assert ask(f"http://{dumper.http}/dumper/reset", {"run": "second"})[0] == 200
        assert find(tmp_path / "second") == find(tmp_path / "run")
        model(torch.ones(1, 8))
        with pytest.raises(Exception, match="rank 0 .* already has a writer"):
            Dumper(build(), tmp_path / "second", force=True).open()
    wait_until(lambda: not list(tmp_path.glob("*/recorder.json")), "the recorder leaves no trace")
    assert open_run(tmp_path / "second").ledger().complete


def _small_disk(path: Path) -> None:
    path.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "t", path], capture_output=True).returncode
    ):
        pytest.skip("no small file system can be mounted here")


@pytest.mark.soak
def test_control_ranks_disk_that_is_full_when_the_ranks_come_is_reported_to_each(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    _small_disk(disk)
    try:
        for left in (0, 4096, 8192, 12288):  # bytes for none of the files, address, manifest, first line
            with (disk / "filler").open("wb") as filler:
                filler.write(bytes(65536 - left))
            said = _two_ranks(disk / f"run{left}")
            assert said, left
            assert all("No space left on device" in text for text in said), (left, said)
            assert not any("did not answer" in text for text in said), (left, said)
            for run in disk.glob("run*"):
                shutil.rmtree(run)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _two_ranks(run: Path) -> list[str]:
    """Return the answers to two ranks that join at the same time."""
    said: list[str] = []

    def come(rank: int) -> None:
        try:
            Dumper(build(), run, info=RankInfo(rank=rank, world_size=2, mesh={"tp": 2})).open()
        except TapscopeError as error:
            said.append(f"rank {rank}: {error}")

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(LIMIT_S)
    assert not any(each.is_alive() for each in ranks)
    return said
