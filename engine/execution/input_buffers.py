"""StepBuffers: the static tensors a plan is written into. Every step reads the same memory, whatever its shape."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.step_cache import Segment, StepCache
from tapscope.engine.requests.step_plan import PENDING, Share, StepPlan

cuda: Any = torch.cuda  # parts of it have no type hints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with: views of static buffers, valid until the next plan is loaded."""

    input_ids: Tensor
    """[tokens] int64."""
    position_ids: Tensor
    """[tokens] int64."""
    logits_to_keep: Tensor | None
    """[logit rows] int64; None for all rows."""
    cache: StepCache


class StepBuffers:
    """Inputs of every step on the device of ``cache``, and the page tables of all running requests.

    ``max_rows`` bounds the requests, ``max_pages`` the pages of one of them. A page table is kept from step to step:
    a plan brings only what changed.
    """

    def __init__(self, cache: KVCache, max_tokens: int, max_rows: int, max_pages: int) -> None:
        self._cache = cache
        device = cache.device
        shape = max_rows + 1, max_pages  # the last row is that of padding: no page but the dummy
        self.page_table = torch.full(shape, cache.num_pages, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._token_rows = self._last_tokens
        self._padding = Share(
            request="", row=max_rows, position=0, visits=((1, 0),), tokens=(0,), pages=(), prompt_length=1
        )
        self._tokens = _Field(4, max(max_tokens, max_rows), torch.int64, device)
        self._logit_rows = _Field(1, max_tokens, torch.int64, device)
        self._requests = _Field(3, max_rows + 1, torch.int32, device)

    def load(self, plan: StepPlan, num_rows: int | None = None) -> StepInputs:
        """Write ``plan`` into the buffers.

        With ``num_rows``, a step of single rows is padded to as many. A padding row is token 0 at position 0 of a
        request whose only page is the dummy, so it writes nowhere else; it has no logits.
        """
        shares = self.fill(plan, num_rows)
        counts = [len(share.tokens) for share in shares]
        starts = (0, *accumulate(counts))
        segments = [Segment(i, starts[i], counts[i], share.position) for i, share in enumerate(shares)]
        inputs = self._inputs(segments, starts[-1], self._most_pages(shares), pending=plan.has_pending)
        if len(plan.logit_rows) == starts[-1]:
            return inputs
        return replace(inputs, logits_to_keep=self._logit_rows.load((plan.logit_rows,))[0])

    def fill(self, plan: StepPlan, num_rows: int | None = None) -> tuple[Share, ...]:
        """Copy the vectors of ``plan`` to the device, padded as :meth:`load` does; returns its shares and padding."""
        shares = plan.shares
        self._turn_pages(shares)
        if num_rows is not None:
            shares += (self._padding,) * (num_rows - len(shares))
        counts = [len(share.tokens) for share in shares]
        rows, positions = np.repeat([share.row for share in shares], counts), _positions(shares, counts)
        ids = [token for share in shares for token in share.tokens]
        counted = np.maximum(positions + 1, np.repeat([share.prompt_length for share in shares], counts))
        lengths = [share.position + count for share, count in zip(shares, counts, strict=True)]
        self._token_rows = self._tokens.load((ids, positions, rows, counted))[2]
        self._requests.load(([share.row for share in shares], (0, *accumulate(counts)), lengths))
        return shares

    def single_rows(self, num_rows: int) -> StepInputs:
        """The inputs of a step of ``num_rows`` single rows: functions of static memory, for a graph to be captured.

        What :meth:`fill` is given ``num_rows`` for is what they hold. The host's numbers are not those of any step:
        every request counts as long as it may become.
        """
        width = self.page_table.shape[1]
        longest = width * self._cache.page_size
        segments = [Segment(i, i, 1, longest - 1) for i in range(num_rows)]
        return self._inputs(segments, num_rows, width, pending=True)

    def keep_tokens(self, tokens: Tensor) -> None:
        """Note the tokens that the requests of the step loaded last go on with: [requests] of single rows."""
        self._last_tokens.index_copy_(0, self._token_rows[: len(tokens)], tokens)

    def _inputs(self, segments: Sequence[Segment], num_tokens: int, num_pages: int, *, pending: bool) -> StepInputs:
        """Of the vectors that were copied last: ``num_tokens`` rows of requests of at most ``num_pages`` pages.

        ``pending``: some tokens may be what :meth:`keep_tokens` noted.
        """
        count, size = len(segments), self._cache.page_size
        input_ids, position_ids, token_rows, row_lengths = self._tokens.views([num_tokens] * 4)
        table_rows, starts, lengths = self._requests.views((count, count + 1, count))
        if pending:
            input_ids = torch.where(input_ids == PENDING, self._last_tokens[token_rows], input_ids)
        pages = self.page_table[token_rows, position_ids // size].to(torch.int64)
        cache = StepCache(
            self._cache,
            segments,
            slots=pages * size + position_ids % size,
            page_table=self.page_table[:, :num_pages].index_select(0, table_rows),
            lengths=lengths,
            starts=starts,
            row_lengths=row_lengths,
        )
        return StepInputs(input_ids, position_ids, None, cache)

    def _turn_pages(self, shares: Sequence[Share]) -> None:
        """Enter what changed into the page tables, in one go."""
        width, pages = self.page_table.shape[1], [page for share in shares for page in share.pages]
        if not pages:
            return
        places = [share.row * width + share.page_start + i for share in shares for i in range(len(share.pages))]
        changed = torch.tensor([places, pages], pin_memory=self.page_table.is_cuda)
        changed = changed.to(self.page_table.device, non_blocking=True)
        self.page_table.view(-1).index_copy_(0, changed[0], changed[1].to(torch.int32))

    def _most_pages(self, shares: Sequence[Share]) -> int:
        return -(-max(share.position + len(share.tokens) for share in shares) // self._cache.page_size)


class _Field:
    """A few vectors of one dtype on the host and on the device, side by side: one copy a step.

    On CUDA the host has two pinned copies, used in turn, so that one step may be loaded while the one before has not
    been copied yet.
    """

    def __init__(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(count * size, dtype=dtype, pin_memory=is_cuda) for _ in range(1 + is_cuda)]
        self._copied = [cuda.Event() for _ in self._hosts] if is_cuda else []
        self._device = self._hosts[0].to(device)
        self._turn = 0

    def load(self, vectors: Sequence[Sequence[int] | np.ndarray]) -> list[Tensor]:
        """Copy the vectors to the device; their :meth:`views`."""
        sizes = [len(vector) for vector in vectors]
        ends = list(accumulate(sizes))
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn]
        if self._copied:
            self._copied[self._turn].synchronize()
        array = host.numpy()
        for end, size, vector in zip(ends, sizes, vectors, strict=True):
            array[end - size : end] = vector
        if self._copied:
            self._device[: ends[-1]].copy_(host[: ends[-1]], non_blocking=True)
            self._copied[self._turn].record()
        return self.views(sizes)

    def views(self, sizes: Sequence[int]) -> list[Tensor]:
        """Where vectors of these lengths lie on the device, the same in every step."""
        return list(torch.split(self._device[: sum(sizes)], list(sizes)))


def _positions(shares: Sequence[Share], counts: Sequence[int]) -> np.ndarray:
    spans = [np.arange(share.position, share.position + count) for share, count in zip(shares, counts, strict=True)]
    return np.concatenate(spans)


def keep_freed_memory() -> None:
    """Let glibc's allocator keep what a step frees for the next one.

    It gives blocks back to the system that are as large as the largest one freed so far, up to 32 MiB, and pages fresh
    from the system cost a step of a long prompt up to a tenth of its time. So free one of that size, once. Where
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ says otherwise, this changes nothing, nor with other allocators.
    """
    torch.empty((32 << 20) - (1 << 13), dtype=torch.uint8)  # untouched: it takes no memory
