"""StateGroup: slots of recurrent states: one of each running request, and checkpoints in the prefix cache.

A checkpoint is the state after a prefix of full pages. It is never written again: a request that continues from it
reads it and writes its own slot (copy on write, without a copy). When a request's state becomes a checkpoint, its slot
moves to the tree, and its next step writes another one.

Checkpoints are made where a prompt's chunk ends with a page, and at every ``interval`` positions. Chunks of prompts end
at that interval, where the pages known so far end, and at the end of the last full page.
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
    """Every slot is free, a checkpoint in the tree, or the own slot of exactly one running request."""

    def __init__(
        self, num_slots: int, page_size: int, interval: int, *, prefix_cache: bool, num_reserved: int = 0
    ) -> None:
        """``interval``: positions between checkpoints of a long prompt or output, rounded up to full pages.

        ``num_reserved``: requests whose slots draft tokens do not take.
        """
        self._num_reserved, self._num_in_drafts = num_reserved, 0
        self.slots = BlockAllocator(num_slots)
        self.page_size, self.interval = page_size, -(-interval // page_size) * page_size
        self.tree = RadixCache(has_gaps=True)
        self._shares = prefix_cache

    @property
    def max_num_seqs(self) -> int:
        """Requests that can run together."""
        return self.slots.num_pages // SLOTS_PER_REQUEST

    def cached_path(self, request: Request) -> list[RadixNode]:
        """Nodes of the request's pages in the tree, from its first one on; those without a checkpoint are gaps."""
        size, node, nodes = self.page_size, self.tree.root, []
        for page in range((len(request.tokens) - 1) // size):
            child = node.children.get(page_key(request, page, size))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def share(self, request: Request, node: RadixNode) -> None:
        """Let the request continue from the checkpoint ``node``."""
        self.tree.hold(node)
        self._drop_checkpoint(request)
        request.state.checkpoint = node

    @property
    def num_draft_slots(self) -> int:
        """Slots that draft rows may use. Every request that may run still gets its own: a free one, or one of those
        that draft rows leave to requests and their checkpoints."""
        num_seqs = min(self._num_reserved, self.max_num_seqs)
        num_left = self.slots.num_pages - SLOTS_PER_REQUEST * num_seqs - self._num_in_drafts
        return max(self.slots.num_free - self._num_reserved, num_left)

    def allocate(self, request: Request, num_drafts: int = 0) -> tuple[int, ...]:
        """(slot to read or -1 for the initial state, slot to write) of the request's next step; with drafts, slots for
        the state before the first draft and after each of them. A step of a draft model writes such a slot itself.
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
        """Where a chunk of the request's prompt that may end at ``end`` ends, so that its state becomes a checkpoint;
        ``known``: the position up to which the other groups know its pages.
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
        """Whether the state after a step that computes the request up to ``end`` becomes a checkpoint."""
        is_decoded = end > len(request.prompt_ids)
        return self._shares and end % (self.interval if is_decoded else self.page_size) == 0

    def store(self, request: Request) -> None:
        """After rows were computed: the request reads its own slot next, or that slot becomes a checkpoint.

        After drafts its own slot is the one written after the last accepted one.
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
        """Free the slots of the states after the request's drafts."""
        self.slots.free_pages(request.state.draft_slots)
        self._num_in_drafts -= len(request.state.draft_slots)
        request.state.draft_slots = []

    def release(self, request: Request) -> None:
        """Free what the request holds."""
        self._drop_checkpoint(request)
        self.free_drafts(request)
        if request.state.slot >= 0:
            self.slots.free_pages([request.state.slot])
        request.state.slot = -1

    def flush(self) -> int:
        """Evict every checkpoint that no running request holds; returns their number."""
        slots = self.tree.evict(self.tree.num_evictable)
        self.slots.free_pages(slots)
        return len(slots)

    def drop_prefix(self, request: Request) -> None:
        """As :meth:`.PageGroup.drop_prefix`, of checkpoints."""
        self.slots.free_pages(self.tree.drop(page_key(request, 0, self.page_size)))

    def check(self, running: Sequence[Request]) -> None:
        """Check every slot; raises InvariantError for one that is lost, held twice or held by a wrong request."""
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
        """Free slots, after evicting the checkpoints that were used least recently if there are fewer."""
        self.slots.free_pages(self.tree.evict(max(0, count - self.slots.num_free)))
        return self.slots.allocate_pages(count)

    def _drop_checkpoint(self, request: Request) -> None:
        if request.state.checkpoint is not None:
            self.tree.release([request.state.checkpoint])
            request.state.checkpoint = None
