"""RadixCache: a tree of the KV pages whose tokens are known, so that equal prefixes are computed once.

Every edge is one full page: its key is the page's tokens, its node holds the page's number. A path from the root spells
a prefix. A request holds every node of its own path (``refs``); a node nobody holds stays as a gift to later requests
until its page is needed. Whoever holds a node holds its ancestors, hence only leaves are evicted, the one used longest
ago first.

Where all layers look back through a window a request holds the end of its path only. Any node that nobody holds may
then lose its page: it stays as a *gap* while there is something below it.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import partial

from tapscope.engine.params.validators import add_up

_require = partial(add_up, "prefix cache")

Key = tuple[int | str, ...]
"""Tokens of one page; before those of the first page the request's salt, if it has one."""


class Node:
    """One page of a known prefix."""

    __slots__ = ("children", "key", "last_used", "page", "parent", "refs")

    def __init__(self, parent: "Node | None", key: Key, page: int) -> None:
        self.parent = parent
        """None for the root, and for a node that was evicted."""
        self.key = key
        self.page = page
        """-1 in the root, and in a gap."""
        self.children: dict[Key, Node] = {}
        self.refs = 0
        """Requests that hold this node."""
        self.last_used = 0


class RadixCache:
    """Owns the pages in the tree; where they came from and go to is the caller's business."""

    def __init__(self, *, has_gaps: bool = False) -> None:
        """``has_gaps``: who holds a node need not hold its ancestors."""
        self.has_gaps = has_gaps
        self.root = Node(None, (), -1)
        self.num_pages = 0
        """Pages in the tree."""
        self.num_evictable = 0
        """Pages nobody holds: all of them can be had by :meth:`evict`."""
        self._clock = 0
        self._offered: list[tuple[int, int, Node]] = []
        """Heap of (last_used, number, node). Entries whose node was held, grew or went since are passed over."""
        self._num_pushed = 0

    def hold(self, node: Node) -> None:
        """One request more uses ``node``, which is no gap; without gaps it must hold the parent already."""
        if node.refs == 0:
            self.num_evictable -= 1
        node.refs += 1

    def insert(self, parent: Node, key: Key, page: int) -> Node:
        """Give ``page`` to the tree as a child of ``parent``, new or a gap till now; the caller holds it.

        ``parent`` is held, by the caller.
        """
        node = parent.children.setdefault(key, Node(parent, key, page))
        node.page, node.refs = page, 1
        self.num_pages += 1
        return node

    def release(self, nodes: Sequence[Node]) -> None:
        """One request less uses ``nodes``; of a path those farther from the root come first."""
        self._clock += 1
        for node in nodes:
            node.refs -= 1
            node.last_used = self._clock
            if node.refs == 0:
                self.num_evictable += 1
            self._offer(node)

    def evict(self, count: int) -> list[int]:
        """Take the ``count`` pages used longest ago out of the tree, fewer when fewer are evictable."""
        pages: list[int] = []
        while len(pages) < count and self._offered:
            stamp, _, node = heapq.heappop(self._offered)
            if not self._is_evictable(node) or node.last_used != stamp:
                continue
            pages.append(node.page)
            node.page = -1
            self.num_pages -= 1
            self.num_evictable -= 1
            while node.parent is not None and node.page == -1 and not node.children:
                parent, node.parent = node.parent, None
                del parent.children[node.key]
                node = parent
            self._offer(node)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, gaps too, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Walk the whole tree; raises InvariantError for the first thing that does not add up."""
        nodes = list(self.nodes())
        offered = {id(node) for stamp, _, node in self._offered if node.last_used == stamp}
        for node in nodes:
            where = f"page {node.page}"
            _require(node.parent is not None and node.parent.children.get(node.key) is node, f"{where} lost its parent")
            held = 0 if self.has_gaps else sum(child.refs for child in node.children.values())
            _require(node.refs >= held, f"{where} is held too little")
            _require(not self._is_evictable(node) or id(node) in offered, f"{where} can never be evicted")
            is_gap = self.has_gaps and bool(node.children) and not node.refs
            _require(node.page >= 0 or is_gap, "a node has no page")
        pages = [node.page for node in nodes if node.page >= 0]
        _require(len(pages) == len(set(pages)), "a page has two places")
        _require(len(pages) == self.num_pages, f"{len(pages)} pages, counted {self.num_pages}")
        free = sum(node.refs == 0 and node.page >= 0 for node in nodes)
        _require(free == self.num_evictable, f"{free} pages evictable, counted {self.num_evictable}")

    def _offer(self, node: Node) -> None:
        """Make a node that may be evicted known to :meth:`evict`; what is stale goes once it is the greater part."""
        if not self._is_evictable(node):
            return
        if len(self._offered) > 2 * self.num_pages + 64:
            self._offered = [
                entry for entry in self._offered if self._is_evictable(entry[2]) and entry[0] == entry[2].last_used
            ]
            heapq.heapify(self._offered)
        self._num_pushed += 1
        heapq.heappush(self._offered, (node.last_used, self._num_pushed, node))

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and node.refs == 0 and node.page >= 0 and (self.has_gaps or not node.children)
