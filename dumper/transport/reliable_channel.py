"""Stream: the messages from one side to the other, each once and in order though the connection between them may break.

ZeroMQ connects again by itself, but what was on its way is gone. So each side numbers its messages from 0 (member
``n``) and keeps them until the other side has said how far it got; what comes twice, or ahead of a gap, is left out.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SentMessages(Generic[T]):
    """What was sent and is not known to have arrived."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self.count = 0
        """How many messages were sent: the number of the next."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, item: T) -> None:
        """Message number ``count`` is being sent; ``item`` is what it takes to send it again."""
        self._kept.append((self.count, item))
        self.count += 1

    def acknowledge(self, num: int) -> list[T]:
        """The other side has the first ``num`` messages: those of them that were still kept."""
        found = []
        while self._kept and self._kept[0][0] < num:
            found.append(self._kept.popleft()[1])
        return found

    def since(self, num: int) -> list[T]:
        """What must be sent again to a side that has only the first ``num`` messages."""
        return [item for number, item in self._kept if number >= num]

    def forget(self) -> None:
        """Nothing will be sent again."""
        self._kept.clear()


class ReceivedMessages:
    """How far the other side's messages have come."""

    def __init__(self) -> None:
        self.count = 0
        """How many messages have come: the number of the next."""
        self._asked = -1

    def accept(self, number: int) -> bool:
        """Whether this message is the next; one that came before or after a gap is not to be handled."""
        if number != self.count:
            return False
        self.count += 1
        return True

    def is_missing(self, num_sent: int, *, again: bool) -> bool:
        """Whether of ``num_sent`` messages some are lost and are to be asked for.

        Once for each gap; ``again`` also where they were asked for before: that request may be lost too.
        """
        if num_sent <= self.count or (self._asked == self.count and not again):
            return False
        self._asked = self.count
        return True
