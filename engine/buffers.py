"""StepBuffers: the static tensors a plan is written into. Every step reads the same memory, whatever its shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tapscope.engine.cache import KVCache
from tapscope.engine.plan import Share, StepPlan
from tapscope.engine.step_cache import Segment, StepCache


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
    a plan brings only what changed. Host staging memory is reused, which is safe because a step's tokens are brought
    to the host, and with them everything before, ahead of the next step.
    """

    def __init__(self, cache: KVCache, max_tokens: int, max_rows: int, max_pages: int) -> None:
        self._cache = cache
        device = cache.device
        self.page_table = torch.full((max_rows, max_pages), cache.num_pages, dtype=torch.int32, device=device)
        self._tokens = _Field(4, max_tokens, torch.int64, device)
        self._logit_rows = _Field(1, max_tokens, torch.int64, device)
        self._requests = _Field(3, max_rows + 1, torch.int32, device)

    def load(self, plan: StepPlan) -> StepInputs:
        """Write ``plan`` into the buffers."""
        shares = plan.shares
        self._turn_pages(shares)
        counts = [len(share.tokens) for share in shares]
        num_tokens, most_pages = sum(counts), self._most_pages(shares)
        rows, positions = np.repeat([share.row for share in shares], counts), _positions(shares, counts)
        ids = [token for share in shares for token in share.tokens]
        counted = np.maximum(positions + 1, np.repeat([share.prompt_length for share in shares], counts))
        input_ids, position_ids, token_rows, row_lengths = self._tokens.load((ids, positions, rows, counted))
        starts = (0, *accumulate(counts))
        lengths = [share.position + count for share, count in zip(shares, counts, strict=True)]
        table_rows, device_starts, device_lengths = self._requests.load(([s.row for s in shares], starts, lengths))
        size = self._cache.page_size
        pages = self.page_table[token_rows, position_ids // size].to(torch.int64)
        table = self.page_table[:, :most_pages].index_select(0, table_rows)
        cache = StepCache(
            self._cache,
            [Segment(i, starts[i], counts[i], share.position) for i, share in enumerate(shares)],
            slots=pages * size + position_ids % size,
            page_table=table,
            lengths=device_lengths,
            starts=device_starts,
            row_lengths=row_lengths,
        )
        every = len(plan.logit_rows) == num_tokens
        keep = None if every else self._logit_rows.load((plan.logit_rows,))[0]
        return StepInputs(input_ids, position_ids, keep, cache)

    def _turn_pages(self, shares: Sequence[Share]) -> None:
        """Enter what changed into the page tables, in one go."""
        width, pages = self.page_table.shape[1], [page for share in shares for page in share.pages]
        if not pages:
            return
        places = [share.row * width + share.page_start + i for share in shares for i in range(len(share.pages))]
        changed = torch.tensor([places, pages]).to(self.page_table.device)
        self.page_table.view(-1).index_copy_(0, changed[0], changed[1].to(torch.int32))

    def _most_pages(self, shares: Sequence[Share]) -> int:
        return -(-max(share.position + len(share.tokens) for share in shares) // self._cache.page_size)


class _Field:
    """A few vectors of one dtype on the host (pinned for CUDA) and on the device, side by side: one copy a step."""

    def __init__(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(count * size, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self._array = self._host.numpy()

    def load(self, vectors: Sequence[Sequence[int] | np.ndarray]) -> list[Tensor]:
        """Copy the vectors to the device; views of their place there, the same in every step of these lengths."""
        ends = list(accumulate(len(vector) for vector in vectors))
        starts = [0, *ends[:-1]]
        for start, end, vector in zip(starts, ends, vectors, strict=True):
            self._array[start:end] = vector
        if self._device is not self._host:
            self._device[: ends[-1]].copy_(self._host[: ends[-1]], non_blocking=True)
        return [self._device[start:end] for start, end in zip(starts, ends, strict=True)]


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
