"""A command that has a process forked by forkserver_main.py, forwards signals to it and ends as it does:
`python -IS forkserver_command.py SOCKET WORDS...`; see `commands()` in forkserver_pool.py.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys


def main() -> None:
    status, report = os.pipe()
    request = {
        "words": sys.argv[2:],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "forks_children": True,
    }
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until it is known whom they are for
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        text = json.dumps(request).encode() + b"\n"
        if rest := text[socket.send_fds(server, [text], [0, 1, 2, report]) :]:
            server.sendall(rest)
    os.close(report)
    (pid,) = struct.unpack("i", os.read(status, 4))
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    (ended,) = struct.unpack("i", os.read(status, 4))
    if os.WIFSIGNALED(ended):
        signal.signal(os.WTERMSIG(ended), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(ended))
    os._exit(os.WEXITSTATUS(ended))


main()
