"""Mailbox: what has arrived of one request and was not read yet."""

import asyncio

from tapscope.core.errors import TapscopeError
from tapscope.engine.requests.output import Output


class Mailbox:
    """At most one output, however slow the reader is."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.is_over = False
        """Whether the engine has ended the request."""
        self._pending: Output | None = None
        self._error: TapscopeError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        """An output came."""
        self._pending = output if self._pending is None else self._pending.followed_by(output)
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    def refuse(self, error: TapscopeError) -> None:
        """Nothing more will come, because of ``error``."""
        if not self.is_over:
            self._error, self.is_over = error, True
            self._arrived.set()

    async def next(self) -> Output:
        """What has come since the last call; raises what the request was refused with."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is not None:
            self._arrived.set()
        return output
