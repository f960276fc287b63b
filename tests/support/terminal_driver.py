"""A real terminal (a pty) in which a command runs."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

TIMEOUT_S = 60


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    started = []

    def start(*words, module=True, environment=None):
        environment = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
        process = subprocess.Popen(
            [sys.executable, *(("-m", "tapscope") if module else ()), *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        )
        started.append(process)
        return process

    yield ours, start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    os.close(ours)
    os.close(theirs)


def read_until(fd, wanted, process):
    """Return the program's output up to and including the wanted bytes."""
    seen, end = b"", time.monotonic() + TIMEOUT_S
    while wanted not in seen:
        assert time.monotonic() < end, f"{wanted!r} was not drawn; the end of what was: {seen[-2000:]!r}"
        assert process.poll() is None, f"ended with {process.returncode}: {seen[-2000:]!r}"
        ready, _, _ = select.select([fd], [], [], 0.1)
        if ready:
            seen += os.read(fd, 65536)
    return seen


def drain_until_exit(fd, process):
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        assert time.monotonic() < end, "the program did not end"
        ready, _, _ = select.select([fd], [], [], 0.05)
        if ready:
            os.read(fd, 65536)
    return process.returncode
