"""Faults of `tapscope serve` with real processes: killed processes, signals, disconnects, slow readers."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import httpx
import pytest
from checkpoints import make_llama
from engine_helpers import reference_tokens
from engine_http import raw_post
from jobs import LIMIT_S, free_port, wait_until

from tapscope import wait_for_ready
from tapscope.core.errors import ConfigError
from tapscope.engine import LLM

LONG = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}
ENDLESS = LONG | {"max_new_tokens": 16_000}
"""Longer than any test waits."""
SHORT = LONG | {"max_new_tokens": 4}
SHAPE = {"num_hidden_layers": 1, "max_position_embeddings": 16_384}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    return make_llama(folder, seed=1, **SHAPE)


class Process:
    """A running `tapscope serve` process."""

    def __init__(self, path: Path, run: Path, *flags: str) -> None:
        self.address, self._folder = f"127.0.0.1:{free_port()}", run.parent
        words = ["-m", "tapscope", "serve", path, "-o", run, "--listen", self.address, *flags]
        if not any(flag.startswith("num_pages=") for flag in flags):
            words += ["--set", "num_pages=4096"]
        self.process = warm.start(*words, popen=warm.WarmTree, cwd=run.parent, stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=f"http://{self.address}", timeout=LIMIT_S)

    def wait_ready(self) -> None:
        wait_for_ready(self.address, self.process, LIMIT_S)

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json=body)

    def info(self) -> dict[str, Any]:
        return self.client.get("/get_server_info").raise_for_status().json()

    def children(self) -> dict[str, int]:
        """Return the pids of the front end and the rank started by `serve`, recognized by their working directory."""
        found, kinds = {}, {"serve_http": "front", "spawned": "rank"}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                kind = kinds.get((process / "comm").read_text().strip())
                if kind and (process / "cwd").readlink() == self._folder:
                    found[kind] = int(process.name)
        return found

    def end(self) -> tuple[int, str]:
        """Wait until the process exits by itself; return exit code and stderr."""
        text = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, text

    def becomes(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return True
            time.sleep(0.05)
        return False


@contextmanager
def _serving(path: Path, run: Path, *flags: str) -> Iterator[Process]:
    process = Process(path, run, *flags)
    try:
        process.wait_ready()
        yield process
    finally:
        process.client.close()
        process.process.kill()
        process.process.communicate()


@contextmanager
def _stream(process: Process, **body: Any) -> Iterator[Iterator[str]]:
    with process.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        yield (line for line in response.iter_lines() if line)


def _is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_server_survives_disconnected_and_slow_clients_and_drains(path: Path, tmp_path: Path) -> None:
    with _serving(path, tmp_path / "run", "--set", "max_num_seqs=7", "--set", "prefix_cache=false") as process:
        assert process.info()["max_num_seqs"] == 7
        assert process.generate(input_ids=[5, 6], sampling_params=SHORT).json()["output_ids"] == reference_tokens(
            path, [5, 6], 4
        )
        _hang_up_midway(process, 30)
        _read_slowly(process)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(process.generate, input_ids=[5], sampling_params=LONG)
            assert process.becomes(lambda: process.info()["num_running"] == 1)
            process.process.send_signal(signal.SIGTERM)
            assert len(answer.result().json()["output_ids"]) == 900
        code, text = process.end()
        assert code == 0, text
        assert "error" not in text


def _hang_up_midway(process: Process, count: int) -> None:
    """Disconnect ``count`` clients and check that each request is aborted once, frees its pages and is counted."""

    def hang_up(index: int) -> None:
        body = {"input_ids": [index + 1], "sampling_params": ENDLESS, "stream": index % 2 == 0}
        host, _, port = process.address.partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(raw_post(body))
            if index % 2 == 0:
                connection.recv(1000)  # the response has started

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(count)))
    assert process.becomes(lambda: process.info()["num_running"] + process.info()["num_waiting"] == 0)
    info = process.info()
    assert info["kv_pages_used"] == 0
    gone = f'requests_total{{dp_rank="0",model_name="{info["model"]}",reason="gone"}} '
    lines = process.client.get("/metrics").text.splitlines()
    assert [line for line in lines if gone in line] == [f"tapscope_engine_{gone}{count}.0"]


def _read_slowly(process: Process) -> None:
    """Check that a slow reader blocks neither the engine nor other clients, and finally receives the full response."""
    with _stream(process, input_ids=[7], sampling_params=LONG) as lines:
        next(lines)
        assert process.becomes(lambda: process.info()["num_running"] == 0)
        assert process.generate(input_ids=[5], sampling_params=SHORT).status_code == 200
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert len(json.loads(last.removeprefix("data: "))["output_ids"]) == 900


def test_server_exits_with_the_reason_if_the_http_process_dies(path: Path, tmp_path: Path) -> None:
    with _serving(path, tmp_path / "run") as process:
        os.kill(process.children()["front"], signal.SIGKILL)
        code, text = process.end()
        assert code == 4
        assert "the HTTP process was killed by signal 9; the engine ends with it" in text
        wait_until(lambda: not process.children(), "the front ends")


def test_http_process_reports_a_hung_engine_and_exits_with_a_dead_one(path: Path, tmp_path: Path) -> None:
    with (
        _serving(path, tmp_path / "run", "--tp", "2", "--set", "rank_timeout_s=3") as process,
        _stream(process, input_ids=[5], sampling_params=ENDLESS) as lines,
    ):
        next(lines)
        children = process.children()
        process.process.send_signal(signal.SIGSTOP)
        events = [line for line in lines if "error" in line]
        assert re.search(r"the engine's process \d+ hangs: .*stopped by a signal.*service\.py", events[0])
        for response in (process.client.get("/health"), process.generate(input_ids=[5], sampling_params=SHORT)):
            assert (response.status_code, "hangs: no progress for" in response.text) == (503, True)
        process.process.kill()  # the front end would do so after its linger
        assert "the engine's process has ended; the server exits" in process.end()[1]
        wait_until(lambda: all(map(_is_gone, children.values())), "front and rank end")


def test_server_returns_503_after_an_idle_rank_died(path: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", seed=2, **SHAPE)
    with _serving(path, tmp_path / "run", "--tp", "2") as process:
        update = {"model_path": str(other), "weight_version": "2"}
        assert process.client.post("/update_weights_from_disk", json=update).json()["success"]
        answer = process.generate(input_ids=[5, 6], sampling_params=SHORT).json()
        assert answer["output_ids"] == reference_tokens(other, [5, 6], 4)
        os.kill(process.children()["rank"], signal.SIGKILL)
        assert process.becomes(lambda: process.client.get("/health").status_code == 503)
        for response in (process.client.get("/health"), process.generate(input_ids=[5], sampling_params=SHORT)):
            assert response.status_code == 503
            assert "rank 1 of 2 was killed by signal 9" in response.json()["error"]["message"]
        process.process.send_signal(signal.SIGTERM)  # or it exits by itself after its linger
        code, text = process.end()
        assert code == 4
        assert "rank 1 of 2 was killed by signal 9" in text


@pytest.mark.soak
def test_server_exits_immediately_on_a_second_sigterm(path: Path, tmp_path: Path) -> None:
    with _serving(path, tmp_path / "run") as process, _stream(process, input_ids=[5], sampling_params=ENDLESS) as lines:
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        assert process.becomes(lambda: _refuses(process.address))
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(lines)
        assert process.end()[0] == 143
        wait_until(lambda: not process.children(), "the front ends")


SIGNAL_BEFORE_POLL = """
import ctypes, operator, os, signal, sys
from functools import partial
import zmq
from tapscope.cli import main
from tapscope.engine.runners.engine_service import EngineService

class Poller(zmq.Poller):
    def poll(self, timeout=None):
        if timeout is not None or fired or not os.path.exists("fire"):
            return super().poll(timeout)
        if ready := super().poll(500):  # what still comes after a response
            return ready
        fired.append(True)
        kill = partial(ctypes.PyDLL(None)["raise"], int(signal.SIGTERM))
        poll = partial(zmq.backend.zmq_poll, self.sockets, -1)
        return list(map(operator.call, (kill, poll)))[1]  # all in C: Python runs no handler in between

def init(service, *args, **options):
    original(service, *args, **options)
    service._poller.__class__ = Poller

fired, original = [], EngineService.__init__
EngineService.__init__ = init
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_right_before_an_idle_server_waits_drains_it(path: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ["-c", SIGNAL_BEFORE_POLL, "serve", path, "-o", tmp_path / "run", "--listen", address]
    process = warm.start(
        *words, "--set", "num_pages=64", popen=warm.WarmTree, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_ready(address, process, LIMIT_S)
        (tmp_path / "fire").touch()
        body = {"input_ids": [5, 6], "sampling_params": SHORT}
        assert httpx.post(f"http://{address}/generate", json=body, timeout=LIMIT_S).status_code == 200
        text = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 0, text
    assert "error" not in text


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--set", "max_runing=7"], 2, "unknown engine setting 'max_runing'"),
        (["--set", "tp=2"], 2, "use the flag --tp"),
        (["--request-log", "/nowhere/at/all"], 2, "request_log='/nowhere/at/all': cannot be written"),
        (["--otlp-traces-endpoint", "localhost:4317"], 2, "otlp_traces_endpoint='localhost:4317': expected the URL"),
        (["--max-body-bytes", "0"], 2, "max_body_bytes=0"),
    ],
)
def test_serve_rejects_invalid_flags_before_starting(
    path: Path, tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    process = Process(path, tmp_path / "run", *flags)
    found, text = process.end()
    assert (found, message in text, text.count("\n")) == (code, True, 1), text
    assert not (tmp_path / "run").exists()


def test_cache_beyond_the_memory_is_one_sentence(path: Path, tmp_path: Path) -> None:
    found, text = Process(path, tmp_path / "run", "--set", "num_pages=20000000000").end()
    expected = "the KV cache does not fit into the free memory of cpu; lower num_pages, kv_cache_memory_bytes"
    assert (found, expected in text, "Traceback" in text) == (2, True, False), text


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_without_memory_for_the_cache_end(path: Path, tp: int) -> None:
    with pytest.raises(ConfigError, match="KV cache does not fit into the free memory of cpu; lower num_pages"):
        LLM(path, tp=tp, num_pages=20_000_000_000)
    with LLM(path, tp=tp) as llm:  # no process holds memory or a port any more
        assert llm.generate([[5, 6, 7]], max_new_tokens=2)


def test_weights_beyond_the_memory_are_one_sentence(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 44}))
    expected = "the model in float32 does not fit into the free memory of cpu; use more ranks"
    with pytest.raises(ConfigError, match=expected):
        LLM(path, load_format="dummy")


def _refuses(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False
