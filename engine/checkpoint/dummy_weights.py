"""Dummy weights: random weights seeded by name, to run a model architecture without a checkpoint."""

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import WeightSlice

_STD = 0.02
_ROWS = 1024  # rows per block, each drawn with its own seed


def fill_with_dummy_weights(weight_slices: Iterable[WeightSlice]) -> None:
    """Fill matrices and biases from N(0, 0.02²), norms and scales with ones; the full weights do not depend on tp.

    Uses all cores.
    """
    blocks = [(part, block) for part in weight_slices for block in _blocks(part)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for _ in pool.map(lambda args: _fill(*args), blocks):
            pass


def _blocks(part: WeightSlice) -> range:
    """Return the indices of the row blocks that overlap this rank's slice."""
    if not part.is_matrix:
        return range(1)
    first, last = _rows(part)
    return range(first // _ROWS, -(-last // _ROWS))


def _rows(part: WeightSlice) -> tuple[int, int]:
    return (part.start, part.start + len(part.into)) if part.dim == 0 else (0, part.shape[-2])


@torch.no_grad()
def _fill(part: WeightSlice, block: int) -> None:
    """Fill this rank's part of one row block."""
    if part.is_matrix:
        rows, columns = part.shape[-2:]
        first, last = _rows(part)
        across = slice(None) if part.dim == 0 else slice(part.start, part.start + part.into.shape[1])
        begin, end = block * _ROWS, min((block + 1) * _ROWS, rows)
        drawn = _drawn(part, block, (end - begin, columns))[max(first - begin, 0) : last - begin, across]
        at = max(begin, first) - first
        part.into[at : at + len(drawn)].copy_(drawn)
    elif part.name.endswith((".weight", "scale", "scalar")):
        part.into.fill_(1.0)
    else:
        drawn = _drawn(part, 0, part.shape if part.index is None else part.shape[1:])
        part.into.copy_(drawn.narrow(part.dim, part.start, part.into.shape[part.dim]))


def _drawn(part: WeightSlice, block: int, shape: tuple[int, ...]) -> Tensor:
    seed = zlib.crc32(f"{part.name} {part.index} {block}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu") * _STD
