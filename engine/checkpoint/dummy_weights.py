"""Dummy weights: random weights seeded by their names, to run a model's shape without its checkpoint."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import WeightSlice

_STD = 0.02
_ROWS = 1024  # rows drawn at a time


def fill_with_dummy_weights(weight_slices: Iterable[WeightSlice]) -> None:
    """Fill matrices and biases from N(0, 0.02) and norms with ones; the values do not depend on the number of ranks."""
    with torch.no_grad():
        for part in weight_slices:
            if part.is_matrix:
                _fill_matrix(part)
            elif part.name.endswith(".weight"):
                part.into.fill_(1.0)
            else:
                end = part.start + len(part.into)
                part.into.copy_(_drawn(part, 0, (part.shape[-1],))[part.start : end])


def _fill_matrix(part: WeightSlice) -> None:
    """Fill this rank's part of a matrix, one block of rows at a time."""
    rows, columns = part.shape[-2:]
    first, last = (part.start, part.start + len(part.into)) if part.dim == 0 else (0, rows)
    across = slice(None) if part.dim == 0 else slice(part.start, part.start + part.into.shape[1])
    for block in range(first // _ROWS, -(-last // _ROWS)):
        begin, end = block * _ROWS, min((block + 1) * _ROWS, rows)
        drawn = _drawn(part, block, (end - begin, columns))[max(first - begin, 0) : last - begin, across]
        at = max(begin, first) - first
        part.into[at : at + len(drawn)].copy_(drawn)


def _drawn(part: WeightSlice, block: int, shape: tuple[int, ...]) -> Tensor:
    seed = zlib.crc32(f"{part.name} {part.index} {block}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu") * _STD
