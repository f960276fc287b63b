"""PageGroup: the KV pages of one group of layers, private to a running request or shared through the prefix cache.

Layout of a request's page table in a group, by position::

    |<- num_shared_pages: in the tree, held ->|<- private: being filled or empty ->|
    0                                         num_shared_pages * page_size         len(pages) * page_size

A page moves to the tree once all its positions are computed. If the tree already has a page with the same tokens, the
page table entry is redirected to the cached page and the private page is freed. The full pages of a finished or
preempted request therefore stay in the tree, for other requests or for its own recomputation.

In a group with a sliding window, pages that leave the window are freed: the first ``num_freed_pages`` entries are
invalid. A prefix hit then only requires that the tree has the pages of the prefix's last window.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from tapscope.engine.params.validators import require_invariant
from tapscope.engine.requests.page_table import max_request_pages
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.radix_cache import Key, RadixCache, RadixNode

_require = partial(require_invariant, "pages")

_FREED = -1  # page table entry of a page that was freed because it left the window


class BlockAllocator:
    """A free list of page numbers. The scheduler and the prefix cache track the owners of allocated pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: lowest page first

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of pages held by requests or by the prefix cache."""
        return self.num_pages - len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        """The free page numbers, for checks."""
        return tuple(self._free)

    def allocate_pages(self, count: int) -> list[int]:
        """Pop ``count`` pages off the free list. The caller ensures that at least ``count`` are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free_pages(self, pages: Iterable[int]) -> None:
        """Return allocated pages to the free list."""
        self._free.extend(reversed(list(pages)))


def page_key(request: Request, page: int, size: int) -> Key:
    """Return the tree key of the request's ``page``.

    As in vLLM, a salt or adapter in the key of the first page separates all pages below.
    """
    tokens = tuple(request.tokens[page * size : (page + 1) * size])
    return tokens if page else (*request.cache_key, *tokens)


class PageGroup:
    """Page pool and prefix tree of one group of layers.

    Every page is free, in the tree, or held by exactly one running request.
    """

    def __init__(self, index: int, num_pages: int, page_size: int, *, prefix_cache: bool, window: int | None) -> None:
        """``index`` selects a request's page table. ``window`` is the largest attention window of the group's layers,
        in positions; older pages are freed. None means full attention.
        """
        self.index = index
        self.pages = BlockAllocator(num_pages)
        self.page_size = page_size
        self.window = window
        self.tree = RadixCache(has_gaps=window is not None)
        self.num_evicted = 0
        """Number of pages evicted from the prefix cache so far."""
        self._shares = prefix_cache

    @property
    def num_available(self) -> int:
        """Number of pages that :meth:`allocate` can hand out: free pages and those held by the prefix cache only."""
        return self.pages.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Number of pages held by running requests."""
        return self.pages.num_pages - self.num_available

    def max_pages(self, num_positions: int) -> int:
        """Return the maximum number of pages that a request of ``num_positions`` holds at any time."""
        return max_request_pages(num_positions, self.page_size, self.window)

    def num_missing_pages(self, request: Request) -> int:
        """Return how many more pages the request needs for its known tokens."""
        table = request.table(self.index)
        if len(request.tokens) <= len(table.pages) * self.page_size:
            return 0
        held = len(table.pages) - table.num_freed_pages
        return max(
            0, min(self._pages_for(len(request.tokens)) - table.num_freed_pages, self._max_pages_of(request)) - held
        )

    def num_computable_rows(self, request: Request) -> int:
        """Return how many more rows of the request fit in its own and the available pages."""
        table = request.table(self.index)
        return (len(table.pages) + self.num_available) * self.page_size - request.num_computed

    def num_draft_rows(self, request: Request, num_reserved: int) -> int:
        """Return how many rows after the request's next one fit with ``num_reserved`` pages left; may be negative."""
        num_pages = len(request.table(self.index).pages) + max(0, self.num_available - num_reserved)
        return num_pages * self.page_size - request.num_computed - 1

    def slot(self, request: Request, place: int) -> int:
        """Return the slot in the KV pool of the request's row at position ``place`` of its page table."""
        return request.table(self.index).pages[place // self.page_size] * self.page_size + place % self.page_size

    def needs_page(self, request: Request, position: int) -> bool:
        """Return whether the request must allocate a page for ``position``, its next one."""
        return position >= len(request.tables[self.index].pages) * self.page_size

    def allocate(self, request: Request, end: int) -> None:
        """Allocate pages for the request's positions before ``end``, which must be within :meth:`num_computable_rows`.

        Cached pages are evicted if too few are free.
        """
        table = request.table(self.index)
        num_missing_pages = self._pages_for(end) - len(table.pages)
        if num_missing_pages <= 0:
            return
        if num_missing_pages > self.pages.num_free:
            evicted = self.tree.evict(num_missing_pages - self.pages.num_free)
            self.num_evicted += len(evicted)
            self.pages.free_pages(evicted)
        table.pages += self.pages.allocate_pages(num_missing_pages)

    def next_page_key(self, request: Request) -> tuple[RadixNode, Key]:
        """Return parent node and key of the first page that the request does not share yet."""
        table = request.table(self.index)
        return table.prefix_node or self.tree.root, page_key(request, table.num_shared_pages, self.page_size)

    def has_prefix(self, request: Request, nodes: Sequence[RadixNode]) -> bool:
        """Return whether the tree has the pages of ``nodes``, the request's next ones, except those out of the
        window.
        """
        return all(node.page >= 0 for node in nodes[self._num_newly_out_of_window(request, len(nodes)) :])

    def share(self, request: Request, nodes: Sequence[RadixNode]) -> None:
        """Share the pages of ``nodes``, the request's next ones, for which :meth:`has_prefix` is true."""
        table = request.table(self.index)
        passed = self._num_newly_out_of_window(request, len(nodes))
        self._skip_nodes(request, nodes[:passed])
        for node in nodes[passed:]:
            self._share_page(request, node)
        self._free_out_of_window(request, table.num_shared_pages * self.page_size)

    def cache_full_pages(self, request: Request) -> None:
        """Insert newly filled pages into the tree and free pages that left the window. Called after rows were computed.

        Pages of a request with NaN are inserted only below pages that it already shares, which :meth:`drop_prefix` has
        dropped.
        """
        table = request.tables[self.index]
        size = self.page_size
        shares = self._shares and (not request.has_nan or table.num_shared_pages > 0)
        while shares and (table.num_shared_pages + 1) * size <= request.num_computed:
            parent, key = table.prefix_node or self.tree.root, page_key(request, table.num_shared_pages, self.page_size)
            node = parent.children.get(key)
            if node is not None and node.page >= 0:
                self._share_page(request, node)
            else:
                table.prefix_node = self.tree.insert(parent, key, table.pages[table.num_shared_pages])
                table.num_shared_pages += 1
        if self.window is not None:
            self._free_out_of_window(request, request.num_computed)

    def release(self, request: Request) -> None:
        """Free all pages of the request."""
        table = request.table(self.index)
        self.tree.release(self._held_nodes(request)[::-1])
        self.pages.free_pages(table.pages[max(table.num_shared_pages, table.num_freed_pages) :])
        table.prefix_node, table.pages = None, []
        table.num_shared_pages = table.num_freed_pages = table.num_sent_pages = 0

    def new_entries(self, request: Request) -> tuple[int, ...]:
        """Return the page table entries that were not sent to the ranks yet.

        Entries of freed pages, whose rows are masked, are replaced by another page of the request.
        """
        table = request.table(self.index)
        if table.num_sent_pages == len(table.pages):
            return ()
        passed = max(0, table.num_freed_pages - table.num_sent_pages)
        return (table.pages[table.num_freed_pages],) * passed + tuple(table.pages[table.num_sent_pages + passed :])

    def flush(self) -> int:
        """Evict every prefix that no running request holds; return the number of freed pages."""
        pages = self.tree.evict(self.tree.num_evictable)
        self.pages.free_pages(pages)
        return len(pages)

    def drop_prefix(self, request: Request) -> None:
        """Drop every cached prefix that starts with the request's first page, so that it is not shared anymore."""
        self.pages.free_pages(self.tree.drop(page_key(request, 0, self.page_size)))

    def check(self, running: Sequence[Request]) -> None:
        """Check every page of the group against the running requests.

        Raises InvariantError for a page that is leaked, held twice or held by the wrong request.
        """
        self.tree.check()
        held: dict[int, int] = {}
        own: list[int] = []
        for request in running:
            path, table = self._held_nodes(request), request.table(self.index)
            shared = [_FREED] * min(table.num_freed_pages, table.num_shared_pages) + [node.page for node in path]
            _require(
                table.pages[: table.num_shared_pages] == shared,
                f"{request.id!r}: shared pages differ from the tree",
            )
            _require(
                request.num_computed <= len(table.pages) * self.page_size,
                f"{request.id!r}: computed tokens exceed its pages",
            )
            own += table.pages[max(table.num_shared_pages, table.num_freed_pages) :]
            for node in path:
                held[id(node)] = held.get(id(node), 0) + 1
        nodes = list(self.tree.nodes())
        wrong = next((node for node in nodes if node.refs != held.get(id(node), 0)), None)
        _require(wrong is None, f"page {wrong and wrong.page} has a wrong reference count")
        places = sorted([*self.pages.free, *own, *(node.page for node in nodes if node.page >= 0)])
        _require(
            places == list(range(self.pages.num_pages)), "free, cached and held pages are not every page exactly once"
        )

    def _share_page(self, request: Request, node: RadixNode) -> None:
        """Point the request's next page table entry to the page of ``node`` and free the private page it replaces."""
        table = request.table(self.index)
        self.tree.hold(node)
        slot = table.num_shared_pages
        mine = table.pages[slot : slot + 1]
        table.pages[slot : slot + 1] = [node.page]
        self.pages.free_pages(mine)
        table.prefix_node, table.num_shared_pages = node, slot + 1
        table.num_sent_pages = min(table.num_sent_pages, slot)

    def cached_path(self, request: Request) -> list[RadixNode]:
        """Return the tree nodes of the request's next pages, including gaps.

        The page of the last known token is excluded, because at least one row must be computed to produce logits.
        """
        table = request.table(self.index)
        size = self.page_size
        node, nodes = table.prefix_node or self.tree.root, []
        for start in range(table.num_shared_pages * size, len(request.tokens) - size, size):
            child = node.children.get(page_key(request, start // size, size))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _num_newly_out_of_window(self, request: Request, count: int) -> int:
        """Return how many of the next ``count`` pages are out of the window once all of them are shared."""
        table = request.table(self.index)
        num_shared_pages = table.num_shared_pages + count
        return max(
            0, self._num_out_of_window(num_shared_pages * self.page_size, num_shared_pages) - table.num_shared_pages
        )

    def _num_out_of_window(self, num_computed: int, num_shared_pages: int) -> int:
        """Return the number of leading pages that are out of the window of all later rows.

        At least one shared page is kept, because the last one is the end of the request's path in the tree.
        """
        if self.window is None:
            return 0
        first = max(0, num_computed - self.window + 1) // self.page_size
        return min(first, num_shared_pages - 1) if num_shared_pages else first

    def _skip_nodes(self, request: Request, nodes: Sequence[RadixNode]) -> None:
        """Advance the request past ``nodes`` without sharing their pages, which are out of the window."""
        table = request.table(self.index)
        if not nodes:
            return
        self._free_pages_before(request, table.num_shared_pages)
        slot, end = table.num_shared_pages, table.num_shared_pages + len(nodes)
        self.pages.free_pages(table.pages[slot:end])
        table.pages[slot:end] = [_FREED] * len(nodes)
        table.prefix_node, table.num_shared_pages, table.num_freed_pages = nodes[-1], end, end
        table.num_sent_pages = min(table.num_sent_pages, slot)

    def _free_out_of_window(self, request: Request, num_computed: int) -> None:
        """Free the pages that are out of the window of all rows from position ``num_computed`` on."""
        if self.window is not None:
            table = request.table(self.index)
            self._free_pages_before(request, self._num_out_of_window(num_computed, table.num_shared_pages))

    def _free_pages_before(self, request: Request, end: int) -> None:
        """Free the request's pages before page table entry ``end``."""
        table = request.table(self.index)
        begin, num_shared_pages = table.num_freed_pages, table.num_shared_pages
        if end <= begin:
            return
        self.tree.release(self._held_nodes(request)[: end - begin][::-1])
        self.pages.free_pages(table.pages[max(begin, num_shared_pages) : end])
        table.pages[begin:end] = [_FREED] * (end - begin)
        table.num_freed_pages = end

    def _held_nodes(self, request: Request) -> list[RadixNode]:
        """Return the nodes of the shared pages that the request still holds, in order of position."""
        table = request.table(self.index)
        node: RadixNode | None = table.prefix_node
        path: list[RadixNode] = []
        for _ in range(table.num_freed_pages, table.num_shared_pages):
            assert node is not None, "a path is as long as its pages"
            path.append(node)
            node = node.parent
        return path[::-1]

    def _pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def _max_pages_of(self, request: Request) -> int:
        return self.max_pages(request.max_positions)
