"""Python processes forked from one that has already imported torch, which takes seconds.

In all other respects they behave as processes started by `subprocess`: a process id, streams, environment, signals, an
exit status, and normal interpreter exit. Use `subprocess` in tests that depend on a process's imports, or on whether a
command starts at all.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import forkserver_children

_SHARED = "PYTEST_FORKSERVERS"
_SERVER = Path(__file__).with_name("forkserver_main.py")
_COMMAND = Path(__file__).with_name("forkserver_command.py")

RANKS = multiprocessing.get_context("forkserver")
"""Multiprocessing context for functions: processes that an engine spawns in production are forked here, see
conftest.py."""
RANKS.set_forkserver_preload(
    [
        "pytest",
        "small_rings",
        "tapscope.dumper.recording.recording",
        "tapscope.engine.execution.rank_worker",
        "fault_worker",
    ]
)


if _SHARED in os.environ:  # in a worker; the server of `multiprocessing` is forked as well
    forkserver.util = forkserver_children.Util(
        lambda python, words, pass_fds: util.spawnv_passfds(python, [*_started_by(), *words[1:]], pass_fds)
    )


@contextlib.contextmanager
def forked_with(module: str, *folders: Path) -> Iterator[SimpleNamespace]:
    """Context manager: yields a replacement for `multiprocessing` in code that spawns processes.

    The processes are forked from a separate server that has imported ``module``, found in this directory or in
    ``folders``.
    """
    server, path = forkserver.ForkServer(), os.pathsep.join(map(str, (_SERVER.parent, *folders)))
    server.set_forkserver_preload([module])
    with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        with patch.dict(os.environ, PYTHONPATH=path):
            server.ensure_running()
        try:
            yield SimpleNamespace(get_context=lambda method: RANKS)
        finally:
            server._stop()  # type: ignore[attr-defined]


_CONTROL = ("tapscope.dumper.control.routes", "uvicorn.protocols.http.h11_impl", "anyio._backends._asyncio")
"""Modules that serve HTTP."""
_PROGRAMS = (
    "transformers.models.llama.modeling_llama",
    "tapscope.cli.diagnostics",
    "tapscope.cli.dump",
    "tapscope.cli.serve",
    "tapscope.dumper",
    "tapscope.dumper.api",
    "tapscope.dumper.recorder.recorder",
    "tapscope.dumper.recording.recording",
    "tapscope.dumper.step_api",
    "tapscope.engine.engine",
    "tapscope.engine.execution.rank_worker",
    "tapscope.engine.runners.engine_service",
    "tapscope.engine.server.app",
    "tapscope.engine.server.server_process",
    "tapscope.frameworks.hf",
    *_CONTROL,
    "small_rings",
)
_RECORDER = (  # without torch, as in production; with NumPy and other imports of a joining rank
    "tapscope.dumper.recorder.recorder",
    "tapscope.kernels.native",
    "tapscope.run_format.sketch",
    *_CONTROL,
)
_WEB = (  # likewise
    "tapscope.cli.ctl",
    "tapscope.cli.diagnostics",
    "tapscope.cli.web",
    "tapscope.comparator.explain.explain",
    "tapscope.dashboard.web.server",
    *_CONTROL[1:],
)
_started: list[tuple[socket.socket, "subprocess.Popen[bytes]", Path]] = []


@atexit.register
def _end_servers() -> None:
    """Stop the servers, after tapscope's own exit handlers, which use recorders: conftest.py imports this file
    first."""
    for ours, server, folder in _started:
        ours.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _server(modules: tuple[str, ...]) -> str:
    """Return the address of a server with these modules, started on the first call unless workers share one."""
    shared = json.loads(os.environ.get(_SHARED, "{}"))
    if modules[0] in shared:
        return str(shared[modules[0]])
    ours, theirs = socket.socketpair()
    folder = Path(tempfile.mkdtemp(prefix="forkserver-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    numbers = [theirs.fileno(), listener.fileno()]
    command = [sys.executable, str(_SERVER), *map(str, numbers), *modules]
    server = subprocess.Popen(command, pass_fds=numbers, env=os.environ | {"OMP_NUM_THREADS": "1"})
    theirs.close()
    listener.close()
    _started.append((ours, server, folder))
    return str(folder / "socket")


def share_servers() -> None:
    """Start the servers that child processes use as well, for the lifetime of this process."""
    os.environ[_SHARED] = json.dumps({modules[0]: _server(modules) for modules in (_PROGRAMS, _RECORDER)})


def worker_command() -> str:
    """Return a replacement for the command `python` of pytest-xdist workers, which then need not import torch.

    Their `subprocess` children are not forked.
    """
    return shlex.join(_started_by())


def _started_by(children: str = "started") -> list[str]:
    return [sys.executable, "-IS", str(_COMMAND), _server(_PROGRAMS), children]


@functools.cache
def commands() -> Path:
    """Create a directory with the commands `python`, `tapscope` and `torchrun` for shells.

    The commands start forked processes and forward signals.
    """
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start = _started_by("forked")
    for name, words in (
        ("python", []),
        ("python3", []),
        ("tapscope", [str(Path(sys.executable).with_name("tapscope"))]),
        ("torchrun", [str(Path(sys.executable).with_name("torchrun"))]),
    ):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {shlex.join([*start, *words])} "$@"\n')
        file.chmod(0o755)
    return folder


class WarmPopen(forkserver_children.WarmPopen):
    """`subprocess.Popen` for a Python process: the arguments are those of the interpreter."""

    _modules = _PROGRAMS
    _forks_children = False

    def _ask(self, words: list[str], descriptors: list[int], **more: Any) -> int:
        more["forks_children"] = self._forks_children
        return forkserver_children.ask(_server(self._modules), words, descriptors, **more)


class WarmTree(WarmPopen):
    """A :class:`WarmPopen` whose Python subprocesses are forked too; tests cannot find them by command line."""

    _forks_children = True


class WarmRecorder(WarmPopen):
    """Replacement for `subprocess.Popen` in recorder_process.py; see conftest.py."""

    _modules = _RECORDER

    def __init__(self, args: list[str], **streams: Any) -> None:
        assert args[0] == sys.executable
        super().__init__(args[1:], **streams)


class WarmWeb(WarmPopen):
    """A :class:`WarmPopen` for `tapscope web`."""

    _modules = _WEB


def start(*words: object, popen: type[WarmPopen] = WarmPopen, **streams: Any) -> WarmPopen:
    """Start `python WORDS...`; ``streams`` as for `subprocess.Popen`."""
    return popen([str(word) for word in words], **streams)


def run(*words: object, timeout: float | None = 90.0, **streams: Any) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS...` to completion and return its output, as `subprocess.run(capture_output=True,
    text=True)`."""
    process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **streams)
    with process:
        try:
            said, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, error)
