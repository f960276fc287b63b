"""StepBuilder: the step being planned, with its scheduled requests, remaining rows and the pages it completes."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ONE_ROW, PENDING, ScheduledRequest, StepPlan, phase_of
from tapscope.engine.scheduling.adapter_slots import AdapterSlots
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.radix_cache import Key, RadixNode

NO_DRAFTS = Drafts(())
_PENDING_ROW = (PENDING,)
_NO_UPDATES: dict[str, Any] = {"pages": (), "windowed_pages": ()}
"""Equivalent of the result of :func:`page_updates` if no page table has changed."""


class StepBuilder:
    """Builder of one StepPlan; schedules each request at most once."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        max_tokens: int,
        page_size: int,
        *,
        all_logits: bool,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        """``max_tokens``: maximum number of rows of the step. ``all_logits``: compute logits of every row."""
        self._kv_cache_manager = kv_cache_manager
        self._adapter_slots = adapter_slots or AdapterSlots(0)
        self._page_size = page_size
        self._all_logits = all_logits
        self._pages_in_step: set[tuple[RadixNode, Key]] = set()
        self.num_reserved_rows = 0
        """Rows reserved for decoding requests that are not scheduled yet; not available to drafts."""
        self.prompts: list[Request] = []
        """Running requests in prefill; drafts leave the pages of their known tokens available."""
        self.num_rows_left = max_tokens
        """Rows of the budget that are still free."""
        self.planned: list[tuple[Request, ScheduledRequest]] = []
        """Scheduled requests, in row order."""

    def contains(self, request: Request) -> bool:
        """Return whether ``request`` is already scheduled in this step."""
        return any(other is request for other, _ in self.planned)

    def is_being_computed(self, request: Request) -> bool:
        """Return whether another request in this step computes the next page of ``request``.

        ``request`` can then share the page in the next step.
        """
        return bool(self._pages_in_step) and self._kv_cache_manager.next_shareable_page(request) in self._pages_in_step

    def add(self, request: Request, num_computable_rows: int, drafts: Drafts = NO_DRAFTS) -> None:
        """Schedule the uncomputed tokens of a running request.

        The number of rows is limited by the free rows and by ``num_computable_rows``, the limit set by pages. If the
        request decodes, as many ``drafts`` as fit are appended.
        """
        is_decoding = request.is_decoding
        self.num_reserved_rows -= is_decoding
        start = request.num_computed
        end = min(start + min(self.num_rows_left, num_computable_rows), len(request.tokens))
        end = self._kv_cache_manager.chunk_end(request, start, end)
        num_free_rows = self.num_rows_left - (end - start) - self.num_reserved_rows
        if not is_decoding or num_free_rows < 1:
            drafts = NO_DRAFTS
        if drafts:
            num_rows = self._kv_cache_manager.num_draft_rows(request, self.num_reserved_rows, self.prompts)
            drafts = drafts.first(max(0, min(num_rows, num_free_rows)))
        request.accepted_drafts = ()
        self._kv_cache_manager.allocate(request, end + len(drafts))
        self._note_completed_page(request, end)
        samples = end == len(request.tokens)
        every = self._all_logits or (request.wants_prompt_rows and start < len(request.prompt_ids))
        scheduled = ScheduledRequest(
            request=request.id,
            row=request.row,
            position=start,
            visits=request.visits(start, end + len(drafts)),
            tokens=(*request.tokens[start:end], *drafts.tokens),
            tree=drafts.tree,
            **page_updates(self._kv_cache_manager, request),
            states=self._kv_cache_manager.allocate_state(request, len(drafts)),
            num_drafts=len(drafts),
            num_logits=(end - start if every else int(samples)) + len(drafts),
            samples=samples,
            prompt_length=len(request.prompt_ids),
            capture=request.capture,
            seed=None if request.params.is_greedy else request.seed,
            adapter=request.adapter,
            adapter_slot=self._adapter_slots.slot_of(request.adapter_id),
        )
        if request.experts:
            scheduled = replace(scheduled, experts=request.experts_of(scheduled.row_positions))
        self._append(request, scheduled)

    def add_next(self, planned: Sequence[tuple[Request, ScheduledRequest]]) -> None:
        """Schedule one more row per request of ``planned``, for the token that its in-flight row will sample."""
        size, added = self._page_size, self.planned
        for request, scheduled in planned:
            start = scheduled.position + 1
            updates = _NO_UPDATES
            for table in request.tables:
                if start >= len(table.pages) * size or table.num_sent_pages != len(table.pages):
                    self._kv_cache_manager.allocate(request, start + 1)
                    updates = page_updates(self._kv_cache_manager, request)
                    _mark_sent(request)
                    break
            spans = request.spans
            visits = ONE_ROW if len(spans) == 1 and spans[0][1] <= start else request.visits(start, start + 1)
            is_pending = scheduled.tokens is _PENDING_ROW and not (scheduled.pages or scheduled.windowed_pages)
            if is_pending and updates is _NO_UPDATES and scheduled.visits is visits:
                following = replace(scheduled, position=start)  # only the position changes
            else:
                states = scheduled.states[1:2] * 2
                following = replace(
                    scheduled, position=start, visits=visits, tokens=_PENDING_ROW, states=states, **updates
                )
            added.append((request, following))
        self.num_rows_left -= len(planned)

    def plan(self, step: int, epoch: int | None) -> StepPlan:
        """Return the finished plan. Requests with a single row come first, as the decode attention expects."""
        phase = phase_of([scheduled.position < len(request.prompt_ids) for request, scheduled in self.planned])
        verifies = any(scheduled.num_drafts for _, scheduled in self.planned)
        if verifies:
            self.planned.sort(key=lambda pair: len(pair[1].tokens) > 1 or bool(pair[1].tree))
        return StepPlan(
            step=step,
            phase="verify" if verifies and phase == "decode" else phase,
            scheduled=tuple([scheduled for _, scheduled in self.planned]),
            kv_pages_used=self._kv_cache_manager.num_used,
            greedy=all(request.is_plain for request, _ in self.planned),
            epoch=epoch,
            adapter_loads=self._adapter_slots.take_loads(),
        )

    def _append(self, request: Request, scheduled: ScheduledRequest) -> None:
        self.planned.append((request, scheduled))
        self.num_rows_left -= len(scheduled.tokens)
        _mark_sent(request)

    def _note_completed_page(self, request: Request, end: int) -> None:
        """Record the page that the request completes by computing its positions before ``end``."""
        page = self._kv_cache_manager.next_shareable_page(request)
        if page is not None and (request.table(0).num_shared_pages + 1) * self._page_size <= end:
            self._pages_in_step.add(page)


def _mark_sent(request: Request) -> None:
    """Mark all page table entries of the request as sent: they are in the plan."""
    for table in request.tables:
        table.num_sent_pages = len(table.pages)


def page_updates(kv_cache_manager: KVCacheManager, request: Request) -> dict[str, Any]:
    """Return the page table entries changed since they were last sent, as keyword arguments of ScheduledRequest."""
    first, *others = [
        (request.table(group.index).num_sent_pages, group.new_entries(request)) for group in kv_cache_manager.groups
    ]
    windowed = tuple([(start, *pages) for start, pages in others])
    return {"page_start": first[0], "pages": first[1], "windowed_pages": windowed}
