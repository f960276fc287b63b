"""ControlClient: sends requests to a recorder over ZeroMQ, on this host or over the network."""

import uuid
from typing import Any

from tapscope.core import wire
from tapscope.core.errors import RecorderError, UnreachableError
from tapscope.core.wire import Message
from tapscope.dumper.transport.network import Endpoint

TIMEOUT_S = 10.0
"""Default timeout, longer than a change may take; see :mod:`tapscope.dumper.recorder.two_phase_commit`."""


class ControlClient:
    """Client of a recorder's control requests. Thread-safe, because each call uses its own socket."""

    def __init__(self, where: Endpoint | str, *, timeout_s: float = TIMEOUT_S) -> None:
        """``where`` is an endpoint, or the ``address`` from ``recorder.json``."""
        self.endpoint = where if isinstance(where, Endpoint) else Endpoint(where)
        self.timeout_s = timeout_s

    def call(self, verb: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Send a request and return (HTTP status, body).

        Raises UnreachableError if the recorder does not answer in time, RecorderError if it refuses the request.
        """
        request = Message("request", {"id": uuid.uuid4().hex, "verb": verb, "body": body})
        with self.endpoint.dealer() as channel:
            channel.send_multipart(wire.encode(request))
            if not self.endpoint.wait(channel, self.timeout_s):
                raise UnreachableError(f"the recorder did not answer within {self.timeout_s:g} s: is it stopped?")
            reply = wire.decode(channel.recv_multipart())
        if reply.kind != "reply":
            raise RecorderError(f"the recorder refused the request: {reply.fields.get('reason', reply.kind)}")
        return int(reply["status"]), dict(reply["body"])
