"""Command that starts a process through forkserver_main.py, forwards signals to it and exits as it does.

Usage: `python -IS forkserver_command.py SOCKET CHILDREN WORDS...`, where CHILDREN is "forked" if the process's Python
subprocesses are forked as well; see `commands()` and `worker_command()` in forkserver_pool.py.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys


def _is_open(number: int) -> bool:
    """Return whether a descriptor is open; the one used to list descriptors is already closed."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def main() -> None:
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_open(int(name))]
    status, told = os.pipe()
    request = {
        "words": sys.argv[3:],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "pass_fds": inherited,
        "forks_children": sys.argv[2] == "forked",
    }
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the process id is known
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        text = json.dumps(request).encode() + b"\n"
        if rest := text[socket.send_fds(server, [text], [0, 1, 2, *inherited, told]) :]:
            server.sendall(rest)
    os.close(told)
    (pid,) = struct.unpack("i", os.read(status, 4))
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if not (report := os.read(status, 4)):  # the server has ended before the process
        os._exit(1)
    (ended,) = struct.unpack("i", report)
    if os.WIFSIGNALED(ended):
        signal.signal(os.WTERMSIG(ended), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(ended))
    os._exit(os.WEXITSTATUS(ended))


main()
