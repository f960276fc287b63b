"""Forked processes fork their own children: `subprocess` and `multiprocessing` use the same fork server.

See forkserver_pool.py.
"""

import array
import json
import multiprocessing.popen_spawn_posix as spawning
import os
import resource
import select
import socket
import subprocess
import sys
from multiprocessing import util
from typing import Any


def send(door: socket.socket, words: list[str], descriptors: list[int], **more: Any) -> int:
    """Request a fork of ``python WORDS...`` with ``descriptors``: its streams, and those inherited under the same
    numbers.

    Returns the pipe that receives the process id and exit status.
    """
    status, report = os.pipe()
    request = {"words": words, "files": resource.getrlimit(resource.RLIMIT_NOFILE), **more}
    text = json.dumps(request).encode() + b"\n"
    try:
        if rest := text[socket.send_fds(door, [text], [*descriptors, report]) :]:
            door.sendall(rest)  # sending no bytes would fail if the server has closed its end
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(report)
    return status


def ask(server: str, words: list[str], descriptors: list[int], **more: Any) -> int:
    """Send a fork request to the server at this address, see :func:`send`."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(server)
        return send(door, words, descriptors, **more)


def receive(status: int) -> int:
    """Return the next number from the pipe of ``send``."""
    number = os.read(status, 4)
    assert number, "the server of warm processes is gone"
    return array.array("i", number)[0]


def ended(pid: int, status: int, *, is_awaited: bool) -> int | None:
    """Return the exit status of a process; None if it is running and ``is_awaited`` is not set."""
    timeout = 0 if not is_awaited and _is_running(pid) else None
    if not select.select([status], [], [], timeout)[0]:
        return None
    code = receive(status)
    os.close(status)
    return code


def _is_running(pid: int) -> bool:
    """Return whether the process is running; if not, its server is about to report the exit status."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([process], [], [], 0)[0]
    finally:
        os.close(process)


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` for a Python process: the arguments are those of the interpreter."""

    def _ask(self, words: list[str], descriptors: list[int], **more: Any) -> int:
        raise NotImplementedError

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        """Request the fork; ``rest`` are the further arguments from `subprocess`."""
        _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more = rest
        streams = [own if other == -1 else other for own, other in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self._status = self._ask(
                [os.fsdecode(word) for word in args],
                [*streams, *pass_fds],
                cwd=os.fsdecode(cwd or os.getcwd()),
                env=dict(os.environ if env is None else env),
                pass_fds=list(pass_fds),
                start_new_session=more[5],
            )
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self.pid = receive(self._status)
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        code = ended(self.pid, self._status, is_awaited=not wait_flags & os.WNOHANG)
        return (0, 0) if code is None else (self.pid, code)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def install(server: str) -> None:
    """Patch `subprocess` and `multiprocessing` in this process; ``server`` is the address of the fork server."""

    def fork(words: list[str], descriptors: list[int], **more: Any) -> int:
        return ask(server, words, descriptors, forks_children=True, **more)

    class ChildPopen(WarmPopen):
        """Popen that forks commands: tapscope, a program with a Dumper, or a program outside the installation."""

        _is_warm = False

        def _ask(self, words: list[str], descriptors: list[int], **more: Any) -> int:
            self._is_warm = True
            return fork(words[1:], descriptors, **more)

        def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
            _, _, _, _, _, _, shell, *_, process_group = rest
            is_plain = not shell and executable is None and preexec_fn is None and process_group == -1
            if is_plain and not isinstance(args, (str, bytes)) and _is_ours(list(args)):
                super()._execute_child(args, executable, preexec_fn, *rest)
            else:
                subprocess_popen._execute_child(self, args, executable, preexec_fn, *rest)  # type: ignore[attr-defined]

        def _try_wait(self, wait_flags: int) -> tuple[int, int]:
            return (super() if self._is_warm else super(WarmPopen, self))._try_wait(wait_flags)  # type: ignore[misc]

        def _internal_poll(self, *args: Any, **named: Any) -> int | None:
            return (super() if self._is_warm else super(WarmPopen, self))._internal_poll(*args, **named)  # type: ignore[misc]

    subprocess_popen = subprocess.Popen
    for module in list(sys.modules.values()):  # torchrun imports it under its own name
        if vars(module).get("Popen") is subprocess_popen:
            module.Popen = ChildPopen  # type: ignore[attr-defined]

    statuses: dict[int, int] = {}

    def spawn(path: str, words: list[str], pass_fds: list[int]) -> int:
        streams = {"cwd": os.getcwd(), "env": dict(os.environ), "pass_fds": pass_fds}
        status = fork(words[1:], [0, 1, 2, *pass_fds], **streams)
        pid = receive(status)
        statuses[pid] = status
        return pid

    def poll(self: Any, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            code = ended(self.pid, statuses[self.pid], is_awaited=not flag & os.WNOHANG)
            if code is not None:
                self.returncode = os.waitstatus_to_exitcode(code)
        return self.returncode

    spawning.util = Util(spawn)
    spawning.Popen.poll = poll


class Util:
    """`multiprocessing.util` with a different way to start processes."""

    def __init__(self, spawn: Any) -> None:
        self.spawnv_passfds = spawn

    def __getattr__(self, name: str) -> Any:
        return getattr(util, name)


def _is_ours(args: list[Any]) -> bool:
    words = [os.fsdecode(word) for word in args]
    if words[0] != sys.executable or len(words) < 2:
        return False
    words = words[2:] if words[1] == "-u" else words[1:]
    if words[0] == "-m":
        return words[1].partition(".")[0] == "tapscope"
    if words[0] == "-c":
        return "import Dumper" in words[1]
    return not words[0].startswith(("-", sys.prefix))
