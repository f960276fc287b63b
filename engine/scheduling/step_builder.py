"""Draft: the step that is being planned: its shares so far, the rows left, the pages that will come of it."""

from dataclasses import replace

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import PENDING, Share, StepPlan, phase_of
from tapscope.engine.scheduling.kv_cache_manager import Paging
from tapscope.engine.scheduling.radix_cache import Key, Node


class Draft:
    """Each request has one share at most."""

    def __init__(self, paging: Paging, max_tokens: int, page_size: int, *, all_logits: bool) -> None:
        """``max_tokens``: rows of the step; ``all_logits``: every row has logits."""
        self._paging = paging
        self._page_size = page_size
        self._all_logits = all_logits
        self._coming: set[tuple[Node, Key]] = set()
        self.num_left = max_tokens
        """Rows that are still to be had."""
        self.planned: list[tuple[Request, Share]] = []
        """In the order of the step's rows."""

    def holds(self, request: Request) -> bool:
        """Whether the request has its share already."""
        return any(other is request for other, _ in self.planned)

    def is_coming(self, request: Request) -> bool:
        """Whether another request computes this one's next page in this very step: then it can be had from the next."""
        return bool(self._coming) and self._paging.next_page(request) in self._coming

    def add(self, request: Request, room: int) -> None:
        """Give a running request its share: what it lags by, as far as the rows left and ``room`` in pages go."""
        start = request.num_computed
        end = min(start + min(self.num_left, room), len(request.tokens))
        self._paging.grow(request, end)
        self._expect(request, end)
        samples = end == len(request.tokens)
        every = self._all_logits or (request.wants_prompt_rows and start < len(request.prompt_ids))
        share = Share(
            request=request.id,
            row=request.row,
            position=start,
            visits=request.visits(start, end),
            tokens=tuple(request.tokens[start:end]),
            page_start=request.num_sent,
            pages=self._paging.table(request),
            num_logits=end - start if every else int(samples),
            samples=samples,
            prompt_length=len(request.prompt_ids),
            capture=request.capture,
            seed=None if request.params.is_greedy else request.seed,
        )
        self._enter(request, share)

    def add_next(self, request: Request, share: Share) -> None:
        """Give a request the row of the token that ``share``, still being computed, will sample."""
        start = share.position + 1
        self._paging.grow(request, start + 1)
        following = replace(
            share,
            position=start,
            visits=request.visits(start, start + 1),
            tokens=(PENDING,),
            page_start=request.num_sent,
            pages=self._paging.table(request),
        )
        self._enter(request, following)

    def plan(self, step: int, epoch: int | None) -> StepPlan:
        """The step as it stands."""
        return StepPlan(
            step=step,
            phase=phase_of(share.position < len(request.prompt_ids) for request, share in self.planned),
            shares=tuple(share for _, share in self.planned),
            kv_pages_used=self._paging.num_used,
            greedy=all(request.params.is_plain for request, _ in self.planned),
            epoch=epoch,
        )

    def _enter(self, request: Request, share: Share) -> None:
        self.planned.append((request, share))
        self.num_left -= len(share.tokens)
        request.num_sent = len(request.pages)

    def _expect(self, request: Request, end: int) -> None:
        """Note the page that the request completes by computing up to ``end``."""
        page = self._paging.next_page(request)
        if page is not None and (request.num_shared + 1) * self._page_size <= end:
            self._coming.add(page)
