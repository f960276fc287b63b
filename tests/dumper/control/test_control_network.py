"""Ranks and control clients of another host: a real TCP port, real keys, and (where allowed) another host name."""

import contextlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest
import zmq
from control_http import ctl
from jobs import LIMIT_S, WORKER, Job, wait_until
from rank_worker import build

from tapscope.core import wire
from tapscope.core.errors import ConfigError, ListenError, RecorderError, UnreachableError
from tapscope.core.observe import RankInfo
from tapscope.core.wire import Message
from tapscope.dumper import Dumper
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.transport.network import Endpoint, parse_network
from tapscope.sources import open_run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    run = tmp_path_factory.mktemp("network") / "run"
    with Job(run, 1, keep="stats", network="127.0.0.1", control="127.0.0.1:0") as job:
        yield job


def _found(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "recorder.json").read_text()))


def _elsewhere(run: Path, copy: Path, **changes: str) -> Path:
    """Create a run directory as seen from another host: only ``recorder.json``, with another host name."""
    copy.mkdir()
    found = _found(run) | {"host": "elsewhere"}
    found["network"] = found["network"] and found["network"] | changes
    (copy / "recorder.json").write_text(json.dumps(found))
    return copy


def test_control_network_rank_of_another_host_is_recorded_through_the_network(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(WORKER), str(run), "1", "2", "{}"]
    name_of_its_own = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*name_of_its_own, "true"], capture_output=True).returncode:
        pytest.skip("a process cannot have a host name of its own here")
    settings, environment = {"keep": "full", "network": "127.0.0.1"}, os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        warm.start(WORKER, run, 0, 2, json.dumps(settings), stdout=subprocess.PIPE, text=True),
        subprocess.Popen([*name_of_its_own, *command], stdout=subprocess.PIPE, text=True, env=environment),
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline().startswith("open"), rank
        client = ControlClient(Endpoint.of(_found(run)))
        wait_until(lambda: min(r["step"] for r in client.call("state")[1]["ranks"]) > 5, "both step")
        state = client.call("state")[1]
        assert [rank["host"] for rank in state["ranks"]] == [socket.gethostname(), "elsewhere"]
        assert "shm_bytes" not in state["ranks"][1]
        status, answer = client.call("configure", {"keep": "full", "rules": ["layers.1=off"]})
        assert (status, set(answer["ranks"])) == (200, {"0", "1"})
        wait_until(lambda: {r["epoch"] for r in client.call("state")[1]["ranks"]} == {1}, "both apply")
    finally:
        run.with_name("run.stop").touch()
        codes = [rank.wait(LIMIT_S) for rank in ranks]
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.close()
    assert codes == [0, 0]
    wait_until(lambda: not (run / "recorder.json").exists(), "the recorder ends")
    recorded = open_run(run)
    account = recorded.ledger()
    assert (account.lost, account.dropped, account.failed, account.problems) == (0, 0, 0, [])
    full = [r for r in recorded.records if r.key.rank == 1 and r.entry is not None]
    assert full
    for record in full[:20]:
        assert recorded.array(record).size


def test_control_network_client_with_the_key_is_accepted(job: Job, tmp_path: Path) -> None:
    assert stat.S_IMODE((job.run / "recorder.json").stat().st_mode) == 0o600
    endpoint = Endpoint.of(_found(_elsewhere(job.run, tmp_path / "copy")))
    assert endpoint.address.startswith("tcp://127.0.0.1:")
    assert endpoint.keys is not None
    assert endpoint.keys[1].decode() not in repr(endpoint)
    assert ControlClient(endpoint).call("state")[1]["run"] == str(job.run)
    done = ctl(tmp_path / "copy", "state")
    assert json.loads(done.stdout)["run"] == str(job.run), done.stderr


def test_control_network_wrong_key_and_none_are_refused_as_such(job: Job, tmp_path: Path) -> None:
    other, other_secret = (key.decode() for key in zmq.curve_keypair())
    for number, wrong in enumerate(({"secret_key": other_secret}, {"server_key": other})):
        run = _elsewhere(job.run, tmp_path / str(number), **wrong)
        with pytest.raises(UnreachableError, match="refused the key"):
            ControlClient(Endpoint.of(_found(run))).call("state")
        with pytest.raises(RecorderError, match="refused the key"):
            Dumper(build(), run, info=RankInfo(rank=1, world_size=2)).open()
        done = ctl(run, "state")
        assert (done.returncode, "refused the key" in done.stderr) == (4, True), done.stderr
    plain = Endpoint(_found(job.run)["network"]["address"])
    with plain.dealer() as channel:
        channel.send_multipart(wire.encode(Message("request", {"id": 1, "verb": "configure", "body": {"keep": "off"}})))
        assert not plain.wait(channel, 1.0)
    assert job.ask("state")[1]["epoch"] == 0


def test_control_network_refusal_names_the_setting_that_admits_other_hosts(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 1, keep="off") as job:
        run = _elsewhere(job.run, tmp_path / "copy")
        with pytest.raises(RecorderError, match="start rank 0 with network=ADDRESS of elsewhere"):
            Dumper(build(), run, info=RankInfo(rank=1, world_size=2)).open()
        done = ctl(run, "state")
        assert (done.returncode, "runs on elsewhere and listens there only" in done.stderr) == (4, True)


def test_control_network_random_bytes_on_the_port_of_the_network_disturb_nothing(job: Job) -> None:
    host, port = _found(job.run)["network"]["address"].removeprefix("tcp://").split(":")
    before, noise = job.steps()[0], random.Random(3)
    held = []
    for start in (b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE", b"GET / HTTP/1.1\r\n\r\n"):
        for size in (1, 64, 10_000):
            connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
            with contextlib.suppress(ConnectionError):
                connection.sendall(start + noise.randbytes(size))
            held.append(connection)
    wait_until(lambda: job.steps()[0] > before + 5, "steps go on")
    for connection in held:
        connection.close()
    assert ControlClient(Endpoint.of(_found(job.run) | {"host": "elsewhere"})).call("state")[0] == 200
    assert job.ask("state")[1]["ranks"][0]["status"] == "connected"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", "*")),
        ("127.0.0.1:0", ("127.0.0.1", "*")),
        ("127.0.0.1:700", ("127.0.0.1", "700")),
        ("::1", ("::1", "*")),
        ("[::1]:700", ("::1", "700")),
    ],
)
def test_control_network_network_is_a_host_and_maybe_a_port(where: str, expected: tuple[str, str]) -> None:
    assert parse_network(where) == expected


@pytest.mark.parametrize("where", ["", ":1", "0.0.0.0", "[::]:1", "127.0.0.1:x", "127.0.0.1:99999", "no such host"])
def test_control_network_network_that_cannot_be_is_one_clear_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="network="):
        Dumper(build(), tmp_path / "run", network=where).open()
    assert not (tmp_path / "run").exists()


def test_control_network_address_of_another_host_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"network='203\.0\.113\.7': cannot listen there"):
        Dumper(build(), tmp_path / "run", network="203.0.113.7").open()
    assert not (tmp_path / "run").exists()
