"""Control of two real ranks over real HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from jobs import Job, ask, wait_until
from rank_worker import build

from tapscope.core import wire
from tapscope.dumper import Dumper
from tapscope.dumper.recorder.control_handler import next_run
from tapscope.sources import open_run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    run = tmp_path_factory.mktemp("control") / "run"
    with Job(run, 2, enabled=False, control="127.0.0.1:0") as job:
        yield job


def test_control_state_reports_the_run_the_configuration_and_every_rank(job: Job) -> None:
    status, state = job.ask("state")
    assert status == 200
    assert state["run"] == str(job.run)
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
    assert all(rank["status"] == "connected" for rank in state["ranks"])
    assert state["config"]["enabled"] is False


def test_control_change_is_applied_by_both_ranks_at_one_step(job: Job) -> None:
    status, answer = job.ask("configure", {"enabled": True, "keep": "full", "rules": ["layers.1:out=stats", "*=off"]})
    assert status == 200
    steps = answer["ranks"]
    assert set(steps) == {"0", "1"}
    wait_until(lambda: all(rank["epoch"] == answer["epoch"] for rank in job.ask("state")[1]["ranks"]), "both apply")
    # Ranks step independently here: a rank past the named step applies the change at its next step and reports that. A
    # rank more than a second behind, on a busy machine, is reported as pending.
    status, off = job.ask("configure", {"enabled": False})
    assert (status, off["epoch"]) == (200, answer["epoch"] + 1)
    run = open_run(job.run)
    assert {record.key.site for record in run.records} == {"layers.1:out"}
    assert all(record.stats is not None and record.entry is None for record in run.records)
    for rank in (0, 1):
        assert steps[str(rank)] in (min(r.key.step for r in run.records if r.key.rank == rank), "pending")


def test_control_capture_keeps_n_steps_in_full_on_every_rank_and_falls_back(job: Job) -> None:
    before = job.ask("state")[1]["config"]
    status, answer = job.ask("capture", {"steps": 3, "rules": ["layers.0:out=full", "*=off"]})
    assert status == 200, answer
    wait_until(
        lambda: all(r["capture_steps_left"] is None for r in job.ask("state")[1]["ranks"]), "the capture is over"
    )
    assert job.ask("state")[1]["config"] == before
    run = open_run(job.run)
    for rank in (0, 1):
        full = [r for r in run.records if r.key.rank == rank and r.key.site == "layers.0:out"]
        assert [r.key.step for r in full] == list(range(full[0].key.step, full[0].key.step + 3))
        assert all(r.entry is not None for r in full)


def test_control_capture_falls_back_to_the_last_request_without_a_step(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", control="127.0.0.1:0") as dumper:
        url = f"http://{dumper.http}/dumper"
        model(torch.ones(1, 8))
        assert ask(f"{url}/configure", {"keep": "stats"})[1]["ranks"] == {"0": "pending"}
        assert ask(f"{url}/configure", {"keep": "off"})[1]["ranks"] == {"0": "pending"}
        status, answer = ask(f"{url}/capture", {"steps": 1})
        assert (status, answer["config"]["capture_steps"]) == (200, 1)
        for _ in range(2):
            model(torch.ones(1, 8))
    assert {r.key.step for r in open_run(tmp_path / "run").records} == {1}


def test_control_sites_can_be_listed_and_narrowed(job: Job) -> None:
    status, answer = job.ask("sites?glob=layers.1")
    assert status == 200
    ports = ["in[input]", "out", "param[weight]", "param[bias]"]
    assert answer["modules"] == [{"path": "layers.1", "class": "Linear", "ports": ports}]
    assert job.ask("sites?glob=nothing")[0] == 400


@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("configure", {"kep": "full"}, "unknown setting 'kep' (did you mean keep?); settings are enabled, keep, rules"),
        ("configure", {"keep": "some"}, "keep='some': must be one of off, stats, sketch, full"),
        ("configure", {"enabled": "yes"}, "enabled='yes': must be true or false"),
        ("configure", {"backpressure": "drop"}, "'backpressure' is fixed when the dumper starts"),
        ("configure", {"rules": ["layers.99.*=full"]}, "no site matches 'layers.99.*'; layers are 0-1"),
        ("configure", {"rules": "x=full"}, "must be a list"),
        ("configure", {"rules": [3]}, "must be a string GLOB=KEEP"),
        ("configure", {}, "nothing to configure"),
        ("configure", {"rules": ["layers.0:out=full"] * 1001}, "rules: 1001 given, at most 1000"),
        ("capture", {"steps": 0}, "steps=0: must be an integer from 1"),
        ("reset", {"run": "../elsewhere"}, "must be a plain name"),
        ("reset", {"path": "x"}, "unknown field 'path' of reset"),
        ("configure", [1], "must be a JSON object"),
    ],
)
def test_control_bad_request_is_a_400_that_states_what_would_work(job: Job, verb: str, body: object, says: str) -> None:
    epoch = job.ask("state")[1]["epoch"]
    status, answer = job.ask(verb, body)
    assert (status, says in answer["error"]) == (400, True), answer
    assert job.ask("state")[1]["epoch"] == epoch


def test_control_body_that_is_no_json_is_a_400(job: Job) -> None:
    status, answer = job.ask("configure", raw=b"{")
    assert status == 400
    assert "not valid JSON" in answer["error"]


def test_control_live_lines_are_published_and_numbered(job: Job) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    with socket:
        socket.connect(job.ask("state")[1]["live"])
        socket.subscribe(b"live")
        assert job.ask("configure", {"enabled": True, "keep": "stats", "rules": []})[0] == 200
        numbers, types = [], set()
        while not {"record", "metric", "step"} <= types or len(numbers) < 6:
            assert socket.poll(timeout=10_000), "nothing was published"
            message = wire.decode(socket.recv_multipart()[1:])
            numbers.append(message["n"])
            types |= {json.loads(line)["type"] for line in bytes(message.frames[0]).split(b"\n")}
        job.ask("configure", {"enabled": False})
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_control_random_bytes_on_the_socket_of_the_recorder_change_nothing(job: Job) -> None:
    address = json.loads((job.run / "recorder.json").read_text())["address"]
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with socket:
        socket.connect(address)
        for junk in ([b"\xff\x00"], [b"{}"], [b'{"tapscope":9,"kind":"hello"}'], [b'{"tapscope":1,"kind":"batch"}']):
            socket.send_multipart(junk)
            assert socket.poll(timeout=10_000)
            assert wire.decode(socket.recv_multipart()).kind == "refused"
    assert job.ask("state")[0] == 200


def test_control_run_after_a_numbered_one_has_the_next_number(tmp_path: Path) -> None:
    for name in ("run", "run-2", "run-20261122"):
        (tmp_path / name).mkdir()
    assert next_run(tmp_path / "run", {}) == next_run(tmp_path / "run-2", {}) == tmp_path / "run-3"
    assert next_run(tmp_path / "run-20261122", {}) == tmp_path / "run-20261122-2"
    assert next_run(tmp_path / "alone-7", {}) == tmp_path / "alone-7-2"


def test_control_reset_opens_a_new_run_next_to_the_old_one(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="stats", control="127.0.0.1:0") as job:
        wait_until(lambda: min(job.steps()) > 2, "steps are taken")
        status, answer = job.ask("reset", {"run": "second"})
        assert status == 200, answer
        changed = answer["ranks"]
        wait_until(lambda: all(rank["epoch"] == answer["epoch"] for rank in job.ask("state")[1]["ranks"]), "both apply")
        last = max(job.steps()) + 3
        wait_until(lambda: min(job.steps()) > last, "more steps are taken")
        assert job.ask("reset", {"run": "second"})[0] == 400
        assert job.ask("state")[1]["run"] == str(tmp_path / "second")
    first, second = open_run(tmp_path / "run"), open_run(tmp_path / "second")
    for run in (first, second):
        assert run.closed
        account = run.ledger()
        assert (account.lost, account.dropped, account.failed, account.problems) == (0, 0, 0, [])
        assert run.ranks == (0, 1)
    for rank in (0, 1):
        old = [r.key.step for r in first.records if r.key.rank == rank]
        new = [r.key.step for r in second.records if r.key.rank == rank]
        assert min(new) == max(old) + 1  # no step is missing or in both runs
        assert changed[str(rank)] in (min(new), "pending")  # pending: the rank was more than a second behind
    assert second.sites.keys() == first.sites.keys()
