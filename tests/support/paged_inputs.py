"""Page tables for the tests of paged attention."""

import torch


def pages_of(lengths, page_size, *shape, dtype, seed):
    """Return a pool with shuffled pages, a page table padded with invalid pages, and the lengths."""
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    pool = torch.randn(sum(counts) + 1, page_size, *shape, generator=noise).to(dtype)
    numbers = torch.randperm(sum(counts), generator=noise).int().split(counts)
    table = torch.full((len(lengths), max(1, *counts) + 1), 1 << 30, dtype=torch.int32)
    for row, pages in zip(table, numbers, strict=True):
        row[: len(pages)] = pages
    return pool, table, torch.tensor(lengths, dtype=torch.int32)
