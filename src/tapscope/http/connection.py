"""BoundedConnection: uvicorn's HTTP protocol with send and receive deadlines and a limit on open connections."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Connection limits and deadlines of one server."""

    max_connections: int
    """Maximum number of open connections. Beyond it, the oldest connection without a complete request is closed."""
    request_s: float = 10.0
    """Deadline in seconds for receiving a whole request (headers and body); extended according to ``min_rate``."""
    min_rate: float = 10_000.0
    """Bytes per second at which a client must send to extend the deadline of a long body."""
    answer_s: float | None = None
    """Deadline in seconds for sending the response; None: a response may be streamed indefinitely."""
    read_s: float = 60.0
    """Deadline in seconds for the client to read the rest of a complete response."""


class BoundedConnection(H11Protocol):
    """Connection of one client. All limits apply before authentication; :func:`bounded` creates a server's subclass."""

    limits: ClassVar[ConnectionLimits]
    unanswered: "ClassVar[dict[BoundedConnection, None]]"
    """Connections without a complete request, idle ones included, oldest first."""
    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False
    _num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; at the limit, close the oldest one without a complete request (idle or partial).

        If there is no such connection, the new one is refused with 503.
        """
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
        """Process a part of a request."""
        if not self._is_refused:
            self._num_bytes += len(data)
            super().data_received(data)
            self._update_deadline()

    def on_response_complete(self) -> None:
        """Handle the end of a response; the next request may have arrived already."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # the client sends no request before it has read the response
            self._set_deadline(self.limits.read_s)
        else:
            self._set_deadline(None)
            self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a disconnect by either side."""
        self._set_deadline(None)
        self.unanswered.pop(self, None)
        if not self._is_refused:
            super().connection_lost(exc)

    def give_up(self) -> None:
        """Close the connection, with a 408 if no response has started.

        Called when a deadline has passed or the connection limit is reached.
        """
        self.connections.discard(self)
        self.unanswered.pop(self, None)
        if self.cycle is not None and self.cycle.response_started and self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        else:
            _refuse(self.transport, b"408 Request Timeout", b"the request did not come in time")

    def _update_deadline(self) -> None:
        """Update :attr:`unanswered` and the deadline: either the rest of a request or the response is awaited."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state in (h11.IDLE, h11.SEND_BODY):
            if self not in self.unanswered:
                self.unanswered[self] = None
                self._set_deadline(None)
            has_begun = state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
            if has_begun and self._deadline is None:  # uvicorn itself closes idle keep-alive connections
                self._wait_for_request()
        elif self in self.unanswered:
            del self.unanswered[self]
            self._set_deadline(self.limits.answer_s)

    def _wait_for_request(self) -> None:
        self._num_bytes = 0
        self._set_deadline(self.limits.request_s, self._check_progress)

    def _check_progress(self) -> None:
        """Extend the expired deadline by the time that the received bytes take at ``min_rate``; below 1 s, give up."""
        earned, self._num_bytes = self._num_bytes / self.limits.min_rate, 0
        if earned < 1:
            self.give_up()
        else:
            self._set_deadline(earned, self._check_progress)

    def _set_deadline(self, time_s: float | None, then: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if time_s is None else self.loop.call_later(time_s, then or self.give_up)


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """Create the protocol class of one server, for ``uvicorn.Config(http=...)``."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits, "unanswered": {}})


def _refuse(transport: asyncio.Transport, status: bytes, reason: bytes) -> None:
    """Respond with ``status`` and close the connection, whether or not the client reads the response."""
    if transport.is_closing():
        return
    body = b'{"error":"%s"}' % reason
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    transport.write(head % (status, len(body)) + body)
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()
