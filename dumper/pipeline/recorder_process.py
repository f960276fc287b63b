"""Recorder process: rank 0 starts the recorder of a run unless one exists; other ranks find it by ``recorder.json``."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core import errors, wire
from tapscope.core.errors import ConfigError, RecorderError, RunExistsError, TapscopeError
from tapscope.core.regular_files import open_regular, read_small
from tapscope.core.tempdirs import remove_stale_tempdir
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.control.access_guard import token_of
from tapscope.dumper.job.processes import is_alive, track_child
from tapscope.dumper.transport.network import Endpoint, is_local
from tapscope.dumper.transport.shm_ring import MIN_BYTES, ShmRing, ShmRingError
from tapscope.run_format.directory import RECORDER_FILE, RECORDER_LOG, check_free, clear_run
from tapscope.run_format.manifest import LOCK, MAX_MANIFEST_BYTES

if TYPE_CHECKING:
    from tapscope.dumper.pipeline.send_queue import SendQueue
    from tapscope.dumper.pipeline.sender import Sender

_log = logging.getLogger("tapscope")
_FULL_DISK_BYTES = 64 * 1024
_FULL_DISK_WAIT_S = 3.0  # maximum wait for a recorder if the disk is full
START_TIMEOUT_S = 30.0
"""Timeout in seconds for a recorder to start."""


def connect(
    run: Path,
    config: DumperConfig,
    join_request: Message,
    on_message: Callable[[Message], Message | None],
    queue: "SendQueue",
    *,
    force: bool,
) -> "tuple[Sender, Message]":
    """Connect ``queue`` to the recorder of ``run``, starting one if necessary; return the sender and the reply.

    Retries for up to :data:`START_TIMEOUT_S` while the recorder is busy with a change or about to exit. Raises the
    errors of :func:`join` and :meth:`.Sender.join`.
    """
    from tapscope.dumper.pipeline.sender import RetryJoin, Sender

    options = recorder_options(config)
    ring: ShmRing | None = None
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while True:
            announced = join(run, options, force=force, first=join_request["rank"] == 0)
            ring = ring or make_ring(config)  # as late as possible: a killed process leaves the ring's file behind
            pid = int(announced["pid"]) if is_local(announced) else None
            sender = Sender(Endpoint.of(announced), pid, queue, on_message, run / RECORDER_LOG)
            try:
                return sender, sender.join(join_request, ring)
            except RetryJoin:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    finally:
        if ring is not None:
            ring.unlink()


def recorder_options(config: DumperConfig) -> dict[str, Any]:
    """Return the options of a new recorder; the token may be set in the environment."""
    options = {"control": config.control, "control_token": token_of(config.control_token), "network": config.network}
    return options | {"segment_bytes": config.segment_bytes, "fsync": config.fsync}


def make_ring(config: DumperConfig) -> ShmRing | None:
    """Create the configured ring; with too little shared memory, warn and create a smaller one or return None."""
    nbytes = min(config.shm_bytes, config.queue_bytes // 2)
    while nbytes >= MIN_BYTES:
        try:
            return ShmRing(nbytes)
        except ShmRingError as error:
            _log.warning("tapscope: %s; trying a smaller ring", error)
            nbytes //= 4
    return None


def join(run: Path, options: dict[str, Any], *, force: bool, first: bool) -> dict[str, Any]:
    """Return the ``recorder.json`` of a live recorder for ``run``; rank 0 (``first``) starts one if necessary.

    Raises RunExistsError if ``run`` is a finished run and ``force`` is not set (only checked by rank 0), ListenError if
    the control port is taken, ConfigError if the directory is not writable, and RecorderError if no recorder starts.
    """
    _make_directory(run)
    if first and _announced(run) is None:
        check_free(run, force=force)  # before creating a lock file in a directory that may not be a run
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < START_TIMEOUT_S:
        lock = _open_lock(run)
        try:
            if first and _try_lock(lock):
                clear_run(run, force=force)
                _forget_dead_recorder(run)
                return _start(run, options, lock)
        finally:
            os.close(lock)
        announced = _announced(run)
        if announced is not None and (not is_local(announced) or is_alive(announced["pid"])):
            return announced
        if waited_s > _FULL_DISK_WAIT_S and _full_disk_remark(run):
            break
        time.sleep(0.05)
    text = f"no recorder started for {run} within {waited_s:.0f} s; is rank 0 running?"
    raise RecorderError(text + _full_disk_remark(run))


def _open_lock(run: Path) -> int:
    try:
        return open_regular(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        text = f"the run {run} cannot be created: {LOCK}: {error.strerror}; make room there or choose another directory"
        raise ConfigError(text) from None


def _make_directory(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not os.access(run, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileExistsError:
        raise RunExistsError(f"{run} is a file; choose another directory for the run") from None
    except OSError as error:
        raise ConfigError(
            f"the run {run} cannot be created: {error.strerror}; choose a directory you may write"
        ) from None


def _forget_dead_recorder(run: Path) -> None:
    """Remove leftovers of a killed recorder: ``recorder.json``, and its socket directory if certainly its own."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        address = json.loads(read_small(run / RECORDER_FILE, MAX_MANIFEST_BYTES))["address"]
        remove_stale_tempdir(Path(str(address).removeprefix("ipc://")).parent)
    (run / RECORDER_FILE).unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(run: Path, options: dict[str, Any], lock: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tapscope.dumper.recorder", str(run)]
    command += ["--lock-fd", str(lock)]
    # The child must import the same tapscope as this process; the working directory must not shadow it.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONSAFEPATH": "1"}
    log = run / RECORDER_LOG
    try:
        log_fd = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{log} cannot be written: {error.strerror}; remove it") from None
    with os.fdopen(log_fd, "wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(lock,),
            env=environment,
            start_new_session=True,
        )
    track_child(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as options_file:  # command lines are visible to all users
        options_file.write(json.dumps(options).encode())
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        announced = _announced(run)
        if announced is not None and announced["pid"] == process.pid:
            return announced
        if process.poll() is not None:
            raise _failure(run)
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise RecorderError(f"the recorder of {run} did not start within {START_TIMEOUT_S:g} s; see {log}")


def _failure(run: Path) -> TapscopeError:
    log = run / RECORDER_LOG
    text = log.read_text(errors="replace").strip() if log.is_file() else ""
    last = text.splitlines()[-1] if text else "no output"
    try:
        failure = json.loads(last)
        kind = getattr(errors, failure["error"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return RecorderError(
            f"the recorder did not start: {last}{f' (see {log})' if text else ''}{_full_disk_remark(run)}"
        )
    log.unlink(missing_ok=True)
    if [entry.name for entry in run.iterdir()] == [LOCK]:
        (run / LOCK).unlink()
        run.rmdir()
    return kind(failure["message"])  # type: ignore[no-any-return]


def _full_disk_remark(run: Path) -> str:
    """Return a remark on a full disk, which the recorder could not report itself; empty if the disk is not full."""
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(run).free) < _FULL_DISK_BYTES:
            return f"; its disk has {free} bytes left: No space left on device; free disk space or choose another run"
    return ""


def _announced(run: Path) -> dict[str, Any] | None:
    try:
        announced = json.loads(read_small(run / RECORDER_FILE, MAX_MANIFEST_BYTES))
    except (OSError, ValueError):
        return None
    if announced.get("wire") != wire.VERSION:
        raise RecorderError(
            f"the recorder of {run} speaks wire version {announced.get('wire')}, this one {wire.VERSION}"
        )
    return dict(announced)


def find(run: Path) -> dict[str, Any]:
    """Return the ``recorder.json`` of the recorder that currently writes ``run``; raises RecorderError if none does."""
    if not run.is_dir():
        raise RecorderError(f"no recorder is writing {run}: no such directory")
    announced = _announced(run)
    if announced is None:
        raise RecorderError(f"no recorder is writing {run}: its capture has ended or not begun")
    if is_local(announced) and (not is_alive(announced["pid"]) or Endpoint.of(announced).has_ended):
        raise RecorderError(
            f"the recorder of {run} (pid {announced['pid']}) was killed; tapscope info shows what it wrote"
        )
    return announced


def require_free(run: Path, *, force: bool) -> None:
    """Check that a run can be created at ``run``, before a model is loaded; changes nothing.

    Raises RunExistsError, or ConfigError if the directory is not writable.
    """
    check_free(run, force=force)
    parent = next((each for each in (run, *run.absolute().parents) if each.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"the run {run} cannot be created: {parent} is not a writable directory")
