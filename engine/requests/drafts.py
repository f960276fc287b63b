"""Drafts: the draft tokens of one request, as a chain or a tree; DraftCounts: acceptance statistics."""

from dataclasses import dataclass
from typing import NamedTuple

from tapscope.engine.kv_cache.draft_tree import is_chain


class DraftCounts(NamedTuple):
    """Statistics of speculative decoding for one request."""

    num_verifications: int = 0
    """Number of steps that verified draft tokens of the request."""
    num_drafted: int = 0
    """Number of verified draft tokens."""
    num_accepted: int = 0
    """Number of accepted draft tokens."""

    def verified(self, num_drafted: int, num_accepted: int) -> "DraftCounts":
        """Return the counts after one more verification."""
        return DraftCounts(self.num_verifications + 1, self.num_drafted + num_drafted, self.num_accepted + num_accepted)


NOTHING_DRAFTED = DraftCounts()


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens that continue a request after its last token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """Index of each token's parent, which comes earlier in ``tokens``; -1: the request's last token. Empty: a chain."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Drafts":
        """Return the first ``count`` drafts; parents precede their children, so the result is a valid tree."""
        return self if count >= len(self) else Drafts(self.tokens[:count], self.parents[:count])

    @property
    def tree(self) -> tuple[int, ...]:
        """Parent of each row that verifies the drafts, where row 0 is the request's last token; empty: a chain."""
        rows = (-1, *(parent + 1 for parent in self.parents))
        return () if not self.parents or is_chain(rows) else rows
