"""wait_for_ready detects a dead process; enabling CUDA core dumps preserves variables of the environment."""

import http.server
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tapscope
from tapscope.core.errors import ConfigError, UnreachableError


class Late(http.server.BaseHTTPRequestHandler):
    """A server that responds with 503 twice, then with 200; to /slow with 503 once, then too late."""

    count = 0

    def do_GET(self) -> None:
        type(self).count += 1
        if self.path == "/slow" and type(self).count > 1:
            time.sleep(2)
        self.send_response(200 if type(self).count > 2 and self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Late.count = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_wait_for_ready_waits_until_the_server_says_so(address: str) -> None:
    tapscope.wait_for_ready(address)
    assert Late.count == 3


def test_wait_for_ready_tells_the_last_answer_at_its_time_limit(address: str) -> None:
    with pytest.raises(UnreachableError, match=r"/other is not ready after 0\.2 s: status 503$"):
        tapscope.wait_for_ready(f"{address}/other", timeout_s=0.2)
    with pytest.raises(UnreachableError, match="is not ready after 0 s: no answer"):
        tapscope.wait_for_ready(f"http://{address}/other", timeout_s=0)


def test_wait_for_ready_reports_the_response_before_a_request_that_the_limit_cuts_short(address: str) -> None:
    with pytest.raises(UnreachableError, match=r"/slow is not ready after 1 s: status 503$"):
        tapscope.wait_for_ready(f"{address}/slow", timeout_s=1)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(3)", "ended with exit code 3 before it was ready"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL before it was ready"),
    ],
)
def test_wait_for_ready_notices_a_dead_process_although_others_answer(address: str, code: str, says: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    process.wait()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=says):
        tapscope.wait_for_ready(address, process)
    assert time.monotonic() - began < 30  # well below the 60 s time limit


def test_wait_for_ready_takes_a_process_of_multiprocessing() -> None:
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    process.start()
    process.join()
    with pytest.raises(UnreachableError, match="ended with exit code 5"):
        tapscope.wait_for_ready("127.0.0.1:9", process)


def test_cuda_coredumps_are_enabled_and_given_values_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"CUDA_COREDUMP_SHOW_PROGRESS": "0", "HOME": "x"}
    pattern = tapscope.enable_cuda_coredumps(tmp_path / "cores", environ)
    assert pattern == str(tmp_path / "cores" / "cuda_coredump_%h.%p.%t")
    assert (tmp_path / "cores").is_dir()
    assert environ["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert environ["CUDA_COREDUMP_FILE"] == pattern
    assert environ["CUDA_COREDUMP_SHOW_PROGRESS"] == "0"
    assert "CUDA_COREDUMP_SHOW_PROGRESS is set already and stays 0" in caplog.text
    assert tapscope.enable_cuda_coredumps(tmp_path / "other", environ) == pattern


def test_cuda_coredumps_need_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create"):
        tapscope.enable_cuda_coredumps(tmp_path / "file" / "cores", {})
