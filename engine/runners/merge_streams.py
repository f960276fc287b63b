"""Merge several async streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")
_AT_ONCE = 16  # number of streams to start before yielding to the event loop


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield (stream index, item) for the items of all ``streams`` as they arrive; close all streams at the end.

    The next item of a stream is requested only after its previous one was consumed, so that a slow consumer applies
    back-pressure.
    """
    arrived: asyncio.Queue[tuple[int, asyncio.Task[T]]] = asyncio.Queue()
    pending: set[asyncio.Task[T]] = set()

    def ask(index: int) -> None:
        task = asyncio.ensure_future(anext(streams[index]))
        pending.add(task)
        task.add_done_callback(lambda done: arrived.put_nowait((index, done)))

    try:
        for index in range(len(streams)):
            ask(index)
            if index % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # yield to other tasks
        while pending:
            index, task = await arrived.get()
            pending.discard(task)
            try:
                item = task.result()
            except StopAsyncIteration:
                continue
            yield index, item
            ask(index)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
