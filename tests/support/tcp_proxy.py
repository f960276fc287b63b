"""A TCP proxy that a test can cut: connections break, and data in flight is lost."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards to ``127.0.0.1:PORT``, at most ``bytes_per_s`` in each direction, so that data is always in flight."""

    def __init__(self, port: int, bytes_per_s: int = 20_000_000) -> None:
        self._target = port
        self._pause_s = 65536 / bytes_per_s
        self._open = threading.Event()
        self._open.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_connections = 0
        """Forwarded connections."""
        self.num_bytes = 0
        """Forwarded bytes."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, down_s: float = 0.0) -> None:
        """Break every connection, and accept none for ``down_s``."""
        self._open.clear()
        self._break()
        time.sleep(down_s)
        self._open.set()

    def close(self) -> None:
        """Stop the proxy."""
        self._listener.close()
        self._break()

    def _break(self) -> None:
        pairs, self._pairs = self._pairs, []
        for each in (side for pair in pairs for side in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._open.is_set():
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((near, far))
                self.num_connections += 1
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self._pause_s)
                sink.sendall(data)
                self.num_bytes += len(data)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
