"""Jobs that are hurt on purpose."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fault_worker
from fault_worker import Spec
from forkserver_pool import RANKS
from jobs import LIMIT_S, wait_until

from tapscope.dumper.job.processes import is_alive

SLACK_S = 10.0
"""What a busy machine may add to a wait; a wait without a bound would be longer."""


class Ranks:
    """Ranks of one job, each a process; all are ended on exit, and so is their recorder."""

    def __init__(self, run: Path, world: int = 1, *, side: Path | None = None, **spec: Any) -> None:
        self.run = run
        self.specs = [Spec(str(run), str(side or run.parent), rank, world, **spec) for rank in range(world)]
        self.processes: list[BaseProcess] = []
        self._recorders: set[int] = set()

    def __enter__(self) -> "Ranks":
        for spec in self.specs:
            self.start(spec)
        return self

    def start(self, spec: Spec) -> BaseProcess:
        """One more process."""
        process = RANKS.Process(target=fault_worker.work, args=(asdict(spec),), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def __exit__(self, kind: object, *exc: object) -> None:
        self.find_recorder()
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pid in self._recorders:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
                if not _polled(lambda pid=pid: not is_alive(pid), 10.0):
                    os.kill(pid, signal.SIGKILL)

    # ---- what is going on

    def marks(self, rank: int = 0) -> list[dict[str, Any]]:
        """What the rank said so far."""
        file = self.specs[rank].beside(f"marks-{rank}")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def mark(self, name: str, rank: int = 0) -> Any:
        """The newest mark of this name, or None."""
        return next((each[name] for each in reversed(self.marks(rank)) if name in each), None)

    def log(self, rank: int = 0) -> str:
        """What the rank wrote on stderr."""
        return self.specs[rank].beside(f"log-{rank}").read_text()

    def opened(self) -> "Ranks":
        """Wait until every rank has opened its dumper."""
        for spec in self.specs:
            wait_until(lambda rank=spec.rank: self.mark("open", rank) is not None, "a rank opens")
        return self

    def acked(self, step: int, rank: int = 0) -> None:
        """Wait until the rank knows that this step was acknowledged."""
        wait_until(lambda: (self.mark("acked", rank) or -1) >= step, f"step {step} is acknowledged")

    def finished(self) -> "Ranks":
        """Wait until every rank has ended by itself."""
        for process in self.processes:
            process.join(LIMIT_S)
        return self

    def find_recorder(self) -> int | None:
        """Process id of the recorder of this run, also of one that is only starting."""
        with contextlib.suppress(OSError, ValueError):
            self._recorders.add(json.loads((self.run / "recorder.json").read_text())["pid"])
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"tapscope.dumper.recorder" in words and os.fsencode(self.run) in words:
                    self._recorders.add(int(folder.name))
        return next((pid for pid in sorted(self._recorders) if is_alive(pid)), None)

    @property
    def recorder(self) -> int:
        """Process id of the recorder, which must be there."""
        pid = self.find_recorder()
        assert pid is not None, "no recorder runs"
        return pid

    @property
    def lost(self) -> str | None:
        """Why rank 0 said at its end that the run is incomplete."""
        lost: str | None = next(each for each in self.marks() if "done" in each)["lost"]
        return lost

    # ---- hurting it

    def kill(self, rank: int) -> None:
        """As the kernel does when memory runs out."""
        self.processes[rank].kill()

    def kill_recorder(self) -> None:
        """The same for the recorder."""
        os.kill(self.recorder, signal.SIGKILL)

    # ---- the end

    def ask_to_end(self) -> None:
        """Every rank ends after the step it is in."""
        self.specs[0].beside("stop").touch()

    def end(self, *killed: int) -> None:
        """Every rank that was not killed computes to its end, with every result right and no unbounded wait."""
        self.find_recorder()  # while it can be seen: its lock is held until its very end
        for spec, process in zip(self.specs, self.processes, strict=True):
            if spec.rank not in killed:
                self._goes_on(spec.rank, process)
        self.ask_to_end()
        for rank, process in enumerate(self.processes):
            process.join(LIMIT_S)
            assert process.exitcode is not None, f"rank {rank} hangs"
            if rank not in killed:
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        for spec in self.specs:
            if spec.rank not in killed:
                self._check_waits(spec)
        self.find_recorder()
        for pid in self._recorders:
            if not _polled(partial(_gone, pid), 1.0) and is_alive(pid):
                os.kill(pid, signal.SIGTERM)  # it waits for ranks that will never come
            wait_until(partial(_gone, pid), "the recorder ends")
        wait_until(lambda: _is_free(self.run), "the lock of the run is free")

    def _goes_on(self, rank: int, process: BaseProcess) -> None:
        """A few more steps, unless it has come to its end by itself."""
        at = self.mark("at", rank) or 0
        wait_until(lambda: not process.is_alive() or (self.mark("at", rank) or 0) >= at + 4, "the model goes on")

    def _check_waits(self, spec: Spec) -> None:
        done = next((each for each in self.marks(spec.rank) if "done" in each), None)
        assert done is not None, f"rank {spec.rank} never finished"
        assert done["num_wrong"] == 0, f"{done['num_wrong']} results of rank {spec.rank} are wrong"
        timeout_s = float(spec.settings.get("block_timeout_s", 1.0))
        strict_s = max(timeout_s, 1.0) if spec.settings.get("backpressure") == "strict" else 0.0
        bound_s = timeout_s + strict_s + SLACK_S
        assert done["longest_s"] < bound_s, f"a step of rank {spec.rank} took {done['longest_s']:.1f} s, not {bound_s}"


def _gone(pid: int) -> bool:
    return not is_alive(pid)


def _is_free(run: Path) -> bool:
    """Whether nobody holds the lock of the run: a thread of a recorder may outlive its first one by a moment."""
    try:
        lock = os.open(run / ".lock", os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _polled(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alone(target: Callable[..., None], *args: Any, timeout_s: float = LIMIT_S) -> None:
    """Run ``target`` in a process of its own; fails when it fails, or hangs."""
    process = RANKS.Process(target=target, args=args)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"{target.__name__} hangs")
    assert process.exitcode == 0, f"{target.__name__} ended with {process.exitcode} (see stderr)"
