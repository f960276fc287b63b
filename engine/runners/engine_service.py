"""EngineService: the loop that owns an Engine, handles client messages and runs steps.

Clients (the HTTP process, or an asyncio program in this process) send ``submit``, ``drop``, ``abort`` and ``call``.
They receive ``outputs``, ``refused``, ``answer`` and ``failed``. An idle service blocks in one poll without a timeout.
"""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from socket import socketpair
from time import monotonic
from typing import Any

import msgspec
import zmq

from tapscope.core.errors import OverloadedError, RankLostError, TapscopeError, UsageError
from tapscope.core.wire import Message, decode, encode
from tapscope.engine.distributed.heartbeat import Activity
from tapscope.engine.engine import Engine
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.request import Request
from tapscope.engine.runners.rpc_methods import METHODS

_log = logging.getLogger(__name__)
_INTAKE_S = 0.02  # maximum time spent on messages between two steps
_MESSAGE_VALUES = 10_000  # log-probabilities per message; larger messages would block the HTTP process
_pack = msgspec.msgpack.encode

Owner = tuple[bytes, int]
"""(identity of the client's socket, the client's number for the request)."""


@dataclass(slots=True)
class _Preparing:
    """A request whose grammar is being compiled."""

    owner: Owner
    request: Request
    is_aborted: bool = False


class EngineService:
    """Runs steps while requests are live and handles client messages between steps."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        *,
        max_waiting: int | None = None,
        on_failure: Callable[[RankLostError], None] | None = None,
    ) -> None:
        """``socket`` is a bound ROUTER socket that only :meth:`run` may use from now on.

        ``on_failure`` is called once, in the service's thread, when the engine is lost.
        """
        self._engine = engine
        self._socket = socket
        self._max_waiting = max_waiting
        self._on_failure = on_failure
        self._owners: dict[str, Owner] = {}
        self._preparing: dict[str, _Preparing] = {}
        self._prepared: deque[str] = deque()
        self._wake, self._woken = socketpair()
        self._clients: dict[bytes, None] = {}
        self._watched: dict[int | zmq.Socket[bytes], Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._is_stopped = False
        self.failure: RankLostError | None = None
        """Error that made the engine unusable; None while it works."""
        for descriptor in engine.rank_sentinels:
            self.watch(descriptor, self._check_ranks)
        self.watch(self._woken.fileno(), self._submit_prepared)

    def watch(self, source: "int | zmq.Socket[bytes]", on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` between two steps whenever ``source`` is readable."""
        self._watched[source] = on_readable
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: "int | zmq.Socket[bytes]") -> None:
        """Stop watching ``source``, see :meth:`watch`."""
        if self._watched.pop(source, None) is not None:
            self._poller.unregister(source)

    def stop(self) -> None:
        """Make :meth:`run` return. Call in the service's thread only; other threads send the message ``stop``."""
        self._is_stopped = True

    def run(self) -> None:
        """Serve until stopped. Live requests are then aborted and refused, and a pause ends."""
        while not self._is_stopped:
            if self.failure or self._engine.is_paused or not self._engine.scheduler.has_work:
                self._engine.runner.heartbeat.set_activity(Activity.IDLE)
                self._attend(None)
            else:
                self._attend(0)
            if self.failure is None and not self._is_stopped:
                self._step()
        self._engine.runner.heartbeat.set_activity(Activity.CLOSING)
        self._engine.is_paused = False
        self._drop_all(RankLostError("the engine has been stopped and accepts no more requests"))
        self.unwatch(self._woken.fileno())
        self._wake.close()
        self._woken.close()

    def _attend(self, timeout_ms: int | None) -> None:
        """Handle received messages, waiting up to ``timeout_ms`` (None: indefinitely) for the first one.

        Stops after ``_INTAKE_S``, so that a client with hundreds of requests does not delay the next step.
        """
        ready = self._poller.poll(timeout_ms)
        self._engine.runner.heartbeat.set_activity(Activity.WORKING)
        for source, _ in ready:
            if source is not self._socket:
                if (on_readable := self._watched.get(source)) is not None:
                    on_readable()
                continue
            until = monotonic() + _INTAKE_S
            while not self._is_stopped and self._socket.poll(0) and monotonic() < until:
                identity, *frames = self._socket.recv_multipart()
                self._handle(identity, decode(frames))

    def _handle(self, identity: bytes, message: Message) -> None:
        self._clients[identity] = None
        if message.kind == "submit":
            self._submit(identity, message)
        elif message.kind == "drop":
            self._drop(message["request"], (identity, message["number"]))
        elif message.kind == "abort":
            every_request = [*self._owners, *self._preparing]
            self._abort([message["request"]] if message["request"] is not None else every_request)
        elif message.kind == "call":
            self._answer(identity, message)
        elif message.kind == "stop":
            self.stop()

    def _drop(self, name: str, owner: Owner) -> None:
        """Abort a request that its client has abandoned. A request of another client with the same name continues."""
        if name in self._preparing and self._preparing[name].owner == owner:
            del self._preparing[name]
        if self._owners.get(name) == owner:
            del self._owners[name]
            self._engine.abort(name)

    def _submit(self, identity: bytes, message: Message) -> None:
        name, owner = message["request"], (identity, message["number"])
        try:
            if self.failure is not None:
                raise self.failure
            num_waiting = self._engine.num_waiting + len(self._preparing)
            if self._max_waiting is not None and num_waiting >= self._max_waiting:
                raise OverloadedError(f"{num_waiting} requests are already waiting; try again later")
            given = message["options"].items()
            options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given}
            params = SamplingParams.build(message["params"])
            request = Request(id=name, prompt_ids=tuple(message["prompt_ids"]), params=params, **options)
            if (grammar := self._engine.prepare(request)) is not None:
                self._preparing[name] = _Preparing(owner, request)
                grammar.add_done_callback(lambda _: self._note_prepared(name))
                return
            self._engine.submit(request)
        except Exception as error:  # noqa: BLE001  (reported to the client that sent the request)
            _log_if_unexpected(error)
            self._refuse(owner, error)
        else:
            self._owners[name] = owner

    def _note_prepared(self, name: str) -> None:
        """Record that compiling a request's grammar has ended and wake the service. Called in any thread."""
        self._prepared.append(name)
        with suppress(OSError):  # the service has ended
            self._wake.send(b"\0")

    def _submit_prepared(self) -> None:
        """Submit the requests whose grammars are compiled, except those that their clients have abandoned."""
        self._woken.recv(4096)
        while self._prepared:
            name = self._prepared.popleft()
            if (preparing := self._preparing.pop(name, None)) is None:
                continue
            try:
                self._engine.submit(preparing.request)
            except Exception as error:  # noqa: BLE001  (reported to the client that sent the request)
                _log_if_unexpected(error)
                self._refuse(preparing.owner, error)
                continue
            self._owners[name] = preparing.owner
            if preparing.is_aborted:
                self._abort([name])

    def _abort(self, names: list[str]) -> None:
        """Abort live requests and deliver their outputs.

        Requests whose grammars are being compiled are aborted after submission.
        """
        for name in names:
            if name in self._preparing:
                self._preparing[name].is_aborted = True
        outputs = [self._engine.abort(name) for name in names if name in self._owners]
        self._deliver([output for output in outputs if output is not None])

    def _answer(self, identity: bytes, message: Message) -> None:
        fields: dict[str, Any] = {"number": message["number"]}
        try:
            method = message["method"]
            if method not in METHODS:
                raise UsageError(f"unknown engine method {method!r}; valid methods: {', '.join(METHODS)}")
            fields["result"] = METHODS[method](self._engine, **message["arguments"])
        except Exception as error:  # noqa: BLE001  (reported to the caller)
            _log_if_unexpected(error)
            fields |= _described(error)
            if isinstance(error, RankLostError):
                self._fail(error)
        self._send(identity, Message("answer", fields))

    def _step(self) -> None:
        try:
            self._deliver(self._engine.step())
        except RankLostError as error:
            self._fail(error)  # no traceback: it would show a peer waiting for the lost rank; the message has the cause
        except Exception as error:  # noqa: BLE001  (reported to every live request)
            _log.error("a step failed; its requests fail with this error", exc_info=True)
            self._drop_all(error)

    def _deliver(self, outputs: list[Output]) -> None:
        """Send the outputs to their clients, one message per client except for large outputs."""
        batches: dict[bytes, list[Any]] = {}
        sizes: dict[bytes, int] = {}
        for output in outputs:
            owner = self._owners.get(output.request)
            if owner is None:
                continue
            identity = owner[0]
            batches.setdefault(identity, []).append([owner[1], output.plain()])
            sizes[identity] = sizes.get(identity, 0) + output.num_values
            if output.finish_reason:
                del self._owners[output.request]
            if sizes[identity] > _MESSAGE_VALUES:
                self._send_outputs(identity, batches.pop(identity))
                del sizes[identity]
        for identity, items in batches.items():
            self._send_outputs(identity, items)

    def _send_outputs(self, identity: bytes, items: list[Any]) -> None:
        """Send outputs to a client, encoded as msgpack: a million log-probabilities take 1/30 of the time of JSON."""
        self._send(identity, Message("outputs", frames=(_pack(items),)))

    def _check_ranks(self) -> None:
        """Check the ranks; called when one has ended while no step was running."""
        try:
            self._engine.check_ranks()
        except RankLostError as error:
            self._fail(error)

    def _fail(self, error: RankLostError) -> None:
        """Report the loss of the engine to all clients, once, and refuse all requests."""
        for descriptor in self._engine.rank_sentinels:
            self.unwatch(descriptor)
        if self.failure is None:
            self.failure = error
            for identity in self._clients:
                self._send(identity, Message("failed", {"reason": str(error)}))
            if self._on_failure is not None:
                self._on_failure(error)
        self._drop_all(error)

    def _drop_all(self, error: Exception) -> None:
        preparing, self._preparing = self._preparing, {}
        for each in preparing.values():
            self._refuse(each.owner, error)
        owners, self._owners = self._owners, {}
        for name, owner in owners.items():
            self._engine.abort(name)
            self._refuse(owner, error)

    def _refuse(self, owner: Owner, error: Exception) -> None:
        self._send(owner[0], Message("refused", {"number": owner[1], **_described(error)}))

    def _send(self, identity: bytes, message: Message) -> None:
        self._socket.send_multipart([identity, *encode(message)])


def _log_if_unexpected(error: Exception) -> None:
    """Log an internal error with its traceback. TapscopeErrors, which users cause, are only reported to the client."""
    if not isinstance(error, TapscopeError):
        _log.error("a request failed unexpectedly", exc_info=error)


def _described(error: Exception) -> dict[str, Any]:
    """Return message fields from which :func:`tapscope.engine.runners.replica_client.error_of` rebuilds ``error``."""
    if isinstance(error, TapscopeError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "TapscopeError", "text": f"a step failed: {error!r}"}
