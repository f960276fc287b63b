"""Fork server for Python processes with MODULES imported: `python forkserver_main.py FD LISTENER MODULES...`.

See forkserver_pool.py. A request over a connection to LISTENER is one JSON line with file descriptors: stdin, stdout,
stderr, the inherited ones, and a pipe that receives the process id and, at the end, the exit status. If the request
says so, Python subprocesses of the process are forked as well: forkserver_children.py. The server exits when the peer
of the socket FD closes.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import socket
import sys
import threading
import warnings
import weakref
from typing import Any, NoReturn

import forkserver_children

_LONGEST = 1 << 20
_DESCRIPTORS = 16


def serve(door: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Serve fork requests until the peer is gone; in each forked process, return its request."""
    assert threading.active_count() == 1
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:  # a process has ended
                    pid, report = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(report, os.waitpid(pid, 0)[1])
                    os.close(report)
                    continue
                if key.fileobj is door:
                    os._exit(0)
                with listener.accept()[0] as caller:
                    request, descriptors = _receive(caller)
                if request is None:  # the caller was killed
                    continue
                pid = os.fork()
                if pid == 0:
                    address = listener.getsockname() if request.get("forks_children") else None
                    for own in (selector, door, listener):  # closing later could hit reused descriptor numbers
                        own.close()
                    _become(request, descriptors)
                    if address is not None:
                        forkserver_children.install(address)
                    return request
                report = descriptors.pop()
                for descriptor in descriptors:
                    os.close(descriptor)
                _tell(report, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))


def _receive(door: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    text, descriptors, _, _ = socket.recv_fds(door, _LONGEST, _DESCRIPTORS)
    while text and not text.endswith(b"\n"):
        text += door.recv(_LONGEST)
    return (json.loads(text) if text else None), list(descriptors)


def _tell(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller no longer waits
        os.write(report, array.array("i", [number]).tobytes())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set up the streams, descriptors, variables, limits and arguments of the new process; in a new session if
    requested."""
    numbers = [0, 1, 2, *request.get("pass_fds", ())]
    free = max(*numbers, *descriptors) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors[: len(numbers)]]
    os.closerange(3, free)  # including the server's own
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
    os.closerange(free, max(moved) + 64)
    if request.get("start_new_session"):
        os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(number, mode, encoding="utf-8", closefd=False, buffering=1 if number == 2 else -1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["words"]
    with open("/proc/self/comm", "w") as file:  # its command line remains that of the server
        file.write(_name(request["words"]))


def _name(words: list[str]) -> str:
    """Return the name for `ps -o comm`: the module without its package, or "spawned" for `multiprocessing`
    processes."""
    if words[-1] == "--multiprocessing-fork":
        return "spawned"
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:2] else os.path.basename(words[0])


def run(words: list[str]) -> None:
    """Do what the interpreter does for these arguments."""
    sys.path.pop(0)
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *sys.path)]
    if words[0] == "-u":
        words = sys.argv = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    while words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = sys.argv = words[2:]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv, main = ["-c", *words[2:]], vars(sys.modules["__main__"])
        del main["__file__"]  # processes spawned from here would import it
        exec(compile(words[1], "<string>", "exec"), main)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def leave(code: object) -> NoReturn:
    """Exit like the interpreter, but without tearing down every module, which takes a quarter of a second."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def keep_operators() -> None:
    """Keep torch's operators registered until process exit; unregistering them all takes a tenth of a second."""
    for each, kept in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if kept.func.__name__ == "_del_library":
            each.atexit = False


if __name__ == "__main__":
    for name in sys.argv[3:]:
        importlib.import_module(name)
    keep_operators()
    gc.freeze()
    request = serve(*(socket.socket(fileno=int(word)) for word in sys.argv[1:3]))
    try:
        run(request["words"])
    except SystemExit as done:
        leave(done.code)
    except Exception:  # noqa: BLE001  as the interpreter handles the rest
        sys.last_type, sys.last_value, sys.last_traceback = error = sys.exc_info()
        sys.excepthook(*error)
        leave(1)
    leave(0)
