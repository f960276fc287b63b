"""Drafts: the draft tokens of one request, a chain or a tree; and how many of them were accepted."""

from dataclasses import dataclass
from typing import NamedTuple

from tapscope.engine.kv_cache.draft_tree import is_chain


class DraftCounts(NamedTuple):
    """Statistics of speculative decoding for one request."""

    num_verifications: int = 0
    """Steps that verified draft tokens of the request."""
    num_drafted: int = 0
    """Draft tokens that these steps verified."""
    num_accepted: int = 0
    """Draft tokens among them that became tokens of the request."""

    def verified(self, num_drafted: int, num_accepted: int) -> "DraftCounts":
        """These counts after one more verification."""
        return DraftCounts(self.num_verifications + 1, self.num_drafted + num_drafted, self.num_accepted + num_accepted)


NOTHING_DRAFTED = DraftCounts()


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may follow a request's last one."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """Index of the token before each, which precedes it; -1: the request's last token. Empty: a chain."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Drafts":
        """The first ``count`` tokens, all of which follow others of them."""
        return self if count >= len(self) else Drafts(self.tokens[:count], self.parents[:count])

    @property
    def tree(self) -> tuple[int, ...]:
        """Parents of the rows that verify them, of which the last known token is the first; empty: a chain."""
        rows = (-1, *(parent + 1 for parent in self.parents))
        return () if not self.parents or is_chain(rows) else rows
