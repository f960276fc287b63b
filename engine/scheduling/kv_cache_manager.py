"""Paging: which KV pages each running request holds, in its own right or shared through the prefix cache.

A request's page table, by position::

    |<- num_shared pages: in the tree, held ->|<- its own: being filled, or empty ->|
    0                                         num_shared * page_size                len(pages) * page_size

A page goes over to the tree as soon as all its positions are computed. If the tree has a page with those tokens
already, the request's entry is pointed to that one first and its own is freed after. Hence a request that ends, or is
preempted, leaves its full pages behind for others, or for itself.

Where no layer looks further back than a window, pages behind it are *passed*: the first num_passed entries name no
page, and a prefix can be had from the tree if that has the pages of its last window.
"""

from collections.abc import Sequence
from functools import partial

from tapscope.engine.params.validators import add_up
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.block_allocator import PageAllocator
from tapscope.engine.scheduling.radix_cache import Key, Node, RadixCache

_require = partial(add_up, "pages")

_PASSED = -1  # the table's entry of a page that was freed because no row looks so far back


class Paging:
    """Every page is free, in the tree, or held by exactly one running request."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True, window: int | None = None) -> None:
        """``window``: no layer looks further back. Requests let go of the pages they have passed."""
        self.pages = PageAllocator(num_pages)
        self.page_size = page_size
        self.window = window
        self.tree = RadixCache(has_gaps=window is not None)
        self.num_evicted = 0
        """Pages taken out of the prefix cache so far to make room."""
        self._shares = prefix_cache

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

    def lacks_page(self, request: Request, position: int) -> bool:
        """Whether the request has no page for ``position``, the next one."""
        return position >= len(request.pages) * self.page_size

    def grow(self, request: Request, end: int) -> None:
        """Give the request pages for its positions before ``end``, for which there must be :meth:`room`."""
        missing = max(0, self._pages_for(end) - len(request.pages))
        if missing > self.pages.num_free:
            evicted = self.tree.evict(missing - self.pages.num_free)
            self.num_evicted += len(evicted)
            self.pages.trim_heap(evicted)
        request.pages += self.pages.take(missing)

    def next_page(self, request: Request) -> tuple[Node, Key] | None:
        """The first page the request does not share, as the tree would know it; None when it may not share it.

        At most all but the last known token is taken from the tree: one row must be computed for there to be logits.
        """
        end = (request.num_shared + 1) * self.page_size
        if not self._shares or request.needs_every_row or end >= len(request.tokens):
            return None
        return request.node or self.tree.root, self._key(request, request.num_shared)

    def match(self, request: Request) -> None:
        """Take what the tree has of the request's coming pages; nothing in them need be computed."""
        place = self.next_page(request)
        if place is None:
            return
        nodes = self._known(request, *place)
        while nodes and any(node.page < 0 for node in nodes[self._new_behind(request, len(nodes)) :]):
            nodes.pop()
        if not nodes:
            return
        passed = self._new_behind(request, len(nodes))
        self._skip(request, nodes[:passed])
        for node in nodes[passed:]:
            self._share(request, node)
        request.num_computed = max(request.num_computed, request.num_shared * self.page_size)
        self._pass(request, request.num_shared * self.page_size)

    def settle(self, request: Request) -> None:
        """After rows were computed: full pages go over to the tree, passed ones are freed."""
        size = self.page_size
        while self._shares and (request.num_shared + 1) * size <= request.num_computed:
            parent, key = request.node or self.tree.root, self._key(request, request.num_shared)
            node = parent.children.get(key)
            if node is not None and node.page >= 0:
                self._share(request, node)
            else:
                request.node = self.tree.insert(parent, key, request.pages[request.num_shared])
                request.num_shared += 1
        self._pass(request, request.num_computed)

    def release(self, request: Request) -> None:
        """The request holds no pages any more, and has computed nothing."""
        self.tree.release(self._held(request)[::-1])
        self.pages.trim_heap(request.pages[max(request.num_shared, request.num_passed) :])
        request.node, request.pages = None, []
        request.num_shared = request.num_passed = request.num_sent = request.num_computed = 0

    def table(self, request: Request) -> tuple[int, ...]:
        """Entries of the page table that the ranks do not know; passed pages, whose rows count for nothing, are some
        other page of the request's.
        """
        fresh, passed = request.pages[request.num_sent :], max(0, request.num_passed - request.num_sent)
        return (request.pages[request.num_passed],) * passed + tuple(fresh[passed:])

    def flush(self) -> int:
        """Forget every prefix that no running request holds; returns how many pages that freed."""
        pages = self.tree.evict(self.tree.num_evictable)
        self.pages.trim_heap(pages)
        return len(pages)

    def check(self, running: Sequence[Request]) -> None:
        """Walk every page; raises InvariantError for the first that is lost, held twice or held by the wrong one."""
        self.tree.check()
        held: dict[int, int] = {}
        own: list[int] = []
        for request in running:
            path = self._held(request)
            shared = [_PASSED] * min(request.num_passed, request.num_shared) + [node.page for node in path]
            _require(request.pages[: request.num_shared] == shared, f"{request.id!r} shares other pages")
            _require(request.num_computed <= len(request.pages) * self.page_size, f"{request.id!r} lacks pages")
            own += request.pages[max(request.num_shared, request.num_passed) :]
            for node in path:
                held[id(node)] = held.get(id(node), 0) + 1
        nodes = list(self.tree.nodes())
        wrong = next((node for node in nodes if node.refs != held.get(id(node), 0)), None)
        _require(wrong is None, f"page {wrong and wrong.page} is not held as often as it says")
        places = sorted([*self.pages.free, *own, *(node.page for node in nodes if node.page >= 0)])
        _require(places == list(range(self.pages.num_pages)), "free, cached and held pages are not every page once")

    def _share(self, request: Request, node: Node) -> None:
        """Enter the tree's ``node`` at the request's next place, then free the page it has there."""
        self.tree.hold(node)
        place = request.num_shared
        mine = request.pages[place : place + 1]
        request.pages[place : place + 1] = [node.page]
        self.pages.trim_heap(mine)
        request.node, request.num_shared = node, place + 1
        request.num_sent = min(request.num_sent, place)

    def _known(self, request: Request, node: Node, key: Key) -> list[Node]:
        """What the tree has of the request's coming pages, gaps too; ``key`` is the first one's, below ``node``."""
        size = self.page_size
        nodes: list[Node] = []
        for start in range(request.num_shared * size, len(request.tokens) - size, size):
            child = node.children.get(key if not nodes else self._key(request, start // size))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _key(self, request: Request, page: int) -> Key:
        """What the tree calls the request's ``page``. A salted first page sets all below it apart, as in vLLM."""
        tokens = tuple(request.tokens[page * self.page_size : (page + 1) * self.page_size])
        return tokens if page or not request.cache_salt else (request.cache_salt, *tokens)

    def _new_behind(self, request: Request, count: int) -> int:
        """How many of the next ``count`` shared pages nobody needs once all of them are shared."""
        num_shared = request.num_shared + count
        return max(0, self._num_behind(num_shared * self.page_size, num_shared) - request.num_shared)

    def _num_behind(self, num_computed: int, num_shared: int) -> int:
        """Leading pages that no coming row sees; never all shared ones, since the last says where the path ends."""
        if self.window is None:
            return 0
        first = max(0, num_computed - self.window + 1) // self.page_size
        return min(first, num_shared - 1) if num_shared else first

    def _skip(self, request: Request, nodes: Sequence[Node]) -> None:
        """Go down the tree past ``nodes`` without taking their pages: those before are passed, too."""
        if not nodes:
            return
        self._let_go(request, request.num_shared)
        place, end = request.num_shared, request.num_shared + len(nodes)
        self.pages.trim_heap(request.pages[place:end])
        request.pages[place:end] = [_PASSED] * len(nodes)
        request.node, request.num_shared, request.num_passed = nodes[-1], end, end
        request.num_sent = min(request.num_sent, place)

    def _pass(self, request: Request, num_computed: int) -> None:
        """Let go of the pages that no row from position ``num_computed`` on sees."""
        self._let_go(request, self._num_behind(num_computed, request.num_shared))

    def _let_go(self, request: Request, end: int) -> None:
        """The request's pages before ``end`` are passed."""
        begin, num_shared = request.num_passed, request.num_shared
        if end <= begin:
            return
        self.tree.release(self._held(request)[: end - begin][::-1])
        self.pages.trim_heap(request.pages[max(begin, num_shared) : end])
        request.pages[begin:end] = [_PASSED] * (end - begin)
        request.num_passed = end

    def _held(self, request: Request) -> list[Node]:
        """The nodes of the request's shared pages that it has not passed."""
        node, path = request.node, []
        for _ in range(request.num_passed, request.num_shared):
            assert node is not None, "a path is as long as its pages"
            path.append(node)
            node = node.parent
        return path[::-1]

    def _pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def _most(self, request: Request) -> int:
        return self.most_pages(request.max_positions)
