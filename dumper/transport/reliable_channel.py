"""Reliable channel: delivers each message once and in order, although the connection may break.

ZeroMQ reconnects by itself, but messages in flight are lost. So each side numbers its messages from 0 (member ``n``)
and keeps them until the other side has acknowledged them; duplicates and messages after a gap are ignored.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SentMessages(Generic[T]):
    """Messages sent and not yet acknowledged."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self.count = 0
        """Number of messages sent: the number of the next one."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, item: T) -> None:
        """Message number ``count`` is being sent; ``item`` is what is needed to send it again."""
        self._kept.append((self.count, item))
        self.count += 1

    def acknowledge(self, num: int) -> list[T]:
        """The other side has the first ``num`` messages; returns those that were still kept."""
        acknowledged = []
        while self._kept and self._kept[0][0] < num:
            acknowledged.append(self._kept.popleft()[1])
        return acknowledged

    def since(self, num: int) -> list[T]:
        """The messages to send again to a peer that has only the first ``num``."""
        return [item for number, item in self._kept if number >= num]

    def forget(self) -> None:
        """Nothing will be sent again."""
        self._kept.clear()


class ReceivedMessages:
    """How far the other side's messages have been received."""

    def __init__(self) -> None:
        self.count = 0
        """Number of messages received: the number of the next one."""
        self._asked = -1

    def accept(self, number: int) -> bool:
        """Whether this message is the next one; duplicates and messages after a gap must not be handled."""
        if number != self.count:
            return False
        self.count += 1
        return True

    def is_missing(self, num_sent: int, *, again: bool) -> bool:
        """Whether some of ``num_sent`` messages are lost and must be requested.

        Once per gap; ``again`` also if they were requested before, because that request may be lost too.
        """
        if num_sent <= self.count or (self._asked == self.count and not again):
            return False
        self._asked = self.count
        return True
