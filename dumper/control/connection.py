"""Connection: HTTP of uvicorn with deadlines for what a client sends and reads, and a limit of clients."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""Within this time a request has come as a whole, its headers and its body."""
ANSWER_S = 60.0
"""Within this time the client has read its answer."""
MAX_CONNECTIONS = 64
"""Clients at once; for one more, the oldest of those that are not being answered has to go."""
BACKLOG = 32
"""Connections that are accepted in one go: each is an open file until it is refused."""

_unanswered: "dict[BoundedConnection, None]" = {}


class BoundedConnection(H11Protocol):
    """One client. All of this comes before anybody looks at a token."""

    _deadline: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in, and where there are too many, another one out."""
        if len(self.connections) >= MAX_CONNECTIONS:
            if not _unanswered:
                self._is_refused = True
                _refuse(transport, b"503 Service Unavailable", b"too many connections; try again")
                return
            next(iter(_unanswered)).give_up()
        super().connection_made(transport)
        _unanswered[self] = None
        self._wait(REQUEST_S)

    def data_received(self, data: bytes) -> None:
        """A piece of a request."""
        if not self._is_refused:
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """An answer is sent; the next request may be there already."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # nothing comes from the client before it has read that
            self._wait(ANSWER_S)
        else:
            self._wait(None)
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was sent away."""
        self._wait(None)
        _unanswered.pop(self, None)
        if not self._is_refused:
            super().connection_lost(exc)

    def give_up(self) -> None:
        """It has taken too long, or others want in."""
        self.connections.discard(self)
        _unanswered.pop(self, None)
        if self.cycle is not None and self.cycle.response_started and self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        else:
            _refuse(self.transport, b"408 Request Timeout", b"the request did not come in time")

    def _look(self) -> None:
        """Whose turn it is: the client's, to send the rest of its request, or ours."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state in (h11.IDLE, h11.SEND_BODY):
            if self not in _unanswered:
                _unanswered[self] = None
                self._wait(None)
            has_begun = state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
            if has_begun and self._deadline is None:  # uvicorn itself closes those that send nothing
                self._wait(REQUEST_S)
        elif self in _unanswered:
            del _unanswered[self]
            self._wait(ANSWER_S)

    def _wait(self, time_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if time_s is None else self.loop.call_later(time_s, self.give_up)


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
