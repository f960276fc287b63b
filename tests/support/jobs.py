"""Helpers to start and stop toy jobs of several processes, and to send them HTTP requests."""

import contextlib
import json
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forkserver_pool as warm

WORKER = Path(__file__).with_name("rank_worker.py")
LIMIT_S = 90.0
"""Timeout for operations that normally take a moment; only a hang reaches it, even on a busy machine."""


class Job:
    """Ranks of one toy job; every process is stopped on exit."""

    def __init__(
        self,
        run: Path,
        world: int,
        *,
        late: Sequence[int] = (),
        popen: type[warm.WarmPopen] = warm.WarmTree,
        **settings: Any,
    ) -> None:
        """Start ``world`` ranks, except those in ``late`` (never rank 0, which starts the recorder): see
        :meth:`join`."""
        self.run = run
        self.processes: list[subprocess.Popen[str]] = []
        self.http: str | None = None
        self._world, self._settings, self._popen = world, settings, popen
        for rank in range(world):
            if rank not in late:
                self._start(rank)

    def _start(self, rank: int) -> None:
        words = (WORKER, self.run, rank, self._world, json.dumps(self._settings))
        self.processes.append(warm.start(*words, popen=self._popen, stdout=subprocess.PIPE, text=True))

    def _opened(self, process: subprocess.Popen[str]) -> None:
        words = self.line(process).split()
        assert words[0] == "open", words
        self.http = words[1]

    def __enter__(self) -> "Job":
        for process in self.processes:
            self._opened(process)
        return self

    def join(self, rank: int) -> None:
        """Start a late rank, and wait until its Dumper is open."""
        self._start(rank)
        self._opened(self.processes[-1])

    def __exit__(self, *exc: object) -> None:
        self.end()

    def line(self, process: subprocess.Popen[str]) -> str:
        """Return the next line that the process prints."""
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def end(self) -> list[int]:
        """Ask every rank to stop; return the exit codes."""
        self.run.with_name(self.run.name + ".stop").touch()
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(LIMIT_S))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
            if process.stdout is not None:
                process.stdout.close()
        wait_until(lambda: not (self.run / "recorder.json").exists(), "the recorder ends")
        return codes

    def ask(self, verb: str, body: Any = None, *, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
        """Send an HTTP request to the recorder: POST with a body, else GET."""
        return ask(f"http://{self.http}/dumper/{verb}", body, raw=raw)

    def steps(self) -> list[int]:
        """Return the current step of each rank."""
        return [rank["step"] for rank in self.ask("state")[1]["ranks"]]


def ask(url: str, body: Any = None, *, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """Send one HTTP request; return status and JSON, including error statuses."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=LIMIT_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = LIMIT_S) -> None:
    """Poll until the condition holds; fail with ``what`` on timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


def free_port() -> int:
    """Return a free port below the ephemeral range, which the system never assigns to other sockets."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", random.SystemRandom().randrange(max(1024, below - 8192), below)))
            return int(trial.getsockname()[1])
