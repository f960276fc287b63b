"""Checkpoint: locates the tensors of a (sharded) safetensors checkpoint and reads slices of them.

Layout: `model.safetensors`, or several files named by the `weight_map` of `model.safetensors.index.json`
(https://huggingface.co/docs/safetensors).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint import mxfp4
from tapscope.engine.checkpoint.quantization import (
    CODES,
    INT4,
    KINDS,
    Quantization,
    block_of,
    dequantize,
    is_cache_scale,
    is_quantization_metadata,
    scale_of,
)
from tapscope.engine.checkpoint.received_weights import ReceivedWeights, WeightSource
from tapscope.tensor_files.int4 import MIDDLE, PER_WORD, Int4Format

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
SINGLE = "model.safetensors"
"""The file of a checkpoint without an index."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = tuple(CODES.values())


class Checkpoint:
    """An opened checkpoint; made by :func:`open_checkpoint`, valid inside its ``with``."""

    def __init__(
        self,
        folder: Path,
        handles: dict[str, Any],
        files: dict[str, str],
        quantization: Quantization | None = None,
        *,
        is_stored: bool = True,
    ) -> None:
        self.folder = folder
        self.shape_source = "config.json requires"
        """Subject and verb of the message on a tensor of another shape."""
        self.quantization = quantization
        self._handles = handles
        self._files = files
        self._file_identities = {file: _file_identity(folder / file) for file in handles if is_stored}
        int4 = quantization.int4 if quantization is not None else None
        self._int4 = _Int4Weights(int4, files) if int4 is not None else None

    @cached_property
    def names(self) -> list[str]:
        """Names of all weights, without their scales, in the order of the index or file.

        4-bit weights have the name ``PATH.weight`` instead of those of their tensors.
        """
        if self.quantization is None:
            return [name for name in self._files if not is_cache_scale(name)]
        names = [name for name in self._files if not is_quantization_metadata(name, self._files)]
        return names if self._int4 is None else list(filter(None, map(self._int4.weight_of, names)))

    @property
    def stored_names(self) -> list[str]:
        """Names of all tensors, as they are stored."""
        return list(self._files)

    def file_of(self, name: str) -> str:
        """Path of the file that contains ``name``, for messages."""
        return str(self.folder / self._files[self._stored(name)])

    def is_empty_bias(self, name: str) -> bool:
        """Whether ``name`` is a bias of zeros of a 4-bit weight, which GPTQ checkpoints have for layers without one."""
        weight = f"{name.removesuffix('.bias')}.weight"
        is_bias = name.endswith(".bias") and self._int4 is not None and weight in self._int4.stored
        return is_bias and not self._tensor(name).any()

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
        """Slice [start, start + count) along ``dim`` of tensor ``name``, whose full shape must be ``shape``.

        With ``index`` the tensor is a stack of matrices and ``dim`` an axis of matrix ``index``. Quantised weights are
        dequantised to fp32, unless ``is_raw``. Raises CheckpointError naming the tensor and the file.
        """
        where = f"{name} in {self.file_of(name)}"
        try:
            if self._int4 is not None and name in self._int4.stored:
                return self._read_int4(name, where, shape, dim, (start, count), is_raw=is_raw)
            stored = self._handles[self._files[name]].get_slice(name)
            found, kind = tuple(stored.get_shape()), stored.get_dtype()
            if found != shape:
                raise CheckpointError(f"{where} has shape {list(found)}; {self.shape_source} {list(shape)}")
            if kind == "U8" and self.quantization is not None and self.quantization.method == "mxfp4":
                if is_raw or not name.endswith(mxfp4.BLOCKS):
                    return _part(stored, index, dim, start, count)
                return self._read_mxfp4(name, stored, index, dim, start, count)
            if kind not in _FLOATS and (kind not in _CODES or self.quantization is None):
                known = _FLOATS if self.quantization is None else (*_FLOATS, *_CODES)
                raise CheckpointError(f"{where} has dtype {kind}; supported: {', '.join(known)}")
            piece = _part(stored, index, dim, start, count)
            if kind not in _CODES or is_raw:
                return piece
            return self._dequantize(name, where, piece, shape, (start, 0) if dim == 0 else (0, start), index)
        except SafetensorError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None

    def integers(self, name: str) -> Tensor:
        """The whole tensor ``name`` as int64; raises CheckpointError for one of floats."""
        where = f"{name} in {self.file_of(name)}"
        try:
            found: Tensor = self._handles[self._files[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        if found.is_floating_point():
            raise CheckpointError(f"{where} has dtype {str(found.dtype).removeprefix('torch.')}; expected integers")
        return found.to(torch.int64)

    @cached_property
    def cache_scales(self) -> list[str]:
        """Names of the scales of an FP8 KV cache."""
        return [name for name in self._files if is_cache_scale(name)]

    def number(self, name: str) -> float:
        """Value of the one-element tensor ``name``; raises CheckpointError if it is anything else."""
        where = f"{name} in {self.file_of(name)}"
        try:
            stored = self._handles[self._files[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        if stored.numel() != 1 or not stored.dtype.is_floating_point:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{where} is {kind} of shape {list(stored.shape)}; it must be one float")
        return float(stored)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since it was opened, so that old and new weights may be mixed."""
        for file, mark in self._file_identities.items():
            if _file_identity(self.folder / file) != mark:
                raise CheckpointError(f"{self.folder / file} was modified during loading; load it again")

    def kind(self, name: str) -> str:
        """dtype of tensor ``name`` by its safetensors name, ``I4`` for 4-bit weights; raises CheckpointError."""
        try:
            if self._int4 is not None and name in self._int4.stored:
                return KINDS[INT4]
            return str(self._handles[self._files[name]].get_slice(name).get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{name} in {self.file_of(name)} cannot be read: {error}") from None

    def scales(self, name: str, shape: tuple[int, ...], index: int | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Scales of the quantised weight ``name`` of ``shape``: ([blocks, blocks], rows and columns of a block).

        They are fp32, those of 4-bit weights as they are stored. ``index`` is that of :meth:`read`.
        Raises CheckpointError naming the tensor and the file.
        """
        where = f"{name} in {self.file_of(name)}"
        if len(shape if index is None else shape[1:]) != 2:
            raise CheckpointError(f"{where} is quantised and has shape {list(shape)}; only matrices may be quantised")
        if self._int4 is not None and name in self._int4.stored:
            return self._int4_scales(name, where, (shape[0], shape[1]))
        zero = name.removesuffix(".weight") + ".weight_zero_point"
        if zero in self._files and self._tensor(zero).any():
            raise CheckpointError(f"{where} has zero points; only symmetric quantisation is supported")
        scale_name = scale_of(name, self._files)
        if scale_name is None:
            raise CheckpointError(f"{where} is quantised but has no scales: {name}_scale_inv or {name}_scale")
        scales = self._tensor(scale_name)
        scales = scales if index is None or scales.ndim < 1 else scales[index]
        rows, columns = shape[-2:]
        block = block_of((rows, columns), tuple(scales.shape), self.quantization.block if self.quantization else None)
        if block is None:
            raise CheckpointError(f"{where}: the shape {list(scales.shape)} of {scale_name} does not match the weight")
        return scales.float().reshape(scales.shape[0] if scales.ndim else 1, -1), block

    def zeros(self, name: str, outs: int) -> Tensor | None:
        """Zero points [outs, groups] uint8 of a 4-bit weight; None if all are 8. Raises CheckpointError."""
        if self._int4 is None or name not in self._int4.stored:
            return None
        int4, zero_name = self._int4.format, self._int4.sibling(name, self._int4.format.zeros)
        if zero_name not in self._files:
            if int4.is_transposed:
                raise CheckpointError(f"{name} in {self.file_of(name)} is quantised but has no {zero_name}")
            return None
        stored = self._tensor(zero_name)
        groups = self._tensor(self._int4.sibling(name, int4.scales)).shape[0 if int4.is_transposed else 1]
        shape = [groups, outs] if int4.is_transposed else [outs, groups]
        shape[int4.zero_axis] = -(-outs // PER_WORD)
        if stored.dtype != torch.int32 or list(stored.shape) != shape:
            where, kind = f"{zero_name} in {self.file_of(zero_name)}", str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{where} is {kind} of shape {list(stored.shape)}; it must be int32 of shape {shape}")
        zeros = torch.from_numpy(np.ascontiguousarray(int4.unpack_zeros(stored.numpy(), outs)))
        return None if (zeros == MIDDLE).all() else zeros

    def feature_groups(self, name: str, ins: int) -> Tensor | None:
        """Group of each input feature [ins] of a 4-bit weight; None where consecutive features share a group.

        GPTQ's ``desc_act`` quantises features in another order. Raises CheckpointError.
        """
        if self._int4 is None or name not in self._int4.stored:
            return None
        group_name = self._int4.sibling(name, self._int4.format.groups)
        if group_name not in self._files:
            return None
        found = self._tensor(group_name).long()
        groups = self._tensor(self._int4.sibling(name, self._int4.format.scales))
        count = groups.shape[0 if self._int4.format.is_transposed else 1]
        if tuple(found.shape) != (ins,) or (ins and not 0 <= int(found.min()) <= int(found.max()) < count):
            raise CheckpointError(
                f"{group_name} in {self.file_of(group_name)} must have a group from 0 to {count - 1} for each of {ins} "
                "input features"
            )
        return None if torch.equal(found, torch.arange(ins) // -(-ins // count)) else found

    def input_scale(self, name: str) -> float | None:
        """The static scale of the input of weight ``name``; None if there is none. Raises CheckpointError."""
        scale_name = name.removesuffix(".weight") + ".input_scale"
        if scale_name not in self._files:
            return None
        scale = self.number(scale_name)
        if not (math.isfinite(scale) and scale > 0):
            where = f"{scale_name} in {self.file_of(scale_name)}"
            raise CheckpointError(f"{where} is {scale}; a static input scale must be a finite number above 0")
        return scale

    def _stored(self, name: str) -> str:
        """Name of the tensor with the codes of a 4-bit weight, else ``name``."""
        return name if self._int4 is None else self._int4.stored.get(name, name)

    def _tensor(self, name: str) -> Tensor:
        try:
            found: Tensor = self._handles[self._files[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name} in {self.file_of(name)} cannot be read: {error}") from None
        return found

    def _read_int4(
        self, name: str, where: str, shape: tuple[int, ...], dim: int, part: tuple[int, int], *, is_raw: bool
    ) -> Tensor:
        """Part (start, count) along ``dim`` of a 4-bit weight: two codes in a byte if ``is_raw``, else dequantised."""
        assert self._int4 is not None, "the weight has 4 bits"
        int4, stored = self._int4.format, self._handles[self._files[self._stored(name)]].get_slice(self._stored(name))
        if len(shape) != 2 or tuple(stored.get_shape()) != int4.stored_shape((shape[0], shape[1])):
            found = f"{self._stored(name)} has shape {stored.get_shape()}"
            raise CheckpointError(f"{where} does not have the shape that config.json requires, {list(shape)}: {found}")
        if stored.get_dtype() != "I32":
            raise CheckpointError(f"{where} is packed in {stored.get_dtype()}; supported: I32")
        axis, (start, count) = 1 - dim if int4.is_transposed else dim, part
        per = PER_WORD if axis == int4.axis else 1
        first, last = start // per, -(-(start + count) // per)
        words = _part(stored, None, axis, first, last - first)
        held = int4.unpack_codes(words.numpy())
        axes = [slice(shape[0]), slice(shape[1])]
        axes[dim] = slice(start - first * per, start - first * per + count)
        codes = torch.from_numpy(np.ascontiguousarray(held[tuple(axes)]))
        if is_raw:
            return codes[:, 0::2] | codes[:, 1::2] << 4
        if not count:
            return codes.float()
        scales, block = self._int4_scales(name, where, (shape[0], shape[1]))
        zeros = self.zeros(name, shape[0])
        return dequantize(
            codes, scales, block, (start, 0) if dim == 0 else (0, start),
            zeros=torch.full(scales.shape, MIDDLE) if zeros is None else zeros,
            groups=self.feature_groups(name, shape[1]),
        )  # fmt: skip

    def _int4_scales(self, name: str, where: str, shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """As :meth:`scales`."""
        assert self._int4 is not None, "the weight has 4 bits"
        assert self.quantization is not None, "the weight has 4 bits"
        scale_name = self._int4.sibling(name, self._int4.format.scales)
        if scale_name not in self._files:
            raise CheckpointError(f"{where} is quantised but has no scales: {scale_name}")
        scales = self._tensor(scale_name)
        scales = scales.T.contiguous() if self._int4.format.is_transposed else scales
        for group in self.quantization.groups:
            width = shape[1] if group is None else group
            if tuple(scales.shape) == (shape[0], -(-shape[1] // width)) and scales.dtype.is_floating_point:
                return scales, (1, width)
        sizes = ", ".join("all" if group is None else str(group) for group in self.quantization.groups)
        raise CheckpointError(
            f"{where}: the shape {list(scales.shape)} of {scale_name}, as [outputs, groups], does not match the weight "
            f"{list(shape)} in groups of {sizes or 'no size in config.json'}"
        )

    def _read_mxfp4(self, name: str, stored: Any, index: int | None, dim: int, start: int, count: int) -> Tensor:
        """Rows or columns [start, start + count) of a matrix in MXFP4; columns need not begin with a block."""
        scale_name = name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES
        scales = self._handles[self._files[scale_name]].get_slice(scale_name)
        first, last = (start, start + count) if dim == 0 else (start // mxfp4.BLOCK, -(-(start + count) // mxfp4.BLOCK))
        blocks, exponents = (_part(each, index, dim, first, last - first) for each in (stored, scales))
        wide = mxfp4.dequantize_mxfp4(blocks, exponents)
        return wide if dim == 0 else wide[:, start - first * mxfp4.BLOCK :][:, :count]

    def _dequantize(
        self, name: str, where: str, piece: Tensor, shape: tuple[int, ...], corner: tuple[int, int], index: int | None
    ) -> Tensor:
        scales, block = self.scales(name, shape, index)
        return dequantize(piece, scales, block, corner)


class _Int4Weights:
    """Names of 4-bit weights and of their tensors."""

    def __init__(self, format: Int4Format, files: Mapping[str, str]) -> None:
        self.format = format
        suffix = f".{format.codes}"
        codes = [name for name in files if name.endswith(suffix)]
        self.stored = {f"{name.removesuffix(suffix)}.weight": name for name in codes}
        """Name of the tensor with the codes of each weight."""
        self._weights = {name: weight for weight, name in self.stored.items()}
        others = (format.scales, format.zeros, *format.others)
        self._others = {self.sibling(weight, other) for weight in self.stored for other in others}

    def sibling(self, weight: str, last: str) -> str:
        """Name of another tensor of the weight's module."""
        return f"{weight.removesuffix('.weight')}.{last}"

    def weight_of(self, name: str) -> str | None:
        """The weight whose codes ``name`` has; ``name`` if it is not packed; None if it belongs to a weight."""
        return None if name in self._others else self._weights.get(name, name)


def _part(stored: Any, index: int | None, dim: int, start: int, count: int) -> Tensor:
    """[start, start + count) along ``dim`` of a tensor in a file, or of matrix ``index`` of a stack."""
    axes = (slice(None),) * dim + (slice(start, start + count),)
    piece: Tensor = stored[axes if index is None else (index, *axes)]
    return piece


@contextmanager
def open_checkpoint(
    folder: WeightSource, prefixes: Mapping[str, str] | None = None, *, file: str | None = None
) -> Iterator[Checkpoint]:
    """Open every weight file of ``folder``, or tensors in memory; raises CheckpointError naming file and tensor.

    ``prefixes`` maps prefixes of stored names to those under which the tensors are read. With ``file`` only that file
    is opened, whose tensors are not quantised.
    """
    if isinstance(folder, ReceivedWeights):
        yield _renamed(Path(), folder.handles, folder.files, prefixes, None, is_stored=False)
        return
    with ExitStack() as stack:
        index = _read_index(folder) if file is None else {}
        single = file or SINGLE
        handles: dict[str, Any] = {}
        for part in dict.fromkeys(index.values()) if index else [single]:
            handles[part] = stack.enter_context(_open(folder / part, index))
        files = index or dict.fromkeys(handles[single].keys(), single)
        held = {part: set(handle.keys()) for part, handle in handles.items()}
        for name, part in files.items():
            if name not in held[part]:
                raise CheckpointError(f"{folder / INDEX} maps {name} to {part}, but that file has no such tensor")
        yield _renamed(folder, handles, files, prefixes, Quantization.read(folder) if file is None else None)


def _renamed(
    folder: Path,
    handles: dict[str, Any],
    files: dict[str, str],
    prefixes: Mapping[str, str] | None,
    quantization: Quantization | None,
    *,
    is_stored: bool = True,
) -> Checkpoint:
    if prefixes:
        stored = {renamed(name, prefixes): name for name in files}
        handles = {part: _RenamedTensors(handle, stored) for part, handle in handles.items()}
        files = {name: files[old] for name, old in stored.items()}
    return Checkpoint(folder, handles, files, quantization, is_stored=is_stored)


class _RenamedTensors:
    """A safetensors file whose tensors are read under other names."""

    def __init__(self, handle: Any, stored: Mapping[str, str]) -> None:
        """``stored`` maps names to those in the file."""
        self._handle, self._stored = handle, stored

    def get_slice(self, name: str) -> Any:
        return self._handle.get_slice(self._stored[name])

    def get_tensor(self, name: str) -> Any:
        return self._handle.get_tensor(self._stored[name])


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """``name`` with the first of ``prefixes`` that it begins with replaced."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes[prefix] + name.removeprefix(prefix) if prefix else name


def _file_identity(path: Path) -> tuple[int, int, int]:
    """Inode, size and modification time: they change when the file is replaced or written."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty when the checkpoint is one file without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no readable weight_map: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be a JSON object that names at least one tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map maps {name} to {file!r}; it must be a file name in {folder}")
    return weight_map


def _open(path: Path, index: dict[str, str]) -> Any:
    if not path.is_file():
        lost = [name for name, file in index.items() if file == path.name]
        detail = (
            f"; it contains {lost[0]} and {len(lost) - 1} more tensors" if lost else "; weights must be safetensors"
        )
        raise CheckpointError(f"{path} is missing{detail}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_truncated_tensor(path) or f"{path} is not a safetensors file: {error}") from None


def _truncated_tensor(path: Path) -> str | None:
    """Message naming the first tensor that extends past the end of the file; None if the file is not truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            return f"{path} is truncated: its {size} bytes are fewer than its header needs"
        try:
            header = json.loads(file.read(header_size))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            first = min((end, name) for name, end in ends.items() if 8 + header_size + end > size)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return f"{path} is truncated: {first[1]} ends at byte {8 + header_size + first[0]} but the file has {size}"
