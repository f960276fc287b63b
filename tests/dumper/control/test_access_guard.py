"""Access to the control address: tokens, web pages, body sizes, bytes that are not HTTP."""

import contextlib
import json
import os
import random
import resource
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest
from control_http import TOKEN, bearer, send
from jobs import LIMIT_S, Job, wait_until
from rank_worker import build
from soak_cases import mostly_soak

from tapscope.core.errors import ConfigError, ListenError
from tapscope.dumper import Dumper
from tapscope.dumper.control.access_guard import Guard
from tapscope.http.access import RequestRefused
from tapscope.http.listen import parse_address
from tapscope.sources import open_run


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    run = tmp_path_factory.mktemp("guarded") / "run"
    previous = os.environ.get("TAPSCOPE_CONTROL_TOKEN")
    os.environ["TAPSCOPE_CONTROL_TOKEN"] = TOKEN
    try:
        job = Job(run, 2, popen=warm.WarmPopen, keep="off", control="0.0.0.0:0")
    finally:
        os.environ.pop("TAPSCOPE_CONTROL_TOKEN")
        if previous is not None:
            os.environ["TAPSCOPE_CONTROL_TOKEN"] = previous
    with job:
        yield job


@pytest.fixture(scope="module")
def open_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("open") / "run", 1, keep="off", control="127.0.0.1:0") as job:
        yield job


def _address(job: Job) -> str:
    assert job.http is not None
    return job.http.replace("0.0.0.0", "127.0.0.1")


PATHS = ("/dumper/state", "/dumper/sites", "/metrics", "/openapi.json", "/dumper/nothing", "/", "/dumper/configure")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong-horse-battery"), {"Authorization": TOKEN}, bearer(TOKEN + "é")])
def test_guard_without_the_token_every_path_is_a_401(guarded: Job, path: str, headers: dict[str, str]) -> None:
    headers = {name: value.encode("utf-8").decode("latin-1") for name, value in headers.items()}
    for body in (None, {"keep": "full"}):
        status, answer, found = send(_address(guarded), path, body, headers=headers)
        assert (status, list(answer)) == (401, ["error"])
        assert "Authorization: Bearer TOKEN" in answer["error"]
        assert found["www-authenticate"] == 'Bearer realm="tapscope"'


def test_guard_with_the_token_all_is_as_on_loopback(guarded: Job) -> None:
    status, state, _ = send(_address(guarded), "/dumper/state", headers=bearer())
    assert status == 200
    assert [rank["status"] for rank in state["ranks"]] == ["connected", "connected"]
    body = {"keep": "stats", "rules": ["layers.0=off"]}
    assert send(_address(guarded), "/dumper/configure", body, headers=bearer())[0] == 200
    assert send(_address(guarded), "/dumper/configure", {"keep": "off"}, headers=bearer())[0] == 200


def test_guard_token_is_nowhere_to_be_read(guarded: Job) -> None:
    recorder = json.loads((guarded.run / "recorder.json").read_text())
    assert stat.S_IMODE((guarded.run / "recorder.json").stat().st_mode) == 0o600
    arguments = Path(f"/proc/{recorder['pid']}/cmdline").read_bytes()
    assert b"tapscope.dumper.recorder" in arguments
    answers = [send(_address(guarded), path, headers=bearer())[1] for path in PATHS]
    files = [file.read_bytes() for file in guarded.run.rglob("*") if file.is_file()]
    for place in (arguments, json.dumps(answers).encode(), *files):
        assert TOKEN.encode() not in place


def test_guard_token_in_the_configuration_is_not_written_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", f"--token={TOKEN}"])
    model = build()
    dumper = Dumper(model, tmp_path / "run", control="127.0.0.1:0", control_token=TOKEN, force=True)
    for _ in range(2):  # the token survives an applied change
        with dumper:
            assert dumper.http is not None
            assert send(dumper.http, "/dumper/state")[0] == 401
            status, answer, _ = send(dumper.http, "/dumper/configure", {"keep": "full"}, headers=bearer())
            assert status == 200, answer
            with dumper.step():
                pass
    assert TOKEN not in repr(dumper.config)
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or TOKEN.encode() not in file.read_bytes(), file
    assert open_run(tmp_path / "run").manifest["command"] == ["train.py", "--token=..."]


@pytest.mark.parametrize("token", ["short", "with blank in it", "tab\tinside", "ünïcödé-token", ""])
def test_guard_token_that_cannot_be_one_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        Dumper(build(), tmp_path / "run", control="0.0.0.0:0", control_token=token).open()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "x", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ":-1", "1.2.3.4:٣"])
def test_guard_what_is_no_address_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be HOST:PORT or PORT"):
        parse_address(text)


def test_guard_host_that_is_not_this_one_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 203\.0\.113\.7:0"):
        Dumper(build(), tmp_path / "run", control="203.0.113.7:0", control_token=TOKEN).open()


def test_guard_ipv6_loopback_is_served(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with Dumper(build(), tmp_path / "run", control="[::1]:0") as dumper:
        assert dumper.http is not None
        assert dumper.http.startswith("[::1]:")
        assert send(dumper.http, "/dumper/state")[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "127.9.9.9"}, 200),
        ({"Host": "attacker.example"}, 403),  # DNS rebinding: a foreign name that resolves to this host
        ({"Host": "attacker.example:80", "Origin": "http://attacker.example:80"}, 403),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "[::1"}, 403),
    ],
)
def test_guard_web_pages_may_not_control(open_job: Job, headers: dict[str, str], status: int) -> None:
    assert send(_address(open_job), "/dumper/state", headers=headers)[0] == status
    found, answer, _ = send(_address(open_job), "/dumper/configure", {"keep": "off"}, headers=headers)
    assert (found, set(answer) == {"error"}) == (status, status == 403)


def test_guard_in_another_app_lets_the_hosts_own_names_in() -> None:
    Guard().check({"host": "gpu7.example:8000"})
    with pytest.raises(RequestRefused):
        Guard().check({"host": "gpu7.example:8000", "origin": "http://other.example"})


HALF_OPEN = (
    b"",
    b"POST /dumper/configure HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /dumper/configure HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
)


@pytest.mark.parametrize("count", mostly_soak([410, 1010], default=[410]))
def test_guard_half_open_requests_stop_neither_capture_nor_control(tmp_path: Path, count: int) -> None:
    """The recorder may open at most 256 files; each step here opens a new segment."""
    code = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tapscope import Dumper
model = torch.nn.Linear(64, 64)
with Dumper(model, "run", keep="full", control="127.0.0.1:0", segment_bytes=4096) as dumper:
    print(dumper.http, flush=True)
    for line in sys.stdin:
        with dumper.step():
            model(torch.randn(64, 64))
        print(dumper.flush(), flush=True)
"""
    program = warm.start("-c", code, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    with program, contextlib.ExitStack() as stack:
        address = program.stdout.readline().strip()
        host, port = address.split(":")
        wait_until(lambda: send(address, "/dumper/state")[0] == 200, "it is served")
        for number in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            client.sendall(HALF_OPEN[number % 3])
            if number % (count // 10) == 0:
                program.stdin.write("step\n")
                program.stdin.flush()
                assert program.stdout.readline() == "True\n"
        assert send(address, "/dumper/state")[0] == 200
        recorder = json.loads((tmp_path / "run/recorder.json").read_text())["pid"]
        wait_until(lambda: len(os.listdir(f"/proc/{recorder}/fd")) < 120, "the others were sent away")
        program.stdin.close()
    assert program.returncode == 0
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert len(run.steps) == 10


@pytest.mark.parametrize("begun", mostly_soak(HALF_OPEN, default=HALF_OPEN[-1:]))
def test_guard_times_out_slow_requests_and_unread_answers(begun: bytes) -> None:
    """In this process, with short deadlines; those of a recorder are ten seconds and a minute."""
    code = f"""
import socket, time
from tapscope.dumper.control import control_app as control
control.LIMITS = {{"max_connections": 64, "request_s": 0.5, "answer_s": 1.0, "read_s": 1.0}}
from fastapi import Response
from fastapi.routing import APIRoute
from tapscope.dumper.control.control_app import ControlServer, Guard, make_app
from tapscope.http.listen import listen
async def long():
    return Response(b"x" * 50_000_000)
app = make_app(lambda: None, Guard())
app.router.routes.insert(0, APIRoute("/long", long))
bound = listen("127.0.0.1", 0)
server = ControlServer(lambda: app, bound)
server.start()
with socket.create_connection(bound.getsockname()[:2], timeout=30) as client:
    client.sendall({begun!r})
    assert client.recv(100).startswith(b"HTTP/1.1 408 "), "no 408"
with socket.create_connection(bound.getsockname()[:2], timeout=30) as client:
    client.sendall(b"GET /long HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    time.sleep(2.5)
    read = 0
    try:
        while piece := client.recv(1 << 20):
            read += len(piece)
    except ConnectionResetError:
        pass
    assert read < 50_000_000, read
server.stop()
"""
    done = warm.run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_guard_long_body_is_a_413_however_it_comes(open_job: Job) -> None:
    for raw in (b" " * 2_000_000, b'{"keep": "' + b"f" * 2_000_000 + b'"}'):
        assert _raw_post(open_job, raw).startswith(b"HTTP/1.1 413 ")
    assert _chunked(open_job, b"x" * 65536, 40) == 413
    assert send(_address(open_job), "/dumper/configure", raw=b" " * 1_000_000 + b'{"keep": "off"}')[0] == 200


@pytest.mark.parametrize("length", ["9" * 30, "x", "-1", "1_0", "+2"])
def test_guard_invalid_length_is_a_400(open_job: Job, length: str) -> None:
    assert _raw_post(open_job, b"{}", length).startswith(b"HTTP/1.1 400 ")


def _raw_post(job: Job, raw: bytes, length: str | None = None) -> bytes:
    """Send a body and return the whole response; ``length`` overrides the announced length."""
    host, port = _address(job).split(":")
    lines = {"Host": "localhost", "Content-Length": length or str(len(raw)), "Connection": "close"}
    head = "POST /dumper/configure HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode() + raw)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def _chunked(job: Job, chunk: bytes, times: int) -> int:
    import http.client

    connection = http.client.HTTPConnection(_address(job), timeout=LIMIT_S)
    try:
        connection.request("POST", "/dumper/configure", iter([chunk] * times), encode_chunked=True)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"keep": NaN}', "not valid JSON"),
        (b'{"keep": 1e999}', "not valid JSON: Number out of range"),
        (b'{"keep": "off", "keep": "full"}', "'keep' is given twice"),
        (b'{"keep": "\\ud800"}', "not valid JSON"),
        (b'{"keep": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested too deeply"),
        (b'{"steps": ' + b"9" * 5_000 + b"}", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"\x00\x01", "not valid JSON"),
    ],
)
def test_guard_what_is_no_plain_json_object_is_a_400(open_job: Job, raw: bytes, says: str) -> None:
    status, answer, _ = send(_address(open_job), "/dumper/capture", raw=raw)
    assert (status, says in answer["error"]) == (400, True), answer


def test_guard_command_never_comes_over_http(open_job: Job) -> None:
    body: Any = {"triggers": ["*: nan -> run 'touch /tmp/never'"]}
    for verb in ("configure", "capture"):
        status, answer, _ = send(_address(open_job), f"/dumper/{verb}", body)
        assert (status, "run" in answer["error"]) == (400, True), answer


@pytest.mark.soak
def test_guard_connections_left_open_keep_no_segment_from_opening(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("the limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # the usual default of a shell
    job = Job(tmp_path / "run", 1, keep="full", control="127.0.0.1:0", segment_bytes=8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    held: list[socket.socket] = []
    with job:
        host, port = _address(job).split(":")
        held += [socket.create_connection((host, int(port)), timeout=LIMIT_S) for _ in range(1200)]
        before = job.ask("state")[1]["ranks"][0]["bytes"]
        wait_until(lambda: job.ask("state")[1]["ranks"][0]["bytes"] > before + 8 * 8192, "more segments are written")
        assert job.ask("state")[1]["ranks"][0]["status"] == "connected"
        for connection in held:
            connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_guard_bytes_that_are_no_http_disturb_nothing(open_job: Job) -> None:
    host, port = _address(open_job).split(":")
    before, noise = open_job.steps()[0], random.Random(7)
    held = []
    for size in (1, 10, 1000, 100_000):
        for _ in range(5):
            connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
            with contextlib.suppress(ConnectionError):
                connection.sendall(noise.randbytes(size))
            held.append(connection)  # left open: half a request does not block others
    wait_until(lambda: open_job.steps()[0] > before + 5, "steps go on")
    for connection in held:
        connection.close()
    before = open_job.steps()[0]
    wait_until(lambda: open_job.steps()[0] > before + 5, "steps go on")
    log = open_job.run / "recorder.log"
    assert not log.exists() or log.read_bytes() == b""
