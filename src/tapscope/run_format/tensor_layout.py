"""Tensor: offset, shape and strides of a tensor in a file, and a view of its bytes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core import dtypes


@dataclass(frozen=True, slots=True)
class Tensor:
    """The location of a tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """First byte, counted from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def end(self) -> int:
        """The byte after its last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * dtypes.itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is C-contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def packed(dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    """A C-contiguous tensor."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(dtype, shape, strides, offset)


def view(data: np.ndarray[Any, Any], tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a read-only view of ``data``, the bytes from which its offset counts."""
    dtype = dtypes.numpy_dtype(tensor.dtype)
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    array: np.ndarray[Any, Any] = np.ndarray(tensor.shape, dtype, data, tensor.offset, strides)
    array.flags.writeable = False
    return array
