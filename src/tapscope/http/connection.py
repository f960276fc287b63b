"""Connection: uvicorn's HTTP protocol with deadlines for sending and reading, and a limit of open connections."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits for the clients of one server."""

    max_connections: int
    """Maximum open connections. Beyond it, the oldest idle connection is closed."""
    request_s: float = 10.0
    """Deadline for a whole request, headers and body; extended according to ``min_rate``."""
    min_rate: float = 10_000.0
    """Bytes per second that extend the deadline of a long body."""
    answer_s: float | None = None
    """Deadline for the response; None: a response may be streamed for any time."""
    read_s: float = 60.0
    """Deadline for reading the rest of a complete response."""


class BoundedConnection(H11Protocol):
    """One client. All limits apply before authentication; :func:`bounded` makes the class of a server."""

    limits: ClassVar[ConnectionLimits]
    unanswered: "ClassVar[dict[BoundedConnection, None]]"
    """Connections whose request is incomplete, the oldest first."""
    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False
    _num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; if there are too many, close the oldest idle one."""
        if len(self.connections) >= self.limits.max_connections:
            if not self.unanswered:
                self._is_refused = True
                _refuse(transport, b"503 Service Unavailable", b"too many connections; try again")
                return
            next(iter(self.unanswered)).give_up()
        super().connection_made(transport)
        self.unanswered[self] = None
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        if not self._is_refused:
            self._num_bytes += len(data)
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """A response was sent; the next request may have arrived already."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # the client sends nothing before it has read that
            self._wait(self.limits.read_s)
        else:
            self._wait(None)
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client disconnected, or was disconnected."""
        self._wait(None)
        self.unanswered.pop(self, None)
        if not self._is_refused:
            super().connection_lost(exc)

    def give_up(self) -> None:
        """The deadline passed, or the connection limit was reached."""
        self.connections.discard(self)
        self.unanswered.pop(self, None)
        if self.cycle is not None and self.cycle.response_started and self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        else:
            _refuse(self.transport, b"408 Request Timeout", b"the request did not come in time")

    def _look(self) -> None:
        """Whether the server waits for the client to send the rest of its request."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state in (h11.IDLE, h11.SEND_BODY):
            if self not in self.unanswered:
                self.unanswered[self] = None
                self._wait(None)
            has_begun = state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
            if has_begun and self._deadline is None:  # uvicorn itself closes silent connections
                self._wait_for_request()
        elif self in self.unanswered:
            del self.unanswered[self]
            self._wait(self.limits.answer_s)

    def _wait_for_request(self) -> None:
        self._num_bytes = 0
        self._wait(self.limits.request_s, self._look_at_progress)

    def _look_at_progress(self) -> None:
        """The deadline passed, apart from the extension that the client earned by sending."""
        earned, self._num_bytes = self._num_bytes / self.limits.min_rate, 0
        if earned < 1:
            self.give_up()
        else:
            self._wait(earned, self._look_at_progress)

    def _wait(self, time_s: float | None, then: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if time_s is None else self.loop.call_later(time_s, then or self.give_up)


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """The protocol of one server, for ``uvicorn.Config(http=...)``."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits, "unanswered": {}})


def _refuse(transport: asyncio.Transport, status: bytes, reason: bytes) -> None:
    """Answer with ``status`` and close, whether the client reads it or not."""
    if transport.is_closing():
        return
    body = b'{"error":"%s"}' % reason
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    transport.write(head % (status, len(body)) + body)
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()
