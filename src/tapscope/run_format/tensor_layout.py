"""Tensor: layout (offset, shape, strides) of a tensor in a file, and array views of its bytes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core import dtypes


@dataclass(frozen=True, slots=True)
class Tensor:
    """Location and layout of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """Offset of the first byte from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def end(self) -> int:
        """Offset of the byte after the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * dtypes.itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the layout is C-contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def packed(dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    """Return the layout of a C-contiguous tensor at ``offset``."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(dtype, shape, strides, offset)


def view(data: np.ndarray[Any, Any], tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a read-only view of ``data``; ``tensor.offset`` counts from the start of ``data``."""
    dtype = dtypes.numpy_dtype(tensor.dtype)
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    array: np.ndarray[Any, Any] = np.ndarray(tensor.shape, dtype, data, tensor.offset, strides)
    array.flags.writeable = False
    return array
