"""tapscope commands run on possibly hostile files, in processes with limited time and memory.

One process imports the modules that commands need; each command is a fork of this process. It never runs a command
itself, so it has no threads whose locks a fork could inherit in a locked state.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """Result of one command."""

    words: tuple[str, ...]
    code: int
    """Exit code, or the negative number of the signal that killed the process."""
    out: str
    err: str
    seconds: float
    cpu: float
    """CPU seconds."""
    rss: int
    """Peak memory in bytes."""
    hung: bool

    @property
    def wrong(self) -> str:
        """The reason why this result is unacceptable for any file content; empty if it is acceptable."""
        if self.hung:
            return "hung"
        if "Traceback" in self.err or self.code < 0 or self.code == _CRASHED:
            return "crashed"
        if self.rss > GIB:
            return f"took {self.rss / GIB:.1f} GiB"
        return "" if self.code in range(5) else f"ended with exit code {self.code}"

    def __str__(self) -> str:
        return (
            f"{' '.join(self.words)}: exit {self.code}, {self.seconds:.1f} s, {self.rss >> 20} MiB\n{self.err[-3000:]}"
        )


class Limited:
    """Runs commands one after another; use as a context manager.

    A command that runs for ``timeout_s`` counts as hung: the limit is long enough for a busy machine.
    """

    def __init__(self, *, memory: int = 4 * GIB, timeout_s: float = 90) -> None:
        self._options = {"memory": memory, "timeout_s": timeout_s}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Limited":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, *words: str | Path) -> Outcome:
        """Run one command line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = self._options | {"words": [str(word) for word in words]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Outcome(**(answer | {"words": tuple(answer["words"])}))


_CRASHED = 70


def _serve() -> None:
    import numpy  # noqa: F401 - most commands need these; imports here are shared by all forks

    import tapscope.cli.diff
    import tapscope.cli.info
    import tapscope.cli.ls
    import tapscope.cli.verify
    import tapscope.comparator
    import tapscope.render.run_report
    import tapscope.sglang.reader  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_attempt(json.loads(line))) + "\n")
        answers.flush()


def _attempt(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _be_child(request, out.fileno(), err.fileno())
        fd = os.pidfd_open(pid)
        hung = not select.select([fd], [], [], request["timeout_s"])[0]
        if hung:
            os.kill(pid, signal.SIGKILL)
        os.close(fd)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.monotonic() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code = os.waitstatus_to_exitcode(status)
    told = {"words": request["words"], "code": code, "out": texts[0], "err": texts[1]}
    return told | {
        "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss * 1024,
        "hung": hung,
    }


def _be_child(request: dict[str, Any], out: int, err: int) -> None:
    code = _CRASHED
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        from tapscope.cli import main

        code = main(request["words"])
    except BaseException:  # noqa: BLE001 - a polars panic is not an Exception, and any exception is a result
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
