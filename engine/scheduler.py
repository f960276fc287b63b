"""Scheduler: which tokens each step computes. Rank 0 only.

One rule: *computed tokens catch up with known tokens*. A new request lags by its whole prompt, a running one by
the token sampled last, so prefill and decode are the same thing and requests join at any step. A request is
admitted, in order of arrival, once the cache has pages for all it may ever need; hence nothing is preempted.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from tapscope.engine.pages import PageAllocator
from tapscope.engine.plan import Share, StepPlan, phase_of
from tapscope.engine.request import Request
from tapscope.errors import UsageError


class Scheduler:
    """Owns every live request and every page."""

    def __init__(
        self, num_pages: int, page_size: int, max_running: int, eos_token_ids: Sequence[int], max_tokens: int = 512
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pages = PageAllocator(num_pages)
        self._page_size = page_size
        self._max_running = max_running
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._planned: list[tuple[Request, int]] = []
        self._next_step = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.waiting or self.running)

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._next_step

    def live(self) -> Iterator[Request]:
        """Running requests in batch order, then waiting ones in order of arrival."""
        yield from self.running
        yield from self.waiting

    def check(self, request: Request) -> None:
        """Raise UsageError when ``request`` can never run: its id is taken, or it needs more pages than there are."""
        if any(other.id == request.id for other in self.live()):
            raise UsageError(f"request id {request.id!r} is in use by a live request; choose another or wait for it")
        needed = self._num_pages(request)
        if needed > self.pages.num_pages:
            raise UsageError(
                f"request {request.id!r} needs {needed} pages of {self._page_size} tokens (prompt "
                f"{len(request.prompt_ids)}, {request.max_new_tokens} new) but the cache has {self.pages.num_pages}; "
                "raise num_pages or shorten the request"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`check`."""
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Take a live request out, between steps; None when there is none of this id."""
        request = next((r for r in self.live() if r.id == request_id), None)
        if request is None:
            return None
        request.finish_reason = "abort"
        if request in self.running:
            self._release(request)
        else:
            self.waiting.remove(request)
        return request

    def plan(self, *, all_logits: bool, epoch: int | None) -> StepPlan:
        """Admit what fits and give every running request its uncomputed tokens; needs :attr:`has_work`."""
        self._admit()
        budget, shares = self._max_tokens, []
        self._planned = []
        rows = {request.id: row for row, request in enumerate(self.running)}
        for request in sorted(self.running, key=lambda r: r.num_computed < len(r.prompt_ids)):  # decoding rows first
            start = request.num_computed
            tokens = tuple(request.tokens[start : start + budget])
            if not tokens:
                break
            budget -= len(tokens)
            ends = start + len(tokens) == len(request.tokens)
            shares.append(
                Share(
                    request=request.id,
                    row=rows[request.id],
                    position=start,
                    visit=0,
                    tokens=tokens,
                    pages=request.pages,
                    num_logits=len(tokens) if all_logits or _tells_prompt(request) else int(ends),
                    samples=ends,
                    prompt_length=len(request.prompt_ids),
                )
            )
            self._planned.append((request, start + len(tokens)))
        plan = StepPlan(
            step=self._next_step,
            phase=phase_of(request.num_computed < len(request.prompt_ids) for request, _ in self._planned),
            shares=tuple(shares),
            kv_pages_used=self.pages.num_used,
            greedy=all(request.params.is_plain for request, _ in self._planned),
            epoch=epoch,
        )
        self._next_step += 1
        return plan

    def commit(self, sampled: Sequence[int]) -> list[Request]:
        """Append a token to each request that caught up, in the plan's order; returns the finished, pages freed."""
        tokens = iter(sampled)
        for request, end in self._planned:
            request.num_computed = end
            if end == len(request.tokens):
                request.append(next(tokens), self._eos)
        finished = [request for request, _ in self._planned if request.finish_reason]
        for request in finished:
            self._release(request)
        return finished

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            needed = self._num_pages(self.waiting[0])
            if needed > self.pages.num_free:
                break
            request = self.waiting.popleft()
            request.pages = tuple(self.pages.take(needed))
            self.running.append(request)

    def _num_pages(self, request: Request) -> int:
        return -(-request.max_positions // self._page_size)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.give_back(request.pages)
        request.pages = ()


def _tells_prompt(request: Request) -> bool:
    """Whether the rows at hand are of a prompt whose log-probabilities were asked for."""
    return request.params.prompt_logprobs is not None and request.num_computed < len(request.prompt_ids)
