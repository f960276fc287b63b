"""OutputQueue: outputs of one request that have arrived and were not read yet."""

import asyncio

from tapscope.core.errors import TapscopeError
from tapscope.engine.requests.output import Output


class OutputQueue:
    """Holds at most one output: those that a slow reader has not read are merged."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.is_over = False
        """Whether the engine has finished or refused the request."""
        self._pending: Output | None = None
        self._error: TapscopeError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add an output."""
        self._pending = output if self._pending is None else self._pending.followed_by(output)
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    def refuse(self, error: TapscopeError) -> None:
        """End the queue with ``error``."""
        if not self.is_over:
            self._error, self.is_over = error, True
            self._arrived.set()

    async def next(self) -> Output:
        """Wait for the output since the last call; raises the error that the request was refused with."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is not None:
            self._arrived.set()
        return output
