"""Int4Weights: the 4-bit weights of a checkpoint, each of which is stored as several tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.quantization import check_scales, dequantize
from tapscope.engine.checkpoint.stored_tensors import StoredTensors
from tapscope.tensor_files.int4 import INT4_ZERO_POINT, PER_WORD, Int4Format


class Int4Weights:
    """Reader of 4-bit weights under the name ``PATH.weight``, whatever the names of their tensors."""

    def __init__(self, tensors: StoredTensors, format: Int4Format, group_sizes: Sequence[int | None]) -> None:
        """``group_sizes``: possible group sizes (input features per scale) from config.json; None: all features."""
        self._tensors, self._format, self._group_sizes = tensors, format, group_sizes
        suffix = f".{format.codes}"
        codes = [name for name in tensors if name.endswith(suffix)]
        self._codes = {f"{name.removesuffix(suffix)}.weight": name for name in codes}
        self._weights = {name: weight for weight, name in self._codes.items()}
        others = (format.scales, format.zeros, *format.others)
        self._others = {_sibling(weight, other) for weight in self._codes for other in others}

    def __contains__(self, weight: str) -> bool:
        return weight in self._codes

    def codes_of(self, weight: str) -> str:
        """Return the name of the tensor with the codes of ``weight``."""
        return self._codes[weight]

    def weight_of(self, name: str) -> str | None:
        """Return the weight name for the stored tensor ``name``.

        Codes map to their weight, tensors unrelated to 4-bit weights to themselves, and scales or zero points to None.
        """
        return None if name in self._others else self._weights.get(name, name)

    def read(
        self, weight: str, shape: tuple[int, ...], dim: int, start: int, count: int, *, is_raw: bool = False
    ) -> Tensor:
        """Read [start, start + count) along ``dim``, dequantized to fp32, or as two codes per byte if ``is_raw``.

        Raises CheckpointError if the weight's shape is not ``shape``.
        """
        codes_name, format = self._codes[weight], self._format
        stored = self._tensors.get_slice(codes_name)
        if len(shape) != 2 or tuple(stored.get_shape()) != format.stored_shape((shape[0], shape[1])):
            problem = f"{codes_name} has shape {stored.get_shape()}"
            raise CheckpointError(
                f"{self._where(weight)} does not have the shape that config.json requires, {list(shape)}: {problem}"
            )
        if stored.get_dtype() != "I32":
            raise CheckpointError(f"{self._where(weight)} is packed in {stored.get_dtype()}; supported: I32")
        axis = 1 - dim if format.is_transposed else dim
        per = PER_WORD if axis == format.axis else 1
        first, last = start // per, -(-(start + count) // per)
        held = format.unpack_codes(self._tensors.part(codes_name, axis, first, last - first).numpy())
        axes = [slice(shape[0]), slice(shape[1])]
        axes[dim] = slice(start - first * per, start - first * per + count)
        codes = torch.from_numpy(np.ascontiguousarray(held[tuple(axes)]))
        if is_raw:
            return codes[:, 0::2] | codes[:, 1::2] << 4
        if not count:
            return codes.float()
        scales, block = self.scales(weight, (shape[0], shape[1]))
        zeros = self.zeros(weight, shape[0])
        return dequantize(
            codes, scales, block, (start, 0) if dim == 0 else (0, start),
            zeros=torch.full(scales.shape, INT4_ZERO_POINT) if zeros is None else zeros,
            groups=self.feature_groups(weight, shape[1]),
        )  # fmt: skip

    def scales(self, weight: str, shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Read the scales; return ([outs, groups] in the stored dtype, block shape). Raises CheckpointError."""
        name, where = _sibling(weight, self._format.scales), self._where(weight)
        if name not in self._tensors:
            raise CheckpointError(f"{where} is quantized but has no scales: {name}")
        scales = self._tensors.get_tensor(name)
        scales = scales.T.contiguous() if self._format.is_transposed else scales
        for size in self._group_sizes:
            width = shape[1] if size is None else size
            if tuple(scales.shape) == (shape[0], -(-shape[1] // width)):
                check_scales(scales, self._tensors.where(name))
                return scales, (1, width)
        sizes = ", ".join("all" if size is None else str(size) for size in self._group_sizes)
        raise CheckpointError(
            f"{where}: the shape {list(scales.shape)} of {name}, as [outputs, groups], does not match the weight "
            f"{list(shape)} in groups of {sizes or 'no size in config.json'}"
        )

    def zeros(self, weight: str, outs: int) -> Tensor | None:
        """Read the zero points, [outs, groups] uint8; None if all are 8. Raises CheckpointError."""
        name, format = _sibling(weight, self._format.zeros), self._format
        if name not in self._tensors:
            if format.is_transposed:
                raise CheckpointError(f"{self._where(weight)} is quantized but has no {name}")
            return None
        stored = self._tensors.get_tensor(name)
        groups = self._num_groups(weight)
        shape = [groups, outs] if format.is_transposed else [outs, groups]
        shape[format.zero_axis] = -(-outs // PER_WORD)
        if stored.dtype != torch.int32 or list(stored.shape) != shape:
            kind = f"{str(stored.dtype).removeprefix('torch.')} of shape {list(stored.shape)}"
            raise CheckpointError(f"{self._tensors.where(name)} is {kind}; it must be int32 of shape {shape}")
        zeros = torch.from_numpy(np.ascontiguousarray(format.unpack_zeros(stored.numpy(), outs)))
        return None if (zeros == INT4_ZERO_POINT).all() else zeros

    def feature_groups(self, weight: str, ins: int) -> Tensor | None:
        """Read the group of each input feature [ins]; None if groups are consecutive features.

        With GPTQ's ``desc_act``, features are quantized in another order. Raises CheckpointError.
        """
        name = _sibling(weight, self._format.groups)
        if name not in self._tensors:
            return None
        groups, count = self._tensors.get_tensor(name).long(), self._num_groups(weight)
        if tuple(groups.shape) != (ins,) or (ins and not 0 <= int(groups.min()) <= int(groups.max()) < count):
            rule = f"a group from 0 to {count - 1} for each of {ins} input features"
            raise CheckpointError(f"{self._tensors.where(name)} must have {rule}")
        return None if torch.equal(groups, torch.arange(ins) // -(-ins // count)) else groups

    def _num_groups(self, weight: str) -> int:
        return self._tensors.shape(_sibling(weight, self._format.scales))[0 if self._format.is_transposed else 1]

    def _where(self, weight: str) -> str:
        return f"{weight} in {self._tensors.file_of(self._codes[weight])}"


def _sibling(weight: str, last: str) -> str:
    """Return the name of tensor ``last`` in the module of ``weight``."""
    return f"{weight.removesuffix('.weight')}.{last}"
