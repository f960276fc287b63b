"""EngineService: one thread that owns an Engine, answers clients' messages and computes steps.

Clients (the HTTP process, or an asyncio program in this one) send ``submit``, ``drop``, ``abort``, ``call`` and get
``outputs``, ``refused``, ``answer``, ``failed``. While nothing is live it sleeps in one poll, however long.
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
from tapscope.engine.runners.rpc_methods import VERBS

_log = logging.getLogger(__name__)
_INTAKE_S = 0.02  # of messages between two steps
_MESSAGE_VALUES = 10_000  # log-probabilities; a larger message would keep the HTTP process from everything else
_pack = msgspec.msgpack.encode

Owner = tuple[bytes, int]
"""A client's identity on the socket, and its number for the request."""


@dataclass(slots=True)
class _Preparing:
    """A request that waits for its grammar."""

    owner: Owner
    request: Request
    is_aborted: bool = False


class EngineService:
    """Runs steps while requests are live, and everything else between two steps."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        *,
        max_waiting: int | None = None,
        on_failure: Callable[[RankLostError], None] | None = None,
    ) -> None:
        """``socket`` is a bound ROUTER that only :meth:`run` uses from now on.

        ``on_failure`` is called once, in its thread, when the engine can compute no more.
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
        """Why the engine can compute no more; None while it can."""
        for descriptor in engine.rank_sentinels:
            self.watch(descriptor, self._look_at_ranks)
        self.watch(self._woken.fileno(), self._submit_prepared)

    def watch(self, source: "int | zmq.Socket[bytes]", on_readable: Callable[[], None]) -> None:
        """Have ``on_readable`` called between two steps whenever ``source`` has something to read."""
        self._watched[source] = on_readable
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: "int | zmq.Socket[bytes]") -> None:
        """The inverse of :meth:`watch`."""
        if self._watched.pop(source, None) is not None:
            self._poller.unregister(source)

    def stop(self) -> None:
        """Have :meth:`run` return; from its own thread (another sends the message ``stop``)."""
        self._is_stopped = True

    def run(self) -> None:
        """Serve until stopped; what is live then is aborted and answered."""
        while not self._is_stopped:
            if self.failure or not self._engine.scheduler.has_work:
                self._engine.runner.heartbeat.set_activity(Activity.IDLE)
                self._attend(None)
            else:
                self._attend(0)
            if self.failure is None and not self._is_stopped:
                self._step()
        self._engine.runner.heartbeat.set_activity(Activity.CLOSING)
        self._drop_all(RankLostError("the engine has been stopped and takes no more requests"))
        self.unwatch(self._woken.fileno())
        self._wake.close()
        self._woken.close()

    def _attend(self, timeout_ms: int | None) -> None:
        """Handle what has arrived, waiting ``timeout_ms`` (None: for ever) for the first; where it is much, the next
        step comes first: one client's hundred requests keep nobody's tokens back."""
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
            everybody = [*self._owners, *self._preparing]
            self._abort([message["request"]] if message["request"] is not None else everybody)
        elif message.kind == "call":
            self._answer(identity, message)
        elif message.kind == "stop":
            self.stop()

    def _drop(self, name: str, owner: Owner) -> None:
        """A client wants no more of its request; another one's of this name goes on."""
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
                raise OverloadedError(f"{num_waiting} requests are waiting already; try again later")
            given = message["options"].items()
            options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given}
            params = SamplingParams.build(message["params"])
            request = Request(id=name, prompt_ids=tuple(message["prompt_ids"]), params=params, **options)
            if (grammar := self._engine.prepare(request)) is not None:
                self._preparing[name] = _Preparing(owner, request)
                grammar.add_done_callback(lambda _: self._note_prepared(name))
                return
            self._engine.submit(request)
        except Exception as error:  # noqa: BLE001  (it belongs to whoever sent the request)
            self._refuse(owner, error)
        else:
            self._owners[name] = owner

    def _note_prepared(self, name: str) -> None:
        """A request's grammar is compiled, or is refused; called in any thread."""
        self._prepared.append(name)
        with suppress(OSError):  # the service has ended
            self._wake.send(b"\0")

    def _submit_prepared(self) -> None:
        """Submit the requests whose grammars are compiled, each if its client still wants it."""
        self._woken.recv(4096)
        while self._prepared:
            name = self._prepared.popleft()
            if (preparing := self._preparing.pop(name, None)) is None:
                continue
            try:
                self._engine.submit(preparing.request)
            except Exception as error:  # noqa: BLE001  (it belongs to whoever sent the request)
                self._refuse(preparing.owner, error)
                continue
            self._owners[name] = preparing.owner
            if preparing.is_aborted:
                self._abort([name])

    def _abort(self, names: list[str]) -> None:
        """Drop live requests and tell their clients; one whose grammar is being compiled ends after that."""
        for name in names:
            if name in self._preparing:
                self._preparing[name].is_aborted = True
        outputs = [self._engine.abort(name) for name in names if name in self._owners]
        self._deliver([output for output in outputs if output is not None])

    def _answer(self, identity: bytes, message: Message) -> None:
        fields: dict[str, Any] = {"number": message["number"]}
        try:
            if message["verb"] not in VERBS:
                raise UsageError(f"the engine has no verb {message['verb']!r}; it has {', '.join(VERBS)}")
            fields["result"] = VERBS[message["verb"]](self._engine, **message["arguments"])
        except Exception as error:  # noqa: BLE001  (it belongs to whoever asked)
            fields |= _described(error)
            if isinstance(error, RankLostError):
                self._fail(error)
        self._send(identity, Message("answer", fields))

    def _step(self) -> None:
        try:
            self._deliver(self._engine.step())
        except Exception as error:  # noqa: BLE001  (it is delivered to every live request)
            _log.error("a step failed; its requests are answered with the error", exc_info=True)
            if isinstance(error, RankLostError):
                self._fail(error)
            else:
                self._drop_all(error)

    def _deliver(self, outputs: list[Output]) -> None:
        """Send each output to its request's client, one message a client but for large outputs."""
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
        """As msgpack: a million log-probabilities take a thirtieth of JSON's time."""
        self._send(identity, Message("outputs", frames=(_pack(items),)))

    def _look_at_ranks(self) -> None:
        """A rank ended while nothing was computed."""
        try:
            self._engine.check_ranks()
        except RankLostError as error:
            self._fail(error)

    def _fail(self, error: RankLostError) -> None:
        """The engine can compute no more: tell everybody why, once."""
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


def _described(error: Exception) -> dict[str, Any]:
    """An error as fields that :func:`tapscope.engine.runners.replica_client.error_of` raises again."""
    if isinstance(error, TapscopeError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "TapscopeError", "text": f"a step failed: {error!r}"}
