"""Reliable channel: exactly-once, in-order delivery over a connection that may break.

ZeroMQ reconnects automatically but loses messages in flight. Therefore each side numbers its messages from 0 (field
``n``) and keeps them until the peer acknowledges them; the receiver ignores duplicates and messages after a gap.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SentMessages(Generic[T]):
    """Retransmission buffer: messages that were sent and not yet acknowledged."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self.count = 0
        """Number of messages sent, i.e. the number of the next message."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, item: T) -> None:
        """Register message number ``count`` as sent; ``item`` is the data required to resend it."""
        self._kept.append((self.count, item))
        self.count += 1

    def acknowledge(self, num: int) -> list[T]:
        """Drop the first ``num`` messages, which the peer has received; return those that were still kept."""
        acknowledged = []
        while self._kept and self._kept[0][0] < num:
            acknowledged.append(self._kept.popleft()[1])
        return acknowledged

    def since(self, num: int) -> list[T]:
        """Return the messages to resend to a peer that has received only the first ``num``."""
        return [item for number, item in self._kept if number >= num]

    def forget(self) -> None:
        """Drop all messages, because the peer is gone."""
        self._kept.clear()


class ReceivedMessages:
    """Receive state: the number of messages received in order from the peer."""

    def __init__(self) -> None:
        self.count = 0
        """Number of messages received, i.e. the number of the next expected message."""
        self._asked = -1

    def accept(self, number: int) -> bool:
        """Count message ``number`` if it is the next one; return False for a duplicate or a message after a gap."""
        if number != self.count:
            return False
        self.count += 1
        return True

    def is_missing(self, num_sent: int, *, again: bool) -> bool:
        """Return whether some of the peer's ``num_sent`` messages are missing and must be requested now.

        True once per gap; with ``again`` also for a gap that was requested before, as that request may be lost too.
        """
        if num_sent <= self.count or (self._asked == self.count and not again):
            return False
        self._asked = self.count
        return True
