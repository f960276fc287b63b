"""Checkpoint: read slices of a model's weights, which may be quantized."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint import mxfp4
from tapscope.engine.checkpoint.int4_weights import Int4Weights
from tapscope.engine.checkpoint.quantization import (
    CODES,
    INT4,
    KINDS,
    Quantization,
    block_of,
    check_scales,
    dequantize,
    is_cache_scale,
    is_quantization_metadata,
    scale_of,
)
from tapscope.engine.checkpoint.received_weights import WeightSource
from tapscope.engine.checkpoint.stored_tensors import StoredTensors, open_tensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = tuple(CODES.values())


class Checkpoint:
    """An open checkpoint, created by :func:`open_checkpoint` and valid within its ``with`` block."""

    def __init__(self, tensors: StoredTensors, quantization: Quantization | None = None) -> None:
        self.shape_source = "config.json requires"
        """Subject and verb of the error message for a tensor of the wrong shape."""
        self.quantization = quantization
        self._tensors = tensors
        self._int4: Int4Weights | None = None
        if quantization is not None and quantization.int4 is not None:
            self._int4 = Int4Weights(tensors, quantization.int4, quantization.groups)

    @property
    def folder(self) -> Path:
        """Directory of the checkpoint."""
        return self._tensors.folder

    @cached_property
    def names(self) -> list[str]:
        """Names of all weights, without scales, in the order of the index or file.

        A 4-bit weight is named ``PATH.weight``, whatever the names of its tensors.
        """
        if self.quantization is None:
            return [name for name in self._tensors if not is_cache_scale(name)]
        names = [name for name in self._tensors if not is_quantization_metadata(name, self._tensors)]
        return names if self._int4 is None else list(filter(None, map(self._int4.weight_of, names)))

    @property
    def stored_names(self) -> list[str]:
        """Names of all tensors, including scales, as stored."""
        return list(self._tensors)

    def file_of(self, name: str) -> str:
        """Return the path of the file that contains ``name``, for messages."""
        int4 = self._int4_of(name)
        return self._tensors.file_of(name if int4 is None else int4.codes_of(name))

    def is_empty_bias(self, name: str) -> bool:
        """Return whether ``name`` is an all-zero bias of a 4-bit weight; GPTQ stores one for layers without a bias."""
        is_bias = name.endswith(".bias") and self._int4_of(f"{name.removesuffix('.bias')}.weight") is not None
        return is_bias and not self._tensors.get_tensor(name).any()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        start: int,
        count: int,
        index: int | None = None,
        *,
        is_raw: bool = False,
    ) -> Tensor:
        """Read the slice [start, start + count) along ``dim`` of tensor ``name``, whose full shape must be ``shape``.

        With ``index`` the tensor is a stack of matrices, and ``dim`` is an axis of matrix ``index``. Quantized weights
        are dequantized to fp32 unless ``is_raw``. The CheckpointError names the tensor and the file.
        """
        if (int4 := self._int4_of(name)) is not None:
            return int4.read(name, shape, dim, start, count, is_raw=is_raw)
        stored, where = self._tensors.get_slice(name), self._tensors.where(name)
        stored_shape, kind = tuple(stored.get_shape()), stored.get_dtype()
        if stored_shape != shape:
            raise CheckpointError(f"{where} has shape {list(stored_shape)}; {self.shape_source} {list(shape)}")
        if kind == "U8" and self.quantization is not None and self.quantization.method == "mxfp4":
            if is_raw or not name.endswith(mxfp4.BLOCKS):
                return self._tensors.part(name, dim, start, count, index)
            return self._read_mxfp4(name, dim, start, count, index)
        if kind not in _FLOATS and (kind not in _CODES or self.quantization is None):
            known = _FLOATS if self.quantization is None else (*_FLOATS, *_CODES)
            raise CheckpointError(f"{where} has dtype {kind}; supported: {', '.join(known)}")
        if kind in _FLOATS and self.quantization is not None and (scale := scale_of(name, self._tensors)) is not None:
            raise CheckpointError(f"{where} has dtype {kind} and scales, {scale}; expected one of {', '.join(_CODES)}")
        piece = self._tensors.part(name, dim, start, count, index)
        if kind not in _CODES or is_raw:
            return piece
        scales, block = self.scales(name, shape, index)
        return dequantize(piece, scales, block, (start, 0) if dim == 0 else (0, start))

    def integers(self, name: str) -> Tensor:
        """Read the whole tensor ``name`` as int64; raises CheckpointError if its dtype is floating point."""
        tensor = self._tensors.get_tensor(name)
        if tensor.is_floating_point():
            raise CheckpointError(f"{self._tensors.where(name)} has dtype {_dtype(tensor)}; expected integers")
        return tensor.to(torch.int64)

    @cached_property
    def cache_scales(self) -> list[str]:
        """Names of the tensors with scales of an FP8 KV cache."""
        return [name for name in self._tensors if is_cache_scale(name)]

    def number(self, name: str) -> float:
        """Read the one-element float tensor ``name``; raises CheckpointError for any other shape or dtype."""
        tensor = self._tensors.get_tensor(name)
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            shape = f"{_dtype(tensor)} of shape {list(tensor.shape)}"
            raise CheckpointError(f"{self._tensors.where(name)} is {shape}; it must be one float")
        return float(tensor)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since it was opened, as old and new weights may then be mixed."""
        self._tensors.check_unchanged()

    def kind(self, name: str) -> str:
        """Return the safetensors dtype of tensor ``name``, ``I4`` for 4-bit weights; raises CheckpointError."""
        return KINDS[INT4] if self._int4_of(name) is not None else str(self._tensors.get_slice(name).get_dtype())

    def scales(self, name: str, shape: tuple[int, ...], index: int | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Read the scales of the quantized weight ``name`` of ``shape``; return ([blocks, blocks], block shape).

        Scales are fp32, except for 4-bit weights, whose scales keep the stored dtype. ``index`` selects a matrix of a
        stack, as in :meth:`read`. The CheckpointError names the tensor and the file.
        """
        where = f"{name} in {self.file_of(name)}"
        if len(shape if index is None else shape[1:]) != 2:
            raise CheckpointError(f"{where} is quantized and has shape {list(shape)}; only matrices may be quantized")
        if (int4 := self._int4_of(name)) is not None:
            return int4.scales(name, (shape[0], shape[1]))
        zero = name.removesuffix(".weight") + ".weight_zero_point"
        if zero in self._tensors and self._tensors.get_tensor(zero).any():
            raise CheckpointError(f"{where} has zero points; only symmetric quantization is supported")
        scale_name = scale_of(name, self._tensors)
        if scale_name is None:
            raise CheckpointError(f"{where} is quantized but has no scales: {name}_scale_inv or {name}_scale")
        scales = self._tensors.get_tensor(scale_name)
        scales = scales if index is None or scales.ndim < 1 else scales[index]
        rows, columns = shape[-2:]
        block = block_of((rows, columns), tuple(scales.shape), self.quantization.block if self.quantization else None)
        if block is None:
            raise CheckpointError(f"{where}: the shape {list(scales.shape)} of {scale_name} does not match the weight")
        check_scales(scales, self._tensors.where(scale_name))
        return scales.float().reshape(scales.shape[0] if scales.ndim else 1, -1), block

    def zeros(self, name: str, outs: int) -> Tensor | None:
        """Read the zero points of a 4-bit weight, [outs, groups] uint8; None if all are 8. Raises CheckpointError."""
        int4 = self._int4_of(name)
        return None if int4 is None else int4.zeros(name, outs)

    def feature_groups(self, name: str, ins: int) -> Tensor | None:
        """Read the group of each input feature [ins] of a 4-bit weight; None if groups are consecutive features.

        Raises CheckpointError.
        """
        int4 = self._int4_of(name)
        return None if int4 is None else int4.feature_groups(name, ins)

    def input_scale(self, name: str) -> float | None:
        """Read the static input scale of the layer with weight ``name``; None without one. Raises CheckpointError."""
        scale_name = name.removesuffix(".weight") + ".input_scale"
        if scale_name not in self._tensors:
            return None
        scale = self.number(scale_name)
        if not (math.isfinite(scale) and scale > 0):
            where = self._tensors.where(scale_name)
            raise CheckpointError(f"{where} is {scale}; a static input scale must be a finite number above 0")
        return scale

    def _int4_of(self, name: str) -> Int4Weights | None:
        """Return the reader of 4-bit weights if ``name`` is one of them; otherwise None."""
        return self._int4 if self._int4 is not None and name in self._int4 else None

    def _read_mxfp4(self, name: str, dim: int, start: int, count: int, index: int | None) -> Tensor:
        """Read and dequantize rows or columns [start, start + count) of an MXFP4 matrix; columns need no alignment."""
        names = name, name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES
        first, last = (start, start + count) if dim == 0 else (start // mxfp4.BLOCK, -(-(start + count) // mxfp4.BLOCK))
        blocks, exponents = (self._tensors.part(each, dim, first, last - first, index) for each in names)
        wide = mxfp4.dequantize_mxfp4(blocks, exponents)
        return wide if dim == 0 else wide[:, start - first * mxfp4.BLOCK :][:, :count]


@contextmanager
def open_checkpoint(
    source: WeightSource, prefixes: Mapping[str, str] | None = None, *, file: str | None = None
) -> Iterator[Checkpoint]:
    """Context manager: open a checkpoint; the arguments are those of :func:`.open_tensors`.

    Tensors in memory, and those of ``file``, are never quantized. The CheckpointError names file and tensor.
    """
    with open_tensors(source, prefixes, file=file) as tensors:
        is_checkpoint = isinstance(source, Path) and file is None
        yield Checkpoint(tensors, Quantization.read(tensors.folder) if is_checkpoint else None)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
