"""InputBuffers: static tensors that plans are copied into. Every step reads the same memory, whatever its shape."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from tapscope.engine.execution.packed_vectors import PackedVectors, Vector
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.state_cache import StepStates
from tapscope.engine.kv_cache.step_cache import Segment, StepCache
from tapscope.engine.requests.step_plan import PENDING, ScheduledRequest, StepPlan
from tapscope.engine.sampling.device_copy import to_device
from tapscope.kernels import triton

_LEAST_ROWS, _MOST_ROWS = 8, 512
"""Range of row counts for which kernels move inputs and tokens. A copy stalls the device, but is faster to launch."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the model: views of static buffers, valid until the next plan is loaded."""

    input_ids: Tensor
    """[tokens] int64."""
    position_ids: Tensor
    """[tokens] int64."""
    logits_to_keep: Tensor | None
    """[logit rows] int64; None for all rows."""
    cache: StepCache


class InputBuffers:
    """Inputs of every step on the device of ``cache``, and the page tables of all running requests.

    ``max_rows`` bounds the number of requests, ``max_pages`` the pages of one request. The page table persists between
    steps: a plan contains only changes.

    A step of *single rows* treats each row as a request of its own, of which the row is the last. It reads the same
    page table, up to its own position. Rows of one request may therefore be computed side by side, unless a recurrent
    state passes from row to row.
    """

    def __init__(
        self,
        cache: KVCache,
        max_tokens: int,
        max_rows: int,
        max_pages: int,
        page_tables: Sequence[Tensor] | None = None,
        max_single_rows: int = 0,
        num_drafts: int = 0,
    ) -> None:
        """``page_tables``: those of another model, whose pages ``cache`` mirrors; None: new ones. ``max_single_rows``:
        rows of a step of single rows, if more than ``max_rows`` are possible; ``num_drafts``: maximum number of drafts
        per request in a step.
        """
        self._cache = cache
        device = cache.device
        shape = max_rows + 1, max_pages  # the last row is for padding and has only the dummy page
        if page_tables is None:
            page_tables = [torch.full(shape, n, dtype=torch.int32, device=device) for n in cache.group_pages]
        self.page_tables = list(page_tables)
        """Page table of each cache group."""
        self.last_tokens = torch.zeros(1 + num_drafts, max_rows + 1, dtype=torch.int64, device=device)
        """Token sampled last, then drafts, for each row of the page tables; see :data:`.PENDING`."""
        self._token_rows = self.last_tokens[0]
        self._padding = ScheduledRequest(
            request="", row=max_rows, position=0, visits=((1, 0),), tokens=(0,), pages=(), prompt_length=1
        )
        num_rows = max(max_rows, max_single_rows)
        self._max_rows = max_rows
        is_cuda = device.type == "cuda"
        self._sampled = [torch.zeros(num_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(4)]
        self._sampled_index = 0
        self._tokens = PackedVectors(5, max(max_tokens, num_rows), torch.int64, device)
        self._logit_rows = PackedVectors(1, max_tokens, torch.int64, device)
        self._requests = PackedVectors(
            3 if cache.states is None else 5, max(num_rows + 1, 2 * max_rows + 2), torch.int32, device
        )

    def load(self, plan: StepPlan, num_rows: int | None = None, *, by_request: bool = False) -> StepInputs:
        """Write ``plan`` into the buffers and return its inputs.

        With ``num_rows``, the plan becomes a step of single rows, padded to that number. A padding row is token 0 at
        position 0 of a request whose only page is the dummy page, so it writes nothing else; it has no logits. With
        ``by_request``, the plan is padded as for :meth:`request_rows`, and rows still belong to their requests.
        """
        scheduled = self.fill(plan, num_rows, by_request=by_request)
        if num_rows is not None and by_request:
            return replace(self.request_rows(num_rows), logits_to_keep=self.logits_to_keep(plan, num_rows))
        counts = [len(item.tokens) for item in scheduled]
        starts = (0, *accumulate(counts))
        if num_rows is None:
            each = enumerate(scheduled)
            segments = [Segment(i, starts[i], counts[i], item.position, item.tree) for i, item in each]
        else:
            places = (item.position + row for item in scheduled for row in range(len(item.tokens)))
            segments = [Segment(i, i, 1, place) for i, place in enumerate(places)]
        inputs = self._inputs(segments, starts[-1], self._most_pages(scheduled), pending=plan.has_pending)
        if inputs.cache.states is not None:
            inputs.cache.states.draft_slots = {
                i: item.states[2:] for i, item in enumerate(scheduled) if item.num_drafts
            }
        return replace(inputs, logits_to_keep=self.logits_to_keep(plan, starts[-1]))

    def logits_to_keep(self, plan: StepPlan, num_rows: int) -> Tensor | None:
        """Return the rows of ``plan`` with logits, in a step of ``num_rows`` rows with padding; None for all rows."""
        return None if len(plan.logit_rows) == num_rows else self._logit_rows.load((plan.logit_rows,))[0]

    def load_graph(self, plan: StepPlan, num_rows: int, captured: StepInputs) -> StepInputs:
        """Load a step of ``num_rows`` single rows, as :meth:`load`, for a graph that reads the ``captured`` inputs.

        Values that the graph computes from static memory are not computed again.
        """
        self.fill(plan, num_rows)
        input_ids, position_ids, token_rows, *_ = self._tokens.views([num_rows] * 5)
        if plan.has_pending and self._moving_kernels(num_rows) is None:
            input_ids = self._known(input_ids, token_rows)
        return StepInputs(input_ids, position_ids, self.logits_to_keep(plan, num_rows), captured.cache)

    def fill(
        self, plan: StepPlan, num_rows: int | None = None, *, by_request: bool = False
    ) -> tuple[ScheduledRequest, ...]:
        """Copy the vectors of ``plan`` to the device, padded as in :meth:`load`; return the requests with padding.

        With ``by_request`` rows belong to their requests, as in :meth:`request_rows`. The padding rows form one more
        request, and requests without rows are inserted after the decode requests and at the end.
        """
        scheduled = plan.scheduled
        self._update_page_tables(scheduled)
        if num_rows is not None and by_request:
            missing = (0,) * (num_rows - plan.num_tokens)
            scheduled += (structs.replace(self._padding, tokens=missing),) if missing else ()
        elif num_rows is not None:
            scheduled += (self._padding,) * (num_rows - plan.num_tokens)
        rows, first, prompts = (
            np.array(values, np.int64)
            for values in (
                [item.row for item in scheduled],
                [item.position for item in scheduled],
                [item.prompt_length for item in scheduled],
            )
        )
        ids = list(chain.from_iterable([item.tokens for item in scheduled]))
        token_rows, token_prompts, places, lengths = rows, prompts, first, first + 1
        starts = np.arange(len(scheduled) + 1)
        if not plan.is_decode or by_request:  # requests, or the padding request, may have several rows
            counts = np.array([len(item.tokens) for item in scheduled], np.int64)
            starts, lengths = np.concatenate(([0], np.cumsum(counts))), first + counts
            places = np.repeat(first - starts[:-1], counts) + np.arange(len(ids))
            token_rows, token_prompts = np.repeat(rows, counts), np.repeat(prompts, counts)
        positions = _positions(scheduled, places)
        counted = np.maximum(positions + 1, token_prompts)
        if num_rows is not None and by_request:
            several = (i for i, item in enumerate(plan.scheduled) if len(item.tokens) > 1)
            single = next(several, len(plan.scheduled))
            most_single, most = self._request_counts(num_rows)
            empty = [single] * (most_single - single) + [len(scheduled)] * (most - (len(scheduled) - single))
            rows = np.insert(rows, empty, self._padding.row)
            starts, lengths = np.insert(starts, empty, starts[empty]), np.insert(lengths, empty, 0)
        elif num_rows is not None:
            rows, starts, lengths = token_rows, np.arange(num_rows + 1), places + 1
        vectors = ids, positions, token_rows, counted, places
        self._load(vectors, (rows, starts, lengths, *self._state_slots(scheduled)))
        return scheduled

    def _moving_kernels(self, num_rows: int) -> Any:
        """Return the kernels that move inputs and tokens of ``num_rows`` rows; None if copies are faster."""
        return _kernels(self.last_tokens.device) if _LEAST_ROWS <= num_rows <= _MOST_ROWS else None

    def _load(self, tokens: Sequence[Vector], requests: Sequence[Vector]) -> None:
        """Copy the vectors of tokens and of requests to the device.

        If a kernel copies, it also replaces placeholders by :attr:`last_tokens`.
        """
        pairs = self._tokens.stage(tokens), self._requests.stage(requests)
        if (kernels := self._moving_kernels(len(tokens[0]))) is not None:
            kernels.read_host(*pairs, len(tokens[0]), self.last_tokens)
        else:
            for given, kept in pairs:
                kept.copy_(given, non_blocking=True)
        self._tokens.mark_read()
        self._requests.mark_read()
        self._token_rows = self._tokens.views([len(vector) for vector in tokens])[2]

    def single_rows(self, num_rows: int, most_rows: int = 1) -> StepInputs:
        """Return the inputs of a step of ``num_rows`` single rows as views of static memory, for graph capture.

        A later :meth:`fill` with the same ``num_rows`` sets their values. Host-side numbers are upper bounds: every
        request has the maximum length. Up to ``most_rows`` adjacent rows may belong to one request.
        """
        width = self.page_tables[0].shape[1]
        longest = width * self._cache.page_size
        segments = [Segment(i, i, 1, longest - 1) for i in range(num_rows)]
        inputs = self._inputs(segments, num_rows, width, pending=True)
        inputs.cache.most_rows = most_rows
        return inputs

    def request_rows(self, num_rows: int) -> StepInputs:
        """Return inputs as :meth:`single_rows`, for a step of ``num_rows`` rows with several rows per request.

        Decode requests come first; :meth:`fill` with ``by_request`` sets the values.
        """
        width = self.page_tables[0].shape[1]
        longest = width * self._cache.page_size
        single, several = self._request_counts(num_rows)
        segments = [Segment(i, i, 1, longest - 1) for i in range(single)]
        segments += [Segment(single + i, 0, num_rows, longest - num_rows) for i in range(several)]
        inputs = self._inputs(segments, num_rows, width, pending=True)
        inputs.cache.is_padded = True
        return inputs

    def _request_counts(self, num_rows: int) -> tuple[int, int]:
        """Return the maximum numbers of leading requests with one row, and of other requests, padding included."""
        return min(num_rows, self._max_rows), min(num_rows, self._max_rows + 1)

    def rows_of(self, num_rows: int) -> Tensor:
        """Return the page-table row of each of the ``num_rows`` rows loaded last."""
        return self._tokens.views([num_rows] * 5)[2]

    def set_tokens(self, tokens: Tensor, num_rows: int) -> None:
        """Replace the first ids of the ``num_rows`` rows loaded last by ``tokens`` on the device."""
        self._tokens.views([num_rows] * 5)[0][: len(tokens)].copy_(tokens)

    def advance(self, num_rows: int, by: Tensor | int) -> None:
        """Advance the ``num_rows`` single rows loaded last by ``by`` positions, [rows] int64 or one number for all.

        Only for decode requests, for which all of the advanced vectors grow alike.
        """
        _, positions, _, counted, places = self._tokens.views([num_rows] * 5)
        _, _, lengths = self._requests.views([num_rows, num_rows + 1, num_rows])
        for each in (positions, counted, places, lengths):
            each += by

    def is_padding(self, num_rows: int) -> Tensor:
        """Return which of the ``num_rows`` single rows loaded last are padding, [rows, 1] bool on the device."""
        return (self.rows_of(num_rows) == self._padding.row).unsqueeze(1)

    def load_prompt_of_padding(self, num_rows: int) -> StepInputs:
        """Load a prompt of at most ``num_rows`` rows that writes only to the dummy page."""
        num_rows = min(num_rows, self.page_tables[0].shape[1] * self._cache.page_size)
        prompt = structs.replace(self._padding, tokens=(0,) * num_rows)
        return self.load(StepPlan(step=0, phase="prefill", scheduled=(prompt,), kv_pages_used=0))

    def load_padding(self, num_rows: int) -> None:
        """Load ``num_rows`` padding rows: a step that computes them writes only to the dummy page."""
        row = self._padding.row
        zeros, ones = [0] * num_rows, [1] * num_rows
        rows, states = [row] * num_rows, self._state_slots([self._padding] * num_rows)
        self._load((zeros, zeros, rows, ones, zeros), (rows, range(num_rows + 1), ones, *states))

    def _state_slots(self, scheduled: Sequence[ScheduledRequest]) -> tuple[list[int], ...]:
        """Return the state slots that each request reads and writes; empty in models without recurrent states."""
        states = self._cache.states
        if states is None:
            return ()
        slots = [item.states or (states.initial, states.dummy) for item in scheduled]
        return [states.initial if read < 0 else read for read, *_ in slots], [write for _, write, *_ in slots]

    def store_sampled_tokens(self, tokens: Tensor) -> Tensor:
        """Store the sampled tokens [requests] of the step of single rows loaded last, for the next step.

        Returns the host copy of the tokens, valid once the device has written it, until three more steps have been
        stored.
        """
        self._sampled_index = (self._sampled_index + 1) % len(self._sampled)
        host, kernels = self._sampled[self._sampled_index][: len(tokens)], self._moving_kernels(len(tokens))
        if kernels is None:
            self.last_tokens[0].index_copy_(0, self._token_rows[: len(tokens)], tokens)
            host.copy_(tokens, non_blocking=True)
        else:
            kernels.store_tokens(tokens.contiguous(), self._token_rows, self.last_tokens[0], host)
        return host

    def _inputs(self, segments: Sequence[Segment], num_tokens: int, num_pages: int, *, pending: bool) -> StepInputs:
        """Return inputs from the vectors copied last: ``num_tokens`` rows of requests with at most ``num_pages`` pages.

        ``pending``: some tokens may be placeholders for :attr:`last_tokens`.
        """
        count, size = len(segments), self._cache.page_size
        input_ids, position_ids, token_rows, row_lengths, places = self._tokens.views([num_tokens] * 5)
        states = self._cache.states
        sizes = (count, count + 1, count) if states is None else (count, count + 1, count, count, count)
        table_rows, starts, lengths, *slots = self._requests.views(sizes)
        kernels = _kernels(self.last_tokens.device)
        if kernels is not None:
            tokens, rest = (input_ids, token_rows, places), (size, num_pages, self.last_tokens)
            made = [kernels.step_inputs(tokens, table_rows, table, *rest) for table in self.page_tables]
            input_ids, groups = made[0][0], [(slots, pages) for _, slots, pages in made]
        else:
            if pending:
                input_ids = self._known(input_ids, token_rows)
            groups = [
                (
                    table[token_rows, places // size].to(torch.int64) * size + places % size,
                    table[:, :num_pages].index_select(0, table_rows),
                )
                for table in self.page_tables
            ]
        cache = StepCache(
            self._cache,
            segments,
            slots=groups[0][0],
            page_table=groups[0][1],
            lengths=lengths,
            starts=starts,
            row_lengths=row_lengths,
            windowed=groups[1:],
            states=None if states is None else StepStates(states, *slots),
        )
        return StepInputs(input_ids, position_ids, None, cache)

    def _known(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return ``ids`` [tokens] with placeholders replaced by :attr:`last_tokens`."""
        return torch.where(ids < 0, self.last_tokens[(PENDING - ids).clamp(min=0), rows], ids)

    def _update_page_tables(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Write all changes of the page tables, in one copy per cache group."""
        _update(self.page_tables[0], [(item.row, item.page_start, item.pages) for item in scheduled])
        for i, table in enumerate(self.page_tables[1:]):
            changes = ((item.row, item.windowed_pages[i]) for item in scheduled if item.windowed_pages)
            _update(table, [(row, pages[0], pages[1:]) for row, pages in changes])

    def _most_pages(self, scheduled: Sequence[ScheduledRequest]) -> int:
        return -(-max(item.position + len(item.tokens) for item in scheduled) // self._cache.page_size)


@functools.lru_cache(maxsize=64)
def _kernels(device: torch.device) -> Any:
    """Return :mod:`tapscope.kernels.triton.step_inputs` on a GPU that Triton supports; otherwise None."""
    if device.type != "cuda" or triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import step_inputs  # imports Triton

    return step_inputs


def _update(table: Tensor, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Write page numbers into a page table; each of ``changes`` is (row, first entry, page numbers)."""
    pages = [page for _, _, numbers in changes for page in numbers]
    if not pages:
        return
    width = table.shape[1]
    places = [row * width + start + i for row, start, numbers in changes for i in range(len(numbers))]
    changed = to_device([places, pages], table.device)
    table.view(-1).index_copy_(0, changed[0], changed[1].to(torch.int32))


def _positions(scheduled: Sequence[ScheduledRequest], places: np.ndarray) -> np.ndarray:
    """Return the position of each row in its request: its place in the request's pages, except for rows of a tree."""
    if not any(item.tree for item in scheduled):
        return places
    return np.concatenate([np.asarray(item.row_positions) for item in scheduled])
