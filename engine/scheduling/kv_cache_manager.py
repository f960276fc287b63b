"""KVCacheManager: the cache groups of a model, and what each running request holds in them.

Layers that look equally far back form a group with its own pool of pages, page tables and prefix tree
(:class:`~tapscope.engine.scheduling.page_group.PageGroup`). Pages of windowed layers are therefore freed behind the
window although other layers see every position. A prefix is taken from the cache up to the deepest page that every
group has.
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
    """All groups; the first one, whose layers look back furthest, is the primary one."""

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
        """``num_pages`` and ``window`` are the primary group's; ``windowed``: (pages, window) of each further group."""
        self.page_size = page_size
        self.groups = tuple(
            PageGroup(index, pages, page_size, prefix_cache=prefix_cache, window=window)
            for index, (pages, window) in enumerate([(num_pages, window), *windowed])
        )
        self.states = states
        """Recurrent states, in models that have them."""
        self._shares = prefix_cache

    @property
    def pages(self) -> BlockAllocator:
        """Pages of the primary group."""
        return self.groups[0].pages

    @property
    def tree(self) -> RadixCache:
        """Prefix tree of the primary group."""
        return self.groups[0].tree

    @property
    def num_available(self) -> int:
        """Pages of all groups that are free or held by the prefix cache alone."""
        return sum(group.num_available for group in self.groups)

    @property
    def num_used(self) -> int:
        """Pages of all groups that running requests hold."""
        return sum(group.num_used for group in self.groups)

    @property
    def num_pages(self) -> int:
        """Pages of all groups."""
        return sum(group.pages.num_pages for group in self.groups)

    @property
    def num_cached(self) -> int:
        """Pages of all groups that only the prefix cache holds."""
        return sum(group.tree.num_evictable for group in self.groups)

    @property
    def num_evicted(self) -> int:
        """Pages evicted from the prefix cache so far."""
        return sum(group.num_evicted for group in self.groups)

    @property
    def num_free_states(self) -> int:
        """Slots of recurrent state that nothing holds."""
        return 0 if self.states is None else self.states.slots.num_free

    def max_pages(self, num_positions: int) -> int:
        """Pages of the primary group that a request of ``num_positions`` needs at most at one time."""
        return self.groups[0].max_pages(num_positions)

    def too_small(self, num_positions: int) -> PageGroup | None:
        """The first group that has fewer pages than a request of ``num_positions`` needs; None if all suffice."""
        return next((g for g in self.groups if g.max_pages(num_positions) > g.pages.num_pages), None)

    def can_admit(self, request: Request, running: Sequence[Request], watermark: float) -> bool:
        """Whether the known tokens of ``request`` and ``running`` fit, with a fraction ``watermark`` to spare."""
        if self.states is not None and len(running) >= self.states.max_num_seqs:
            return False
        return all(
            sum(map(group.num_missing_pages, (*running, request))) + int(watermark * group.pages.num_pages)
            <= group.num_available
            for group in self.groups
        )

    def can_extend(self, requests: Sequence[tuple[Request, int]]) -> bool:
        """Whether there are pages for the next position of each request, given with that position."""
        if self.states is not None and any(self.states.makes_checkpoint(*each) for each in requests):
            return False  # its next step writes another slot
        return all(
            sum([group.needs_page(request, position) for request, position in requests]) <= group.num_available
            for group in self.groups
        )

    def num_computable_rows(self, request: Request) -> int:
        """Rows of the request that the available pages allow to compute next."""
        return min(group.num_computable_rows(request) for group in self.groups)

    def allocate(self, request: Request, end: int) -> None:
        """Give the request pages for its positions before ``end``, within :meth:`num_computable_rows`."""
        for group in self.groups:
            group.allocate(request, end)

    def num_draft_rows(self, request: Request, num_decoding: int, prompts: Sequence[Request]) -> int:
        """Rows after the request's next one that draft tokens may use while ``num_decoding`` other requests can still
        take a page and a state each, and ``prompts`` the pages of their known tokens; may be negative.
        """
        rows = min(
            group.num_draft_rows(request, num_decoding + sum(map(group.num_missing_pages, prompts)))
            for group in self.groups
        )
        return rows if self.states is None else min(rows, self.states.num_draft_slots)

    def allocate_state(self, request: Request, num_drafts: int = 0) -> tuple[int, ...]:
        """Slots that the request's next step reads and writes, see :attr:`ScheduledRequest.states`; empty in models
        without recurrent state.
        """
        return () if self.states is None else self.states.allocate(request, num_drafts)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where rows from ``start`` that may end at ``end`` end, so that states become checkpoints."""
        if self.states is None or end - start <= 1:
            return end
        known = request.table(0).num_shared_pages + min(len(group.cached_path(request)) for group in self.groups)
        return self.states.chunk_end(request, start, end, known * self.page_size)

    def next_shareable_page(self, request: Request) -> tuple[RadixNode, Key] | None:
        """Parent node and key of the first page that the request does not share yet, in the primary group; None when it
        may not be shared.

        The last known token is never taken from the tree: one row must be computed to have logits.
        """
        end = (request.table(0).num_shared_pages + 1) * self.page_size
        if not self._shares or request.needs_every_row or request.has_nan or end >= len(request.tokens):
            return None
        return self.groups[0].next_page_key(request)

    def match_prefix(self, request: Request) -> None:
        """Share the request's next pages that every group has; their tokens need not be computed."""
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
        """After rows were computed: move full pages to the trees and free those out of a window."""
        for group in self.groups:
            group.cache_full_pages(request)
        if self.states is not None:
            self.states.store(request)

    def release(self, request: Request) -> None:
        """Free all pages of the request, which has then computed nothing."""
        for group in self.groups:
            group.release(request)
        if self.states is not None:
            self.states.release(request)
        request.num_computed = 0

    def drop_prefix(self, request: Request) -> None:
        """NaN was found in the request's logits: drop every cached prefix that begins with its first page.

        Any page that the request attended to may have NaN, its own or one that it took from the cache, and with it
        whatever was computed from that page. Requests that already hold such pages keep them.
        """
        for group in self.groups:
            group.drop_prefix(request)
        if self.states is not None:
            self.states.drop_prefix(request)

    def flush(self) -> int:
        """Evict every prefix that no running request holds; returns the number of freed pages."""
        if self.states is not None:
            self.states.flush()
        return sum(group.flush() for group in self.groups)

    def check(self, running: Sequence[Request]) -> None:
        """Check every page of every group; raises InvariantError for one that is lost, or held twice or wrongly."""
        for group in self.groups:
            group.check(running)
        if self.states is not None:
            self.states.check(running)
        for request in running:
            depths = {request.table(group.index).num_shared_pages for group in self.groups}
            _require(len(depths) == 1, f"{request.id!r}: groups share different prefixes")
