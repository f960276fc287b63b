"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")
_AT_ONCE = 16  # streams that are begun before the event loop may do something else


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Items of all ``streams`` as they arise, each with the index of its stream; closes all of them in the end.

    A stream is asked for its next item once the last one was taken, so that a slow reader holds all of them.
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
                await asyncio.sleep(0)  # others' turn
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
