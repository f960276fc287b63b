"""PrefixIndex: which prefixes a DP replica has computed lately, as far as the requests sent to it tell.

It stands for the replica's prefix cache, and need not be right: it only says where a request is worth sending.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens of a block, the usual size of a page."""
_MAX_OF_PROMPT = 1024
"""Leading blocks of a prompt that are looked at."""
_MAX_KEPT = 32_768
"""Blocks remembered of a replica, some 4 MB; those used longest ago are forgotten first."""

Block = int
"""Stands for a block and all that is before it."""


class PrefixIndex:
    """Of one replica."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._known: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, blocks: Sequence[Block]) -> None:
        """A request with these blocks was sent; a block is forgotten after those that it stands before."""
        for block in reversed(blocks):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._max_kept:
            self._known.popitem(last=False)

    def num_matched(self, blocks: Sequence[Block]) -> int:
        """How many leading tokens of a request the replica should have."""
        known = self._known
        return BLOCK * next((count for count, block in enumerate(blocks) if block not in known), len(blocks))

    def clear(self) -> None:
        """The replica has none any more."""
        self._known.clear()


def blocks_of(token_ids: Sequence[int], salt: str = "") -> list[Block]:
    """The full blocks of a text, from its beginning; those of another salt are others."""
    found: list[Block] = []
    before = hash(salt) if salt else 0
    for end in range(BLOCK, min(len(token_ids), BLOCK * _MAX_OF_PROMPT) + 1, BLOCK):
        before = hash((before, *token_ids[end - BLOCK : end]))
        found.append(before)
    return found
