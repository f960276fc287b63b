"""One rank of a job that is about to be hurt.

It computes until a file named RUN.stop appears, whatever becomes of the recording, and leaves marks in a file, one JSON
object a line: ``open``, ``refused``, ``at`` (a step was computed), ``acked`` (the recorder has everything of ``run`` up
to this step), ``done``.
"""

import ctypes
import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_model import Chain, expected, given

from tapscope.core.errors import RecorderError, TapscopeError
from tapscope.core.observe import RankInfo
from tapscope.dumper import Dumper

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare(2)


@dataclass
class Spec:
    """What a rank does."""

    run: str
    side: str
    """Directory of marks, log and stop file: not where the disk is full."""
    rank: int = 0
    world: int = 1
    rows: int = 16
    width: int = 64
    layers: int = 4
    mark_every: int = 5
    """Steps between two looks whether everything was acknowledged; the strict policy looks at every step."""
    max_steps: int = 1_000_000
    pause_s: float = 0.002
    file_bytes: int | None = None
    """Most bytes a file of this process and its recorder may have (RLIMIT_FSIZE)."""
    shared_bytes: int | None = None
    """Size of a shared memory of its own, as in a small container; needs root."""
    settings: dict[str, Any] = field(default_factory=dict)

    def beside(self, what: str) -> Path:
        """A file of this rank, outside the run."""
        return Path(self.side) / f"{Path(self.run).name}.{what}"


class Worker:
    """Steps, marks and what they took."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.model = Chain(spec.layers)
        self.longest_s = 0.0
        self.num_wrong = 0
        self._file = os.open(spec.beside(f"marks-{spec.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def mark(self, **content: Any) -> None:
        """One line, in one write: whoever kills this process finds it whole."""
        os.write(self._file, json.dumps(content).encode() + b"\n")

    def run(self) -> None:
        """Everything."""
        dumper = self._open()
        stop, step, parent = self.spec.beside("stop"), 0, os.getppid()
        while step < self.spec.max_steps and not stop.exists() and os.getppid() == parent:
            if dumper is None:
                self._compute(step)
            else:
                self._step(dumper)
            self.mark(at=step)
            step += 1
            time.sleep(self.spec.pause_s)
        self.mark(done=step, longest_s=self.longest_s, num_wrong=self.num_wrong, lost=self._close(dumper))

    def _open(self) -> Dumper | None:
        spec = self.spec
        info = RankInfo(rank=spec.rank, world_size=spec.world, mesh={"tp": spec.world}, coords={"tp": spec.rank})
        try:
            dumper = Dumper(self.model, spec.run, info=info, **{"keep": "full"} | spec.settings).open()
        except TapscopeError as error:
            self.mark(refused=f"{type(error).__name__}: {error}")
            return None
        self.mark(open=os.getpid(), http=dumper.http)
        return dumper

    def _close(self, dumper: Dumper | None) -> str | None:
        """Why the run is incomplete, if the dumper says so."""
        return None if dumper is None else dumper._close()

    def _compute(self, step: int) -> None:
        spec = self.spec
        with torch.no_grad():
            y = self.model(given(spec.rank, step, spec.rows, spec.width))
        right = expected(spec.rank, step, ":out", spec.rows, spec.width, spec.layers)
        self.num_wrong += y.numpy().tobytes() != right.tobytes()

    def _step(self, dumper: Dumper) -> None:
        number, run, acked = dumper.next_step, "", dumper.config.backpressure == "strict"
        computed = False
        began = time.monotonic()
        try:
            with dumper.step(phase="toy") as info:
                number, run = info.step, str(dumper.out)  # a reset may have come
                self._compute(number)
                computed = True
        except RecorderError:  # strict, and at the end of the step
            acked = False
        self.num_wrong += not computed
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        recording = dumper._recording
        assert recording is not None
        assert recording.client is not None
        if not acked and (number + 1) % self.spec.mark_every == 0:
            acked = recording.client.queue.drained(2.0)
        last = recording.collector.last
        if acked and last is not None and last.info.step == number:  # it was recorded at all
            self.mark(acked=number, run=run)


def work(content: dict[str, Any]) -> None:
    """The whole life of the process."""
    spec = Spec(**content)
    log = os.open(spec.beside(f"log-{spec.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if spec.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.file_bytes, resource.RLIM_INFINITY))
    if spec.shared_bytes is not None:
        _have_own_shared_memory(spec.shared_bytes)
    Worker(spec).run()


def _have_own_shared_memory(nbytes: int) -> None:
    """A mount namespace in which /dev/shm is small."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", "/dev/shm"], check=True)
