"""RadixCache: a prefix tree of KV pages keyed by their tokens, so that shared prefixes are computed once.

A node is one full page: its key is the page's tokens, and it stores the page number. A path from the root spells a
prefix. A request holds a reference (``refs``) to every node on its path. Unreferenced nodes stay cached until their
pages are needed. A reference to a node implies references to its ancestors, so only leaves are evicted, least recently
used first.

If all layers use a sliding window, a request references only the end of its path. Any unreferenced node may then lose
its page; while it has children, it stays in the tree as a *gap*.

A subtree with corrupt pages is dropped (:meth:`RadixCache.drop`): lookups no longer find it, requests that hold its
nodes keep them, and its pages are evicted first.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import partial

from tapscope.engine.params.validators import require_invariant

_require = partial(require_invariant, "prefix cache")

Key = tuple[int | str | tuple[str, int], ...]
"""Tokens of one page; the key of the first page is prefixed with :attr:`Request.cache_key`."""

_DROPPED = -1
"""``last_used`` of dropped nodes, which makes them first in eviction order. Also the first element of the key of a
dropped subtree, which cannot match because tokens are not negative.
"""


class RadixNode:
    """One full page of a cached prefix."""

    __slots__ = ("children", "is_dropped", "key", "last_used", "page", "parent", "refs")

    def __init__(self, parent: "RadixNode | None", key: Key, page: int) -> None:
        self.parent = parent
        """None for the root and for evicted nodes."""
        self.key = key
        self.page = page
        """Page number; -1 in the root and in a gap."""
        self.children: dict[Key, RadixNode] = {}
        self.refs = 0
        """Number of requests that hold this node."""
        self.last_used = 0
        self.is_dropped: bool = parent is not None and parent.is_dropped
        """Whether this node belongs to a dropped subtree."""


class RadixCache:
    """Prefix tree of one page pool; owns its pages until :meth:`evict` returns them."""

    def __init__(self, *, has_gaps: bool = False) -> None:
        """``has_gaps``: whether a request may hold a node without holding its ancestors."""
        self.has_gaps = has_gaps
        self.root = RadixNode(None, (), -1)
        self.num_pages = 0
        """Number of pages in the tree."""
        self.num_evictable = 0
        """Number of unreferenced pages, which :meth:`evict` can return."""
        self._clock = 0
        self._evictable_heap: list[tuple[int, int, RadixNode]] = []
        """Heap of (last_used, number, node); stale entries are skipped."""
        self._num_pushed = 0
        self._num_dropped = 0
        """Number of subtrees dropped so far; makes their keys unique."""

    def hold(self, node: RadixNode) -> None:
        """Add a reference to ``node``, which must not be a gap.

        Unless ``has_gaps``, the request must already hold the parent.
        """
        if node.refs == 0:
            self.num_evictable -= 1
        node.refs += 1

    def insert(self, parent: RadixNode, key: Key, page: int) -> RadixNode:
        """Insert ``page`` below ``parent``, as a new node or into a gap, and return its node.

        The caller must hold ``parent``, and holds the returned node.
        """
        node = parent.children.setdefault(key, RadixNode(parent, key, page))
        node.page, node.refs = page, 1
        self.num_pages += 1
        return node

    def release(self, nodes: Sequence[RadixNode]) -> None:
        """Remove one reference from each of ``nodes``; nodes of a path must be ordered from leaf to root."""
        self._clock += 1
        for node in nodes:
            node.refs -= 1
            node.last_used = _DROPPED if node.is_dropped else self._clock
            if node.refs == 0:
                self.num_evictable += 1
            self._push_if_evictable(node)

    def evict(self, count: int) -> list[int]:
        """Remove up to ``count`` unreferenced pages from the tree, least recently used first, and return them."""
        pages: list[int] = []
        while len(pages) < count and self._evictable_heap:
            stamp, _, node = heapq.heappop(self._evictable_heap)
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
            self._push_if_evictable(node)
        return pages

    def drop(self, key: Key) -> list[int]:
        """Hide the root's child ``key`` and its subtree from lookups, and evict and return its unreferenced pages.

        Requests that hold nodes of the subtree keep them and may insert further nodes below.
        """
        top = self.root.children.pop(key, None)
        if top is None:
            return []
        self._num_dropped += 1
        top.key = (_DROPPED, self._num_dropped)
        self.root.children[top.key] = top
        count = 0
        for node in (top, *self.nodes(top)):
            node.is_dropped, node.last_used = True, _DROPPED
            count += node.refs == 0 and node.page >= 0
            self._push_if_evictable(node)
        return self.evict(count)

    def nodes(self, below: RadixNode | None = None) -> Iterator[RadixNode]:
        """Yield every node below ``below``, by default the root, including gaps; parents first."""
        stack = list((below or self.root).children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Check the whole tree; raise InvariantError for the first violation."""
        nodes = list(self.nodes())
        in_heap = {id(node) for stamp, _, node in self._evictable_heap if node.last_used == stamp}
        for node in nodes:
            where = f"page {node.page}"
            _require(
                node.parent is not None and node.parent.children.get(node.key) is node,
                f"{where} is not a child of its parent",
            )
            held = 0 if self.has_gaps else sum(child.refs for child in node.children.values())
            _require(node.refs >= held, f"{where} has fewer holders than its children")
            _require(not self._is_evictable(node) or id(node) in in_heap, f"{where} can never be evicted")
            is_gap = self.has_gaps and bool(node.children) and not node.refs
            _require(node.page >= 0 or is_gap, "a node has no page")
        pages = [node.page for node in nodes if node.page >= 0]
        _require(len(pages) == len(set(pages)), "a page is in the tree twice")
        _require(len(pages) == self.num_pages, f"{len(pages)} pages, counted {self.num_pages}")
        free = sum(node.refs == 0 and node.page >= 0 for node in nodes)
        _require(free == self.num_evictable, f"{free} pages evictable, counted {self.num_evictable}")

    def _push_if_evictable(self, node: RadixNode) -> None:
        """Push ``node`` onto the eviction heap if it is evictable.

        Rebuild the heap once stale entries outnumber valid ones.
        """
        if not self._is_evictable(node):
            return
        if len(self._evictable_heap) > 2 * self.num_pages + 64:
            self._evictable_heap = [
                entry
                for entry in self._evictable_heap
                if self._is_evictable(entry[2]) and entry[0] == entry[2].last_used
            ]
            heapq.heapify(self._evictable_heap)
        self._num_pushed += 1
        heapq.heappush(self._evictable_heap, (node.last_used, self._num_pushed, node))

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and node.refs == 0 and node.page >= 0 and (self.has_gaps or not node.children)
