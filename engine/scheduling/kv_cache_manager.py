"""KVCacheManager: the cache groups of a model and the pages and states that each running request holds in them.

Layers with the same attention window form a group with its own page pool, page tables and prefix tree
(:class:`~tapscope.engine.scheduling.page_group.PageGroup`). Pages of windowed layers are therefore freed once they
leave the window, while full-attention layers keep every position. A prefix hit extends to the deepest page that every
group has cached.
"""

from collections.abc import Sequence
from functools import partial

from tapscope.engine.params.validators import require_invariant
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.page_group import BlockAllocator, PageGroup
from tapscope.engine.scheduling.radix_cache import Key, RadixCache, RadixNode
from tapscope.engine.scheduling.state_group import StateGroup

_require = partial(require_invariant, "cache groups")


class KVCacheManager:
    """All cache groups of a model. The first group, which has the largest window, is the primary one."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        window: int | None = None,
        windowed: Sequence[tuple[int, int]] = (),
        states: StateGroup | None = None,
    ) -> None:
        """Create the groups and their page pools.

        ``num_pages`` and ``window`` describe the primary group; ``windowed`` has (pages, window) of each further group.
        """
        self.page_size = page_size
        self.groups = tuple(
            PageGroup(index, pages, page_size, prefix_cache=prefix_cache, window=window)
            for index, (pages, window) in enumerate([(num_pages, window), *windowed])
        )
        self.states = states
        """Recurrent states; None for models without recurrent layers."""
        self._shares = prefix_cache

    @property
    def pages(self) -> BlockAllocator:
        """Page allocator of the primary group."""
        return self.groups[0].pages

    @property
    def tree(self) -> RadixCache:
        """Prefix tree of the primary group."""
        return self.groups[0].tree

    @property
    def num_available(self) -> int:
        """Number of pages, over all groups, that are free or held by the prefix cache only."""
        return sum(group.num_available for group in self.groups)

    @property
    def num_used(self) -> int:
        """Number of pages, over all groups, held by running requests."""
        return sum(group.num_used for group in self.groups)

    @property
    def num_pages(self) -> int:
        """Number of pages over all groups."""
        return sum(group.pages.num_pages for group in self.groups)

    @property
    def num_cached(self) -> int:
        """Number of pages, over all groups, held by the prefix cache only."""
        return sum(group.tree.num_evictable for group in self.groups)

    @property
    def num_evicted(self) -> int:
        """Number of pages evicted from the prefix cache so far."""
        return sum(group.num_evicted for group in self.groups)

    @property
    def num_free_states(self) -> int:
        """Number of free slots for recurrent states."""
        return 0 if self.states is None else self.states.slots.num_free

    def max_pages(self, num_positions: int) -> int:
        """Return the maximum number of primary-group pages that a request of ``num_positions`` holds at any time."""
        return self.groups[0].max_pages(num_positions)

    def too_small(self, num_positions: int) -> PageGroup | None:
        """Return the first group with fewer pages than a request of ``num_positions`` needs, or None."""
        return next((g for g in self.groups if g.max_pages(num_positions) > g.pages.num_pages), None)

    def can_admit(self, request: Request, running: Sequence[Request], watermark: float) -> bool:
        """Return whether the known tokens of ``request`` and ``running`` fit in the cache.

        A fraction ``watermark`` of the pages must remain available, and there must be state slots for one more request.
        """
        if self.states is not None and len(running) >= self.states.max_num_seqs:
            return False
        return all(
            sum(map(group.num_missing_pages, (*running, request))) + int(watermark * group.pages.num_pages)
            <= group.num_available
            for group in self.groups
        )

    def can_extend(self, requests: Sequence[tuple[Request, int]]) -> bool:
        """Return whether each request can compute its next position, given as (request, position), without preemption.

        Pages of every group must be available, and no request may need a new state slot.
        """
        if self.states is not None and any(self.states.makes_checkpoint(*each) for each in requests):
            return False  # the step after a checkpoint writes to a new slot
        return all(
            sum([group.needs_page(request, position) for request, position in requests]) <= group.num_available
            for group in self.groups
        )

    def num_computable_rows(self, request: Request) -> int:
        """Return how many more rows of the request fit in its own and the available pages."""
        return min(group.num_computable_rows(request) for group in self.groups)

    def allocate(self, request: Request, end: int) -> None:
        """Allocate pages for the request's positions before ``end``, within :meth:`num_computable_rows`."""
        for group in self.groups:
            group.allocate(request, end)

    def num_draft_rows(self, request: Request, num_decoding: int, prompts: Sequence[Request]) -> int:
        """Return how many rows after the request's next one may be used for draft tokens; may be negative.

        Drafts leave one page and one state for each of ``num_decoding`` other requests, and pages for the known tokens
        of ``prompts``.
        """
        rows = min(
            group.num_draft_rows(request, num_decoding + sum(map(group.num_missing_pages, prompts)))
            for group in self.groups
        )
        return rows if self.states is None else min(rows, self.states.num_draft_slots)

    def allocate_state(self, request: Request, num_drafts: int = 0) -> tuple[int, ...]:
        """Return the state slots that the request's next step reads and writes, see :attr:`ScheduledRequest.states`.

        Empty for models without recurrent state.
        """
        return () if self.states is None else self.states.allocate(request, num_drafts)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return the end of a prefill chunk of at most [``start``, ``end``), cut where states become checkpoints."""
        if self.states is None or end - start <= 1:
            return end
        known = request.table(0).num_shared_pages + min(len(group.cached_path(request)) for group in self.groups)
        return self.states.chunk_end(request, start, end, known * self.page_size)

    def next_shareable_page(self, request: Request) -> tuple[RadixNode, Key] | None:
        """Return parent node and key of the first page, in the primary group, that the request does not share yet.

        Returns None if that page may not be shared. The last known token is never taken from the cache: at least one
        row must be computed to produce logits.
        """
        end = (request.table(0).num_shared_pages + 1) * self.page_size
        if not self._shares or request.needs_every_row or request.has_nan or end >= len(request.tokens):
            return None
        return self.groups[0].next_page_key(request)

    def match_prefix(self, request: Request) -> None:
        """Share the longest run of the request's next pages that all groups have cached, which need not be computed."""
        if self.next_shareable_page(request) is None:
            return
        paths: list[list[RadixNode]] = []
        for group in self.groups:
            paths.append(group.cached_path(request))
            if not paths[-1]:
                return
        matched, done = list(zip(self.groups, paths, strict=True)), request.table(0).num_shared_pages
        depth = min(map(len, paths))
        states = [] if self.states is None else self.states.cached_path(request)
        if self.states is not None:
            depth = min(depth, len(states) - done)
        while depth > 0 and (
            (states and states[done + depth - 1].page < 0)
            or not all(group.has_prefix(request, path[:depth]) for group, path in matched)
        ):
            depth -= 1
        if depth <= 0:
            return
        if self.states is not None:
            self.states.share(request, states[done + depth - 1])
        for group, path in matched:
            group.share(request, path[:depth])
        request.num_computed = max(request.num_computed, request.table(0).num_shared_pages * self.page_size)

    def cache_full_pages(self, request: Request) -> None:
        """Insert newly filled pages into the prefix trees and free pages that left a window.

        Called after rows were computed.
        """
        for group in self.groups:
            group.cache_full_pages(request)
        if self.states is not None:
            self.states.store(request)

    def release(self, request: Request) -> None:
        """Free all pages and states of the request and reset ``num_computed`` to 0."""
        for group in self.groups:
            group.release(request)
        if self.states is not None:
            self.states.release(request)
        request.num_computed = 0

    def drop_prefix(self, request: Request) -> None:
        """Drop every cached prefix that starts with the request's first page, because its logits contain NaN.

        Any page that the request attended to may contain NaN, whether computed by the request or taken from the cache,
        and so may everything computed from that page. Requests that already hold such pages keep them.
        """
        for group in self.groups:
            group.drop_prefix(request)
        if self.states is not None:
            self.states.drop_prefix(request)

    def flush(self) -> int:
        """Evict every prefix that no running request holds; return the number of freed pages."""
        if self.states is not None:
            self.states.flush()
        return sum(group.flush() for group in self.groups)

    def check(self, running: Sequence[Request]) -> None:
        """Check every page and state of every group against the running requests.

        Raises InvariantError for a page or slot that is leaked, held twice or held by the wrong request.
        """
        for group in self.groups:
            group.check(running)
        if self.states is not None:
            self.states.check(running)
        for request in running:
            depths = {request.table(group.index).num_shared_pages for group in self.groups}
            _require(len(depths) == 1, f"{request.id!r}: groups share different prefixes")
