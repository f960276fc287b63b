"""StateGroup: slots for recurrent states, one per running request, plus checkpoints in the prefix cache.

A checkpoint is the recurrent state after a prefix of full pages. Checkpoints are immutable: a request that resumes from
one reads the checkpoint's slot and writes to its own. When the state of a request becomes a checkpoint, its slot moves
to the tree, and the request's next step writes to a new slot.

Checkpoints are made where a prefill chunk ends at a page boundary, and every ``interval`` positions. Prefill chunks are
cut at that interval, at the end of the cached pages, and at the end of the last full page.
"""

from collections.abc import Sequence
from functools import partial

from tapscope.engine.params.validators import require_invariant
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.state_table import SLOTS_PER_REQUEST
from tapscope.engine.scheduling.page_group import BlockAllocator, page_key
from tapscope.engine.scheduling.radix_cache import RadixCache, RadixNode

_require = partial(require_invariant, "states")


class StateGroup:
    """Slot allocator and prefix tree for recurrent states.

    Every slot is free, a checkpoint in the tree, or owned by exactly one running request.
    """

    def __init__(
        self, num_slots: int, page_size: int, interval: int, *, prefix_cache: bool, num_reserved: int = 0
    ) -> None:
        """``interval``: positions between checkpoints in long prompts and outputs, rounded up to full pages.

        ``num_reserved``: number of requests whose slots are not available to draft tokens.
        """
        self._num_reserved, self._num_in_drafts = num_reserved, 0
        self.slots = BlockAllocator(num_slots)
        self.page_size, self.interval = page_size, -(-interval // page_size) * page_size
        self.tree = RadixCache(has_gaps=True)
        self._shares = prefix_cache

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that can run concurrently."""
        return self.slots.num_pages // SLOTS_PER_REQUEST

    def cached_path(self, request: Request) -> list[RadixNode]:
        """Return the tree nodes of the request's pages, from the first page on; nodes without a checkpoint are gaps."""
        size, node, nodes = self.page_size, self.tree.root, []
        for page in range((len(request.tokens) - 1) // size):
            child = node.children.get(page_key(request, page, size))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def share(self, request: Request, node: RadixNode) -> None:
        """Let the request resume from the checkpoint ``node``."""
        self.tree.hold(node)
        self._drop_checkpoint(request)
        request.state.checkpoint = node

    @property
    def num_draft_slots(self) -> int:
        """Number of slots available to draft rows; may be negative.

        Enough slots stay available for every request that may run: free ones, or those reserved for requests and their
        checkpoints.
        """
        num_seqs = min(self._num_reserved, self.max_num_seqs)
        num_left = self.slots.num_pages - SLOTS_PER_REQUEST * num_seqs - self._num_in_drafts
        return max(self.slots.num_free - self._num_reserved, num_left)

    def allocate(self, request: Request, num_drafts: int = 0) -> tuple[int, ...]:
        """Return (slot to read, slot to write) for the request's next step; -1 reads the initial state.

        With ``num_drafts``, the slot to write receives the state before the first draft, and one slot for the state
        after each draft follows. While a draft model runs (``state.is_drafting``), each of its steps writes to one
        draft slot instead of the request's own slot.
        """
        state = request.state
        read = state.slot if state.checkpoint is None else state.checkpoint.page
        if not state.is_drafting:
            self.free_drafts(request)
        if state.slot < 0:
            (state.slot,) = self._take(1)
        if state.is_drafting and state.draft_slots:
            read = state.draft_slots[-1]
        new = self._take(1 if state.is_drafting else num_drafts)
        state.draft_slots += new
        self._num_in_drafts += len(new)
        return (read, *new) if state.is_drafting else (read, state.slot, *new)

    def chunk_end(self, request: Request, start: int, end: int, known: int) -> int:
        """Return the end of a prefill chunk of at most [``start``, ``end``), cut where its state becomes a checkpoint.

        ``known``: end of the prefix that the other groups have cached.
        """
        if not self._shares or end - start <= 1:
            return end
        size = self.page_size
        last = (len(request.tokens) - 1) // size * size
        cuts = [cut for cut in ((start // self.interval + 1) * self.interval, known, last) if start < cut < end]
        if cuts:
            return min(cuts)
        floor = end // size * size
        return floor if start < floor and end < len(request.tokens) else end

    def makes_checkpoint(self, request: Request, end: int) -> bool:
        """Return whether the state after a step that computes the request up to ``end`` becomes a checkpoint."""
        is_decoded = end > len(request.prompt_ids)
        return self._shares and end % (self.interval if is_decoded else self.page_size) == 0

    def store(self, request: Request) -> None:
        """Update the request's slots after rows were computed: its state stays in its own slot or becomes a checkpoint.

        After verification of drafts, the slot written after the last accepted draft becomes the request's own slot.
        """
        self._drop_checkpoint(request)
        state = request.state
        if state.draft_slots and request.num_accepted:
            kept = state.draft_slots[request.num_accepted - 1]
            state.draft_slots[request.num_accepted - 1], state.slot = state.slot, kept
        self.free_drafts(request)
        if request.has_nan or not self.makes_checkpoint(request, request.num_computed):
            return
        node = self.tree.root
        for page in range(request.num_computed // self.page_size - 1):
            key = page_key(request, page, self.page_size)
            node = node.children.setdefault(key, RadixNode(node, key, -1))
        key = page_key(request, request.num_computed // self.page_size - 1, self.page_size)
        known = node.children.get(key)
        if known is None or known.page < 0:
            request.state.checkpoint = self.tree.insert(node, key, request.state.slot)
            request.state.slot = -1

    def free_drafts(self, request: Request) -> None:
        """Free the request's draft slots."""
        self.slots.free_pages(request.state.draft_slots)
        self._num_in_drafts -= len(request.state.draft_slots)
        request.state.draft_slots = []

    def release(self, request: Request) -> None:
        """Free all slots of the request and release its checkpoint."""
        self._drop_checkpoint(request)
        self.free_drafts(request)
        if request.state.slot >= 0:
            self.slots.free_pages([request.state.slot])
        request.state.slot = -1

    def flush(self) -> int:
        """Evict every checkpoint that no running request holds; return the number of freed slots."""
        slots = self.tree.evict(self.tree.num_evictable)
        self.slots.free_pages(slots)
        return len(slots)

    def drop_prefix(self, request: Request) -> None:
        """Drop every checkpoint whose prefix starts with the request's first page."""
        self.slots.free_pages(self.tree.drop(page_key(request, 0, self.page_size)))

    def check(self, running: Sequence[Request]) -> None:
        """Check every slot against the running requests.

        Raises InvariantError for a slot that is leaked, held twice or held by the wrong request.
        """
        self.tree.check()
        held: dict[int, int] = {}
        for request in running:
            node = request.state.checkpoint
            if node is not None:
                held[id(node)] = held.get(id(node), 0) + 1
            _require(not request.num_computed or not request.state.is_empty, f"{request.id!r} has no state")
        nodes = list(self.tree.nodes())
        _require(all(n.refs == held.get(id(n), 0) for n in nodes), "a checkpoint has a wrong reference count")
        own = [request.state.slot for request in running if request.state.slot >= 0]
        drafted = [slot for request in running for slot in request.state.draft_slots]
        _require(len(drafted) == self._num_in_drafts, f"{self._num_in_drafts} slots of drafts, {len(drafted)} held")
        own += drafted
        places = sorted([*self.slots.free, *own, *(node.page for node in nodes if node.page >= 0)])
        _require(places == list(range(self.slots.num_pages)), "free, cached and held slots are not every slot once")

    def _take(self, count: int) -> list[int]:
        """Allocate ``count`` slots, evicting the least recently used checkpoints if too few are free."""
        self.slots.free_pages(self.tree.evict(max(0, count - self.slots.num_free)))
        return self.slots.allocate_pages(count)

    def _drop_checkpoint(self, request: Request) -> None:
        if request.state.checkpoint is not None:
            self.tree.release([request.state.checkpoint])
            request.state.checkpoint = None
