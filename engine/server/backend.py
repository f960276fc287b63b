"""The engine's process as a server: it starts the front, runs the engine beside it, and ends with it."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import zmq

from tapscope.engine.server.settings import ServerSettings
from tapscope.errors import LiveError, RankLostError, UsageError

if TYPE_CHECKING:
    from tapscope.engine.llm import LLM

LINGER_S = 10.0
"""How long a server whose engine is lost answers 503 with the reason before it ends."""
_KILL_S = 5.0


class Backend:
    """Enter it before the model is loaded (the front starts meanwhile), then :meth:`run` with the loaded model."""

    def __init__(
        self,
        model: str,
        listener: socket.socket,
        settings: ServerSettings,
        *,
        front_module: str = "tapscope.engine.server",
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """``front_module`` is run as the front by ``python -m``; ``extras`` are JSON values for it."""
        self._model = model
        self._listener = listener
        self._settings = settings
        self._module = front_module
        self._extras = dict(extras or {})
        self._signals = 0
        self._is_running = self._is_draining = False

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="tapscope-"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        address = f"ipc://{self._folder / 'engine'}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._folder.rmdir()
            raise UsageError(f"no socket can be made in {self._folder}: {error}; set TMPDIR to a short path") from None
        self._start_front(address)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_running:
            self._front.kill()  # the model was not loaded: nobody was served
        self._channel.close()  # a front that still serves sees it, and ends
        with self._listener, suppress(subprocess.TimeoutExpired):
            self._front.wait(_KILL_S)
        if self._front.poll() is None:
            self._front.kill()
            self._front.wait()
        self._socket.close(linger=0)  # the front has ended: nobody reads what is left
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, llm: "LLM") -> None:
        """Serve until SIGTERM or Ctrl-C has drained the front; a second one raises SystemExit.

        Raises RankLostError when the engine was lost, LiveError when the front was.
        """
        from tapscope.engine.server.service import EngineService  # with it comes torch: the front starts before

        service = EngineService(
            llm.engine, self._socket, max_waiting=self._settings.max_waiting, on_failure=self._on_failure
        )
        service.watch(self._channel.fileno(), service.stop)
        self._is_running = True
        if self._signals:
            self._drain()
        service.run()
        code = self._front.wait()
        if service.failure is not None:
            raise service.failure
        if not self._is_draining or code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise LiveError(f"the HTTP process {how}; the engine ends with it")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C drain; the second one, or one before the model is loaded, ends at once."""
        names = (signal.SIGTERM, signal.SIGINT)
        previous = [signal.signal(name, self._on_signal) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, previous, strict=True):
                signal.signal(name, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self._is_running or self._signals > 1:
            raise SystemExit(128 + number)
        self._drain()

    def _on_failure(self, error: RankLostError) -> None:
        print(
            f"tapscope: error: {error}\nthe server answers 503 and ends in {LINGER_S:g} s", file=sys.stderr, flush=True
        )
        timer = threading.Timer(LINGER_S, self._drain)
        timer.daemon = True
        timer.start()

    def _drain(self) -> None:
        self._is_draining = True
        with suppress(OSError):
            self._channel.send(b"drain\n")

    def _start_front(self, address: str) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), self._listener.fileno())
            self._front = subprocess.Popen(
                [sys.executable, "-m", self._module, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to data
            )
        self._listener.close()  # from now on the front's alone: what it closes is closed
        welcome = {"address": address, "model": self._model, "extras": self._extras}
        self._channel.sendall(json.dumps(welcome | {"settings": self._settings.plain()}).encode() + b"\n")
