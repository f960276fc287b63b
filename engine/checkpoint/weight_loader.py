"""Weights: which piece of which checkpoint tensor goes into which parameter, and loading them all."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.quantization import Online, as_fp8
from tapscope.engine.distributed.heartbeat import Pulse

_THREADS = 4
_CHUNK_ELEMENTS = 8 << 20  # of one read: 32 MiB in fp32
_DERIVED = "rotary_emb.inv_freq"  # old Llama checkpoints store it; it follows from config.json


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, start + into.shape[dim]) along ``dim`` of checkpoint tensor ``name`` fill ``into``."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    into: Tensor
    """A parameter, or a view of one where several tensors are fused."""
    dim: int = 0
    start: int = 0
    index: int | None = None
    """Which matrix of a stacked checkpoint tensor; ``dim`` is then an axis of that matrix."""

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns."""
        return self.into.ndim == 2

    def chunks(self) -> "Iterator[Piece]":
        """The same in stretches of rows of at most a few MiB, so that what is under way is bounded."""
        rows = max(1, _CHUNK_ELEMENTS // max(1, self.into[:1].numel()))
        if self.dim != 0 or len(self.into) <= rows:
            yield self
            return
        for first in range(0, len(self.into), rows):
            yield replace(self, into=self.into[first : first + rows], start=self.start + first)


class Weighted(nn.Module):
    """A module that has parameters and knows what they are called in a Hugging Face checkpoint."""

    may_quantize: ClassVar[bool] = False
    """Whether its matrices are among those that a quantised engine quantises."""

    def pieces(self, path: str) -> Iterator[Piece]:
        """What fills this module's parameters when it is known as ``path`` in the model."""
        raise NotImplementedError

    def layouts(self, path: str) -> Iterator[list[Piece]]:
        """The ways a checkpoint may store this module, the usual one first."""
        yield list(self.pieces(path))


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An unfilled weight; the engine never trains."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def load_weights(
    model: nn.Module,
    folder: Path,
    tied: dict[str, str],
    skipped: tuple[str, ...] = (),
    *,
    partial: bool = False,
    online: Online | None = None,
    pulse: Pulse | None = None,
) -> None:
    """Fill every parameter of ``model`` from ``folder``, reading only this rank's slices.

    ``tied`` maps a tensor that may be absent to the one it shares its parameter with; where the checkpoint has
    both they must be equal. Tensors whose names begin with one of ``skipped`` are left alone. With ``partial`` what
    the checkpoint lacks keeps its values; with ``online`` linear layers are rounded to fp8 on the way. Several threads
    read, a few MiB each at a time, each a beat of ``pulse``. Raises CheckpointError for missing, unexpected, misshaped
    or unreadable tensors, and ConfigError when ``online`` does not fit the checkpoint.
    """
    with open_checkpoint(folder) as checkpoint:
        pieces = _checked_pieces(model, checkpoint, tied, skipped, partial=partial)
        quantized = _quantized(model, checkpoint, online) if online is not None else frozenset()
        chunks = [chunk for piece in pieces for chunk in piece.chunks()]
        _fill(checkpoint, chunks, quantized, pulse or Pulse())
        _check_tied(checkpoint, pieces, tied)
        checkpoint.check_unchanged()


def usual_pieces(model: nn.Module) -> Iterator[Piece]:
    """Every piece of ``model`` in the layout that checkpoints usually have."""
    for path, module in model.named_modules():
        if isinstance(module, Weighted):
            yield from next(iter(module.layouts(path)))


def check_weights(
    model: nn.Module, folder: Path, tied: dict[str, str], skipped: tuple[str, ...] = (), *, partial: bool = False
) -> None:
    """Raise what :func:`load_weights` would raise of ``folder``'s headers, and change nothing."""
    with open_checkpoint(folder) as checkpoint:
        pieces = _checked_pieces(model, checkpoint, tied, skipped, partial=partial)
        for piece in pieces:
            checkpoint.read(piece.name, piece.shape, piece.dim, 0, 0, piece.index)
        _check_tied(checkpoint, pieces, tied)


def _fill(checkpoint: Checkpoint, pieces: list[Piece], quantized: frozenset[str], pulse: Pulse) -> None:
    """Read pieces into their parameters, those of one file and name together."""
    ordered = sorted(pieces, key=lambda piece: (checkpoint.file_of(piece.name), piece.name, piece.start))

    def read(piece: Piece) -> None:
        with torch.no_grad():  # of this thread
            piece.into.copy_(_read(checkpoint, piece, is_quantized=piece.name in quantized))

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "tapscope-load") as pool:
        running = [pool.submit(read, piece) for piece in ordered]
        try:
            for future in pulse.over(running):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read(checkpoint: Checkpoint, piece: Piece, *, is_quantized: bool) -> Tensor:
    count = piece.into.shape[piece.dim]
    if not is_quantized or not piece.is_matrix:
        return checkpoint.read(piece.name, piece.shape, piece.dim, piece.start, count, piece.index)
    if piece.dim == 0:
        return as_fp8(checkpoint.read(piece.name, piece.shape, 0, piece.start, count, piece.index))
    rows = piece.shape[-2]  # an output channel has one scale, whatever this rank has of it
    whole = as_fp8(checkpoint.read(piece.name, piece.shape, 0, 0, rows, piece.index))
    return whole[:, piece.start : piece.start + count]


def _quantized(model: nn.Module, checkpoint: Checkpoint, online: Online) -> frozenset[str]:
    """Names of the tensors that are rounded to fp8 while they are read; raises ConfigError."""
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.method
        raise ConfigError(f"quantization='fp8': {checkpoint.folder} is quantised already ({method}); leave it out")
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, Weighted) and m.may_quantize]
    names = {piece.name for path, m in linears for layout in m.layouts(path) for piece in layout if piece.is_matrix}
    names &= set(checkpoint.names)
    if unmatched := online.unmatched(names):
        raise ConfigError(f"exclude_modules: no linear layer matches {unmatched[0]!r}; one is {min(names)}")
    return frozenset(name for name in names if online.covers(name))


def _checked_pieces(
    model: nn.Module, checkpoint: Checkpoint, tied: dict[str, str], skipped: tuple[str, ...], *, partial: bool
) -> list[Piece]:
    """The pieces to read, after every name of the checkpoint was accounted for."""
    pieces = _stored_pieces(model, checkpoint)
    _check_names({piece.name for piece in pieces}, checkpoint, tied, skipped, partial=partial)
    held = set(checkpoint.names)
    return [piece for piece in pieces if piece.name in held]


def _check_tied(checkpoint: Checkpoint, pieces: list[Piece], tied: dict[str, str]) -> None:
    shapes = {piece.name: piece.shape for piece in pieces}
    for name, source in tied.items():
        if name in checkpoint.names and source in checkpoint.names:
            _check_equal(checkpoint, name, source, shapes[source])
        elif name in checkpoint.names:
            raise CheckpointError(f"{checkpoint.file_of(name)}: {name} comes without {source}, which it is tied to")


def _stored_pieces(model: nn.Module, checkpoint: Checkpoint) -> list[Piece]:
    """Each module's pieces in the layout that the checkpoint holds most of."""
    names = set(checkpoint.names)
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, Weighted)]
    chosen = (max(module.layouts(path), key=lambda layout: _num_held(layout, names)) for path, module in modules)
    return [piece for layout in chosen for piece in layout]


def _num_held(layout: list[Piece], names: set[str]) -> int:
    return sum(piece.name in names for piece in layout)


def _check_names(
    wanted: set[str], checkpoint: Checkpoint, tied: dict[str, str], skipped: tuple[str, ...], *, partial: bool
) -> None:
    found = {name for name in checkpoint.names if not name.startswith(skipped)}
    missing = sorted(wanted - found)
    if missing and not partial:
        raise CheckpointError(f"{checkpoint.folder}: {_listed(missing)} missing from the checkpoint")
    unexpected = sorted(name for name in found - wanted - set(tied) if not name.endswith(_DERIVED))
    if unexpected:
        file = checkpoint.file_of(unexpected[0])
        raise CheckpointError(f"{file}: {_listed(unexpected)} unexpected: config.json describes a model without")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) > 3:
        return f"{shown} and {len(names) - 3} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _check_equal(checkpoint: Checkpoint, name: str, source: str, shape: tuple[int, ...]) -> None:
    whole = [checkpoint.read(tensor, shape, 0, 0, shape[0]) for tensor in (name, source)]
    if not torch.equal(*whole):
        raise CheckpointError(
            f"{checkpoint.file_of(name)}: {name} differs from {source}, but config.json says tie_word_embeddings; "
            "remove one of the two or set tie_word_embeddings to false"
        )
