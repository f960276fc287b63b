"""EngineBridge: an engine of this process, served by a thread to asyncio programs of this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import zmq

from tapscope.core.wire import Message, encode
from tapscope.engine.engine import Engine
from tapscope.engine.server.engine_client import EngineClient
from tapscope.engine.server.engine_service import EngineService
from tapscope.engine.server.latency_metrics import Meters
from tapscope.engine.server.replica_processes import ReplicaLostError, Replicas
from tapscope.engine.text.tokenizer import Tokenizer

_ADDRESS = "inproc://engine"


class EngineBridge:
    """Until it is closed nothing else may use the engine, which it leaves open."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        meters: Meters | None = None,
        max_waiting: int | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """``replicas`` are those beside ``engine``, loaded; they are left open too."""
        self._tokenizer = tokenizer
        self._prefix_affinity = engine.config.has_affinity
        self._meters = meters or Meters()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.bind(_ADDRESS)
        service = EngineService(engine, socket, max_waiting=max_waiting)
        self._addresses = [_ADDRESS] if replicas is None else [_ADDRESS, *replicas.addresses[1:]]
        self._lost: ReplicaLostError | None = None
        if replicas is not None:
            for source in replicas.sources:
                service.watch(source, partial(self._look_at, replicas, service))
        self._thread = threading.Thread(target=_run, args=(service, socket), name="tapscope-engine", daemon=True)
        self._thread.start()
        self._clients: dict[asyncio.AbstractEventLoop, EngineClient] = {}

    @property
    def num_live(self) -> int:
        """Requests under way, of all clients."""
        return self._meters.num_live

    def client(self) -> EngineClient:
        """The running event loop's; those of loops that have ended are let go of."""
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            self._clients.pop(loop).close()
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = EngineClient(
                self._context,
                self._addresses,
                self._tokenizer,
                self._meters,
                prefix_affinity=self._prefix_affinity,
            )
            if self._lost is not None:
                self._clients[loop].replicas[self._lost.dp_rank].fail(str(self._lost))
        return self._clients[loop]

    def stop(self) -> None:
        """End the thread after the step under way; what is live fails. Safe to call twice."""
        if not self._thread.is_alive():
            return
        with self._context.socket(zmq.DEALER) as last:
            last.connect(_ADDRESS)
            last.send_multipart(encode(Message("stop")))
            self._thread.join()

    def close(self) -> None:
        """Stop, and disconnect the clients, in their loop's thread or after it has ended; safe to call twice."""
        self.stop()
        for client in self._all_clients():
            client.close()
        if not self._context.closed:
            self._context.term()

    def _look_at(self, replicas: Replicas, service: EngineService) -> None:
        """In the engine's thread: a replica has ended, and no client can go on."""
        try:
            replicas.check()
        except ReplicaLostError as error:
            self._lost = error
            for source in replicas.sources:
                service.unwatch(source)
            for loop, client in list(self._clients.items()):
                with suppress(RuntimeError):  # a loop that has ended
                    loop.call_soon_threadsafe(client.replicas[error.dp_rank].fail, str(error))

    def _all_clients(self) -> Iterator[EngineClient]:
        while self._clients:
            yield self._clients.popitem()[1]


def _run(service: EngineService, socket: "zmq.Socket[bytes]") -> None:
    try:
        service.run()
    finally:
        socket.close(linger=1000)
