"""ServerProcess: the engine process of a server; starts the HTTP process and other replicas, and runs replica 0."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import zmq

from tapscope.core.errors import LiveError, RankLostError
from tapscope.core.gc_control import freeze
from tapscope.core.observe import ObserverFactory
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat, heartbeat_path
from tapscope.engine.distributed.watchdog import enable_stack_dumps, stack_path
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.runners.replica_processes import ReplicaLostError, Replicas
from tapscope.engine.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from tapscope.engine.engine import Engine
    from tapscope.engine.runners.engine_service import EngineService

LINGER_S = 10.0
"""Seconds during which a server that has lost its engine responds with 503 and the reason before it exits."""
_KILL_S = 5.0


class ServerProcess:
    """Context manager that starts the HTTP process and the other replicas; call :meth:`run` inside to serve."""

    def __init__(
        self,
        config: EngineConfig,
        observer: ObserverFactory | None,
        listener: socket.socket,
        settings: ServerSettings,
        *,
        http_module: str = "tapscope.engine.server",
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """``python -m`` runs ``http_module`` as the HTTP process; ``extras`` are JSON values passed to this process."""
        self._config = config
        self._observer = observer
        self._listener = listener
        self._settings = settings
        self._module = http_module
        self._extras = dict(extras or {})
        self._signals = 0
        self._is_running = self._is_draining = False
        self._lost: RankLostError | None = None
        self._signalled: socket.socket | None = None
        """Socket that becomes readable when a signal arrives; only set within :meth:`signals`."""

    def __enter__(self) -> Self:
        self._replicas = Replicas(self._config, self._observer, self._settings.max_waiting)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(self._replicas.addresses[0])
        self._heartbeat = Heartbeat.create(heartbeat_path(self._replicas.folder, 0))
        enable_stack_dumps(stack_path(self._replicas.folder, 0))
        self._start_http_process()
        try:
            self._replicas.spawn()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_running:
            self._http_process.kill()  # the model was not loaded, so no requests are live
            self._replicas.abandon()
        self._channel.close()  # makes an HTTP process that still serves exit
        with self._listener, suppress(subprocess.TimeoutExpired):
            self._http_process.wait(_KILL_S)
        if self._http_process.poll() is None:
            self._http_process.kill()
            self._http_process.wait()
        self._socket.close(linger=0)  # the HTTP process has ended and no longer reads
        self._context.term()
        self._replicas.close()

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Load replica 0 and serve until SIGTERM or Ctrl-C has drained the server; a second signal raises SystemExit.

        ``on_ready`` is called when every replica is loaded. Raises the error of a replica that fails to load,
        RankLostError if an engine is lost, LiveError if the HTTP process is lost.
        """
        from tapscope.engine.engine import Engine  # imports torch, after the HTTP process was started

        engine = Engine(self._config, self._observer, self._heartbeat)
        try:
            self._heartbeat.set_activity(Activity.IDLE)
            self._replicas.wait_for_all("ready")
            if on_ready is not None:
                on_ready()
            self._serve(engine)
        finally:
            # The observers of all replicas close at the same time, as they may share a recorder.
            self._replicas.request_close()
            engine.close()

    def _serve(self, engine: "Engine") -> None:
        from tapscope.engine.runners.engine_service import EngineService

        service = EngineService(
            engine, self._socket, max_waiting=self._settings.max_waiting, on_failure=self._on_failure
        )
        service.watch(self._channel.fileno(), service.stop)
        if self._signalled is not None:
            service.watch(self._signalled.fileno(), self._read_signals)
        for source in self._replicas.sources:
            service.watch(source, lambda: self._check_replicas(service))
        freeze()
        self._is_running = True
        if self._signals:
            self._drain()
        service.run()
        code = self._http_process.wait()
        self._check_replicas(service)  # a replica may have been lost while the HTTP process was ending
        if self._lost is not None:
            raise self._lost
        if not self._is_draining or code:
            cause = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise LiveError(f"the HTTP process {cause}; the engine ends with it")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Context manager: SIGTERM and Ctrl-C drain the server.

        A second signal, or a signal before the model is loaded, exits immediately.
        """
        names = (signal.SIGTERM, signal.SIGINT)
        self._signalled, wake = socket.socketpair()
        with self._signalled, wake:
            # Python runs signal handlers only between bytecode instructions. The handler of a signal that arrives right
            # before the service polls would wait for the next message, so the service polls this socket as well.
            wake.setblocking(False)
            before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            previous = [signal.signal(name, self._on_signal) for name in names]
            try:
                yield
            finally:
                for name, handler in zip(names, previous, strict=True):
                    signal.signal(name, handler)
                signal.set_wakeup_fd(before)

    def _read_signals(self) -> None:
        """Drain the signal socket; the service calls this after polling, when the signal handlers have already run."""
        assert self._signalled is not None
        self._signalled.recv(4096)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self._is_running or self._signals > 1:
            raise SystemExit(128 + number)
        self._drain()

    def _check_replicas(self, service: "EngineService") -> None:
        """Handle the end of a replica: new requests are rejected, live requests of other replicas finish."""
        try:
            self._replicas.check()
        except ReplicaLostError as error:
            for source in self._replicas.sources:
                service.unwatch(source)
            self._notify_http_process({"do": "fail", "dp_rank": error.dp_rank, "reason": str(error)})
            self._end_soon(error)

    def _on_failure(self, error: RankLostError) -> None:
        """Handle the loss of this process's engine; the engine service has already notified the HTTP process."""
        self._end_soon(RankLostError(f"DP replica 0: {error}") if self._config.dp > 1 else error)

    def _end_soon(self, error: RankLostError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        print(
            f"tapscope: error: {error}\nthe server answers 503 and ends in {LINGER_S:g} s", file=sys.stderr, flush=True
        )
        timer = threading.Timer(LINGER_S, self._drain)
        timer.daemon = True
        timer.start()

    def _drain(self) -> None:
        self._is_draining = True
        self._notify_http_process({"do": "drain"})

    def _notify_http_process(self, line: dict[str, Any]) -> None:
        with suppress(OSError):
            self._channel.sendall(json.dumps(line).encode() + b"\n")

    def _start_http_process(self) -> None:
        self._channel, child_channel = socket.socketpair()
        with child_channel:
            descriptors = (child_channel.fileno(), self._listener.fileno())
            self._http_process = subprocess.Popen(
                [sys.executable, "-m", self._module, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,  # to stderr: stdout is reserved for data
            )
        self._listener.close()  # only the HTTP process keeps it open
        welcome = {
            "addresses": self._replicas.addresses,
            "prefix_affinity": self._config.has_affinity,
            "model": self._config.model,
            "extras": self._extras,
        }
        watched = {"pid": os.getpid(), "folder": str(self._replicas.folder), "limit_s": self._config.rank_timeout_s}
        self._notify_http_process(welcome | {"settings": self._settings.plain(), "watched": watched})
