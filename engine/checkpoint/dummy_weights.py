"""Dummy weights: random ones that follow from their names, for trying a model's shape without its checkpoint."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import Piece

_STD = 0.02
_ROWS = 1024  # rows drawn at a time


def fill_with_dummies(pieces: Iterable[Piece]) -> None:
    """Normal matrices and biases of standard deviation 0.02, norms of ones; the same on any number of ranks."""
    with torch.no_grad():
        for piece in pieces:
            if piece.is_matrix:
                _fill_matrix(piece)
            elif piece.name.endswith(".weight"):
                piece.into.fill_(1.0)
            else:
                end = piece.start + len(piece.into)
                piece.into.copy_(_drawn(piece, 0, (piece.shape[-1],))[piece.start : end])


def _fill_matrix(piece: Piece) -> None:
    """Row block by row block: what lies in this rank's part of each."""
    rows, columns = piece.shape[-2:]
    first, last = (piece.start, piece.start + len(piece.into)) if piece.dim == 0 else (0, rows)
    across = slice(None) if piece.dim == 0 else slice(piece.start, piece.start + piece.into.shape[1])
    for block in range(first // _ROWS, -(-last // _ROWS)):
        begin, end = block * _ROWS, min((block + 1) * _ROWS, rows)
        drawn = _drawn(piece, block, (end - begin, columns))[max(first - begin, 0) : last - begin, across]
        at = max(begin, first) - first
        piece.into[at : at + len(drawn)].copy_(drawn)


def _drawn(piece: Piece, block: int, shape: tuple[int, ...]) -> Tensor:
    seed = zlib.crc32(f"{piece.name} {piece.index} {block}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu") * _STD
