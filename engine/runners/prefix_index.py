"""PrefixIndex: an estimate of the prefixes that a DP replica has cached, based on the requests sent to that replica.

The index is a routing hint and need not match the replica's prefix cache exactly.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens per block; equal to the default page size."""
_MAX_OF_PROMPT = 1024
"""Maximum number of leading blocks of a prompt that are indexed."""
_MAX_KEPT = 32_768
"""Maximum number of blocks per replica, about 4 MB; the least recently used blocks are evicted first."""

Block = int
"""Hash of a block chained with all blocks before it."""


class PrefixIndex:
    """LRU set of the blocks that one replica has probably cached."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._known: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, blocks: Sequence[Block]) -> None:
        """Add the blocks of a request. Blocks are evicted after their successors."""
        for block in reversed(blocks):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._max_kept:
            self._known.popitem(last=False)

    def num_matched(self, blocks: Sequence[Block]) -> int:
        """Return the number of leading tokens of a request that the replica has probably cached."""
        known = self._known
        return BLOCK * next((count for count, block in enumerate(blocks) if block not in known), len(blocks))

    def clear(self) -> None:
        """Remove all blocks."""
        self._known.clear()


def blocks_of(token_ids: Sequence[int], salt: str = "") -> list[Block]:
    """Return the chained hashes of the full blocks of ``token_ids``, seeded with ``salt``."""
    blocks: list[Block] = []
    before = hash(salt) if salt else 0
    for end in range(BLOCK, min(len(token_ids), BLOCK * _MAX_OF_PROMPT) + 1, BLOCK):
        before = hash((before, *token_ids[end - BLOCK : end]))
        blocks.append(before)
    return blocks
