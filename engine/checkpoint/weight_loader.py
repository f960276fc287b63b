"""Weight loading: map checkpoint tensors to parameters and read this rank's slices."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tapscope.engine.checkpoint.quantization import INT4, KINDS, OnlineQuantizer, block_spans, quantize_to_fp8
from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.distributed.heartbeat import Heartbeat
from tapscope.tensor_files.int4 import INT4_ZERO_POINT

_THREADS = 4
_CHUNK_ELEMENTS = 8 << 20  # elements per read: 32 MiB in fp32
_DERIVED = "rotary_emb.inv_freq"  # ignored: stored by old Llama checkpoints, but computed from config.json here


class Scales(NamedTuple):
    """Scales (and zero points) of a quantized weight or a part of it."""

    values: Tensor
    """Scales, [scale rows, groups]."""
    zeros: Tensor | None = None
    """Zero points of a 4-bit weight, [scale rows, groups]; None: all are 8."""

    def rows(self, part: slice) -> "Scales":
        """Return views of a range of scale rows."""
        return Scales(self.values[part], None if self.zeros is None else self.zeros[part])


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Mapping of the slice [start, start + into.shape[dim]) along ``dim`` of checkpoint tensor ``name`` to ``into``."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    into: Tensor
    """Destination: a parameter, or a view into a parameter that fuses several tensors."""
    dim: int = 0
    start: int = 0
    index: int | None = None
    """Index of the matrix in a stacked checkpoint tensor; ``dim`` is then an axis of that matrix."""
    scales: Scales | None = None
    """Destination of the scales, if ``into`` holds the codes of a quantized weight."""

    @property
    def extent(self) -> tuple[int, ...]:
        """Number of tensor elements in the slice along each axis: ``into`` may hold two 4-bit codes per byte."""
        shape = tuple(self.into.shape)
        return (*shape[:-1], 2 * shape[-1]) if self.scales is not None and self.into.dtype == INT4 else shape

    @property
    def is_matrix(self) -> bool:
        """Whether the destination is two-dimensional."""
        return self.into.ndim == 2

    def chunks(self) -> "Iterator[WeightSlice]":
        """Yield this slice in blocks of rows of at most a few MiB, which bounds the memory of reads in flight."""
        rows = max(1, _CHUNK_ELEMENTS // max(1, self.into[:1].numel()))
        if self.dim != 0 or len(self.into) <= rows:
            yield self
            return
        has_row_scales = self.scales is not None and len(self.scales.values) == len(self.into)
        for first in range(0, len(self.into), rows):
            part = slice(first, first + rows)
            scales = self.scales.rows(part) if has_row_scales and self.scales is not None else self.scales
            yield replace(self, into=self.into[part], start=self.start + first, scales=scales)


class CheckpointModule(nn.Module):
    """A module that maps its parameters to tensors of a Hugging Face checkpoint."""

    may_quantize: ClassVar[bool] = False
    """Whether ``quantization="fp8"`` applies to its matrices."""

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the checkpoint slices of this module's parameters; ``path`` is the module's path in the model."""
        raise NotImplementedError

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layouts in which checkpoints store this module, the most common first."""
        yield list(self.weight_slices(path))


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Create an uninitialized parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


_DEFERRED: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferred_linear_weights() -> Iterator[None]:
    """Context manager: linear layers created inside get weights on the meta device.

    They are allocated later, when it is known which layers stay quantized.
    """
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


def linear_weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Create an uninitialized weight; on the meta device within :func:`deferred_linear_weights`."""
    if _DEFERRED.get():
        return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)
    return parameter(*shape, dtype=dtype)


def load_weights(
    model: nn.Module,
    folder: WeightSource,
    tied: dict[str, str],
    skipped: tuple[str, ...] = (),
    *,
    partial: bool = False,
    quantizer: OnlineQuantizer | None = None,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Fill every parameter of ``model`` from ``folder``, reading only this rank's slices.

    ``tied`` maps a tensor that may be absent to the tensor that it is tied to; if the checkpoint has both, they must be
    equal. Tensors whose names start with one of ``skipped`` are ignored. With ``partial``, parameters that are not in
    the checkpoint keep their values; with ``quantizer``, linear layers are quantized to FP8. Several threads read a few
    MiB at a time, and each read advances ``heartbeat``. Raises CheckpointError for missing, unexpected, misshaped or
    unreadable tensors, and ConfigError if ``quantizer`` does not match the checkpoint.
    """
    with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
        weight_slices = _checked_slices(model, checkpoint, tied, skipped, partial=partial)
        quantized = _quantized(model, checkpoint, quantizer, partial=partial)
        _fill_scales(checkpoint, [part for part in weight_slices if part.name not in quantized])
        chunks = [chunk for part in weight_slices for chunk in part.chunks()]
        _fill(checkpoint, chunks, quantized, heartbeat or Heartbeat())
        _check_tied(checkpoint, weight_slices, tied)
        checkpoint.check_unchanged()


def default_weight_slices(model: nn.Module) -> Iterator[WeightSlice]:
    """Yield every slice of ``model`` in the most common checkpoint layout."""
    for path, module in model.named_modules():
        if isinstance(module, CheckpointModule):
            yield from next(iter(module.layouts(path)))


def check_weights(
    model: nn.Module,
    folder: WeightSource,
    tied: dict[str, str],
    skipped: tuple[str, ...] = (),
    *,
    partial: bool = False,
    quantizer: OnlineQuantizer | None = None,
) -> None:
    """Check the headers of ``folder`` like :func:`load_weights`, without changing ``model``; raises the same errors."""
    with open_checkpoint(folder, getattr(model, "checkpoint_prefixes", {})) as checkpoint:
        weight_slices = _checked_slices(model, checkpoint, tied, skipped, partial=partial)
        quantized = _quantized(model, checkpoint, quantizer, partial=partial)
        for part in weight_slices:
            if part.name not in quantized:
                _check_stored_as_held(checkpoint, part)
                _zeros(checkpoint, part)
            checkpoint.read(part.name, part.shape, part.dim, 0, 0, part.index)
        _check_tied(checkpoint, weight_slices, tied)


def _fill(
    checkpoint: Checkpoint, weight_slices: list[WeightSlice], quantized: frozenset[str], heartbeat: Heartbeat
) -> None:
    """Read all slices with several threads, in order of file and tensor."""
    ordered = sorted(weight_slices, key=lambda part: (checkpoint.file_of(part.name), part.name, part.start))

    def read(part: WeightSlice) -> None:
        with torch.no_grad():  # grad mode is per thread
            part.into.copy_(_read(checkpoint, part, is_quantized=part.name in quantized))

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "tapscope-load") as pool:
        running = [pool.submit(read, part) for part in ordered]
        try:
            for future in heartbeat.track(running):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fill_scales(checkpoint: Checkpoint, weight_slices: list[WeightSlice]) -> None:
    """Read the scales of weights that stay quantized; raises CheckpointError if the model's format differs."""
    for part in weight_slices:
        if part.scales is not None:
            _check_stored_as_held(checkpoint, part)
            part.scales.values.copy_(_scales(checkpoint, part))
            if (zeros := _zeros(checkpoint, part)) is not None and part.scales.zeros is not None:
                part.scales.zeros.copy_(zeros)


def _scales(checkpoint: Checkpoint, part: WeightSlice) -> Tensor:
    """Read the scales of a slice; raises CheckpointError unless shape and dtype equal those of ``part.scales``."""
    scales, block = checkpoint.scales(part.name, part.shape, part.index)
    own_scales = scales[_spans(part, block)]
    if part.scales is not None and (own_scales.shape, own_scales.dtype) != (
        part.scales.values.shape,
        part.scales.values.dtype,
    ):
        raise CheckpointError(
            f"{part.name} in {checkpoint.file_of(part.name)} has scales for blocks of {list(block)} in "
            f"{str(own_scales.dtype).removeprefix('torch.')}, unlike the model: "
            "start the engine with this checkpoint, or with quantized_layers='dequantize'"
        )
    return own_scales


def _zeros(checkpoint: Checkpoint, part: WeightSlice) -> Tensor | None:
    """Read the zero points of a slice, in the shape of its scales; None if the weight is not 4-bit.

    Raises CheckpointError if the model has no zero points but the checkpoint does.
    """
    if part.scales is None or part.into.dtype != INT4:
        return None
    zeros = checkpoint.zeros(part.name, part.shape[0])
    if zeros is None:
        return torch.full(part.scales.values.shape, INT4_ZERO_POINT, dtype=torch.uint8)
    if part.scales.zeros is None or checkpoint.feature_groups(part.name, part.shape[1]) is not None:
        raise CheckpointError(
            f"{part.name} in {checkpoint.file_of(part.name)} has zero points, unlike the model: start the engine with "
            "this checkpoint, or with quantized_layers='dequantize'"
        )
    return zeros[_spans(part, checkpoint.scales(part.name, part.shape)[1])]


def _spans(part: WeightSlice, block: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns of the scales that cover a slice."""
    return block_spans((0, part.start) if part.dim else (part.start, 0), part.extent, block)


def _check_stored_as_held(checkpoint: Checkpoint, part: WeightSlice) -> None:
    """Raise CheckpointError if the model holds ``part`` quantized, but the checkpoint stores it in another format."""
    if part.scales is None:
        return
    kind, held = checkpoint.kind(part.name), KINDS[part.into.dtype]
    if kind != held:
        raise CheckpointError(
            f"{part.name} in {checkpoint.file_of(part.name)} has dtype {kind}, the model holds it in {held}: "
            "start the engine with this checkpoint, or with quantized_layers='dequantize'"
        )
    _scales(checkpoint, part)


def _read(checkpoint: Checkpoint, part: WeightSlice, *, is_quantized: bool) -> Tensor:
    count = part.extent[part.dim]
    if not is_quantized or not part.is_matrix:
        is_raw = part.scales is not None or part.into.dtype == torch.uint8
        return checkpoint.read(part.name, part.shape, part.dim, part.start, count, part.index, is_raw=is_raw)
    rows = part.shape[-2]  # the scale of an output channel depends on all its columns
    first, count_rows = (part.start, count) if part.dim == 0 else (0, rows)
    codes, scales = quantize_to_fp8(checkpoint.read(part.name, part.shape, 0, first, count_rows, part.index))
    if part.dim == 1:
        codes = codes[:, part.start : part.start + count]
    if part.scales is None:
        return codes.float() * scales
    part.scales.values.copy_(scales)
    return codes


def _quantized(
    model: nn.Module, checkpoint: Checkpoint, quantizer: OnlineQuantizer | None, *, partial: bool
) -> frozenset[str]:
    """Return the names of the tensors to quantize to FP8 while they are read; raises ConfigError.

    With ``partial``, modules that ``quantizer`` excludes may be missing from the checkpoint.
    """
    if quantizer is None:
        return frozenset()
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.method
        raise ConfigError(f"quantization='fp8': {checkpoint.folder} is already quantized ({method}); omit the setting")
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, CheckpointModule) and m.may_quantize]
    names = {part.name for path, m in linears for layout in m.layouts(path) for part in layout if part.is_matrix}
    names &= set(checkpoint.names)
    if not partial and (unmatched := quantizer.unmatched(names)):
        raise ConfigError(f"exclude_modules: no linear layer matches {unmatched[0]!r}; an example is {min(names)}")
    return frozenset(name for name in names if quantizer.covers(name))


def _checked_slices(
    model: nn.Module, checkpoint: Checkpoint, tied: dict[str, str], skipped: tuple[str, ...], *, partial: bool
) -> list[WeightSlice]:
    """Return the slices to read; raises CheckpointError for missing or unexpected names."""
    weight_slices = stored_slices(model, set(checkpoint.names))
    _check_names({part.name for part in weight_slices}, checkpoint, tied, skipped, partial=partial)
    held = set(checkpoint.names)
    return [part for part in weight_slices if part.name in held]


def _check_tied(checkpoint: Checkpoint, weight_slices: list[WeightSlice], tied: dict[str, str]) -> None:
    shapes = {part.name: part.shape for part in weight_slices}
    for name, source in tied.items():
        if name in checkpoint.names and source in checkpoint.names:
            _check_equal(checkpoint, name, source, shapes[source])
        elif name in checkpoint.names:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: {name} is present without {source}, which it is tied to"
            )


def stored_slices(model: nn.Module, names: set[str] | None) -> list[WeightSlice]:
    """Return each module's slices in the layout that contains most of ``names``; None: the most common layout."""
    if names is None:
        return list(default_weight_slices(model))
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, CheckpointModule)]
    chosen = (max(module.layouts(path), key=lambda layout: _num_held(layout, names)) for path, module in modules)
    return [part for layout in chosen for part in layout]


def _num_held(layout: list[WeightSlice], names: set[str]) -> int:
    return sum(part.name in names for part in layout)


def _check_names(
    wanted: set[str], checkpoint: Checkpoint, tied: dict[str, str], skipped: tuple[str, ...], *, partial: bool
) -> None:
    names = {name for name in checkpoint.names if not name.startswith(skipped)}
    missing = sorted(wanted - names - set(tied))
    if missing and not partial:
        raise CheckpointError(f"{checkpoint.folder}: {_listed(missing)} missing from the checkpoint")
    unexpected = sorted(name for name in names - wanted - set(tied) if not name.endswith(_DERIVED))
    unexpected = [name for name in unexpected if not checkpoint.is_empty_bias(name)]
    if unexpected:
        file = checkpoint.file_of(unexpected[0])
        raise CheckpointError(f"{file}: {_listed(unexpected)} unexpected: not part of the model in config.json")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) > 3:
        return f"{shown} and {len(names) - 3} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _check_equal(checkpoint: Checkpoint, name: str, source: str, shape: tuple[int, ...]) -> None:
    whole = [checkpoint.read(tensor, shape, 0, 0, shape[0]) for tensor in (name, source)]
    if not torch.equal(*whole):
        raise CheckpointError(
            f"{checkpoint.file_of(name)}: {name} differs from {source}, but config.json makes them one tensor; "
            "remove one of the two, or set tie_word_embeddings to false if it is the output head"
        )
