"""Paging: which KV pages each running request holds, in its own right or shared through the prefix cache.

A request's page table, by position::

    |<- num_shared pages: in the tree, held ->|<- its own: being filled, or empty ->|
    0                                         num_shared * page_size                len(pages) * page_size

A page goes over to the tree as soon as all its positions are computed. If the tree has a page with those tokens
already, the request's entry is pointed to that one first and its own is freed after. Hence a request that ends, or is
preempted, leaves its full pages behind for others, or for itself.
"""

from collections.abc import Sequence
from functools import partial

from tapscope.engine.checks import add_up
from tapscope.engine.pages import PageAllocator
from tapscope.engine.radix import Key, Node, RadixCache
from tapscope.engine.request import Request

_require = partial(add_up, "pages")

_PASSED = -1  # the table's entry of a page that was freed because no row looks so far back


class Paging:
    """Every page is free, in the tree, or held by exactly one running request."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True, window: int | None = None) -> None:
        """``window``: no layer looks further back. Such requests share nothing, and free the pages they have passed."""
        self.pages = PageAllocator(num_pages)
        self.page_size = page_size
        self.window = window
        self.tree = RadixCache()
        self.num_evicted = 0
        """Pages taken out of the prefix cache so far to make room."""
        self._shares = prefix_cache and window is None

    @property
    def num_available(self) -> int:
        """Pages that :meth:`grow` can hand out: free ones, and those that only the prefix cache keeps."""
        return self.pages.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.pages.num_pages - self.num_available

    def most_pages(self, num_positions: int) -> int:
        """Pages without which a request of ``num_positions`` cannot go on to its end."""
        whole = self._pages_for(num_positions)
        # A window may begin and end in the middle of a page, and one page more takes the next rows.
        return whole if self.window is None else min(whole, self._pages_for(self.window) + 2)

    def missing(self, request: Request) -> int:
        """Pages the request still lacks for the tokens it knows."""
        held = len(request.pages) - request.num_passed
        return max(0, min(self._pages_for(len(request.tokens)) - request.num_passed, self._most(request)) - held)

    def room(self, request: Request) -> int:
        """Rows of the request that could be computed next as far as pages are concerned."""
        return (len(request.pages) + self.num_available) * self.page_size - request.num_computed

    def grow(self, request: Request, end: int) -> None:
        """Give the request pages for its positions before ``end``, for which there must be :meth:`room`."""
        missing = max(0, self._pages_for(end) - len(request.pages))
        if missing > self.pages.num_free:
            evicted = self.tree.evict(missing - self.pages.num_free)
            self.num_evicted += len(evicted)
            self.pages.give_back(evicted)
        request.pages += self.pages.take(missing)

    def next_page(self, request: Request) -> tuple[Node, Key] | None:
        """The first page the request does not share, as the tree would know it; None when it may not share it.

        At most all but the last known token is taken from the tree: one row must be computed for there to be logits.
        """
        start, end = request.num_shared * self.page_size, (request.num_shared + 1) * self.page_size
        if not self._shares or request.needs_every_row or end >= len(request.tokens):
            return None
        return request.node or self.tree.root, tuple(request.tokens[start:end])

    def match(self, request: Request) -> None:
        """Take what the tree has of the request's coming pages; nothing in them need be computed."""
        while (place := self.next_page(request)) is not None:
            parent, key = place
            node = parent.children.get(key)
            if node is None:
                return
            self._share(request, node)
            request.num_computed = max(request.num_computed, request.num_shared * self.page_size)

    def settle(self, request: Request) -> None:
        """After rows were computed: full pages go over to the tree, passed ones are freed."""
        size = self.page_size
        while self._shares and (request.num_shared + 1) * size <= request.num_computed:
            start = request.num_shared * size
            parent, key = request.node or self.tree.root, tuple(request.tokens[start : start + size])
            node = parent.children.get(key)
            if node is not None:
                self._share(request, node)
            else:
                request.node = self.tree.insert(parent, key, request.pages[request.num_shared])
                request.num_shared += 1
        if self.window is not None:
            first = max(0, request.num_computed - self.window + 1) // size
            self.pages.give_back(request.pages[request.num_passed : first])
            request.pages[request.num_passed : first] = [_PASSED] * (first - request.num_passed)
            request.num_passed = first

    def release(self, request: Request) -> None:
        """The request holds no pages any more, and has computed nothing."""
        if request.node is not None:
            self.tree.release(request.node)
        self.pages.give_back(request.pages[max(request.num_shared, request.num_passed) :])
        request.node, request.pages = None, []
        request.num_shared = request.num_passed = request.num_sent = request.num_computed = 0

    def flush(self) -> int:
        """Forget every prefix that no running request holds; returns how many pages that freed."""
        pages = self.tree.evict(self.tree.num_evictable)
        self.pages.give_back(pages)
        return len(pages)

    def check(self, running: Sequence[Request]) -> None:
        """Walk every page; raises InvariantError for the first that is lost, held twice or held by the wrong one."""
        self.tree.check()
        held: dict[int, int] = {}
        own: list[int] = []
        for request in running:
            path = self._path(request)
            _require(
                request.pages[: request.num_shared] == [n.page for n in path], f"{request.id!r} shares other pages"
            )
            _require(request.num_computed <= len(request.pages) * self.page_size, f"{request.id!r} lacks pages")
            own += request.pages[max(request.num_shared, request.num_passed) :]
            for node in path:
                held[id(node)] = held.get(id(node), 0) + 1
        nodes = list(self.tree.nodes())
        wrong = next((node for node in nodes if node.refs != held.get(id(node), 0)), None)
        _require(wrong is None, f"page {wrong and wrong.page} is not held as often as it says")
        places = sorted([*self.pages.free, *own, *(node.page for node in nodes)])
        _require(places == list(range(self.pages.num_pages)), "free, cached and held pages are not every page once")

    def _share(self, request: Request, node: Node) -> None:
        """Enter the tree's ``node`` at the request's next place, then free the page it has there."""
        self.tree.hold(node)
        place = request.num_shared
        mine = request.pages[place : place + 1]
        request.pages[place : place + 1] = [node.page]
        self.pages.give_back(mine)
        request.node, request.num_shared = node, place + 1
        request.num_sent = min(request.num_sent, place)

    def _path(self, request: Request) -> list[Node]:
        node, path = request.node, []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def _most(self, request: Request) -> int:
        return self.most_pages(request.max_positions)
