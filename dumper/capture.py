"""Capture: a tensor as bytes of our own, so that a later in-place change does not show."""

from typing import NamedTuple

import torch

from tapscope import dtypes
from tapscope.kernels.native import Summary, summarize

_NAMES = {getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)}


class Unsupported(Exception):
    """This tensor cannot be captured; the text says why. Never leaves the dumper."""


class Snapshot(NamedTuple):
    """A tensor's bytes, copied."""

    dtype: str
    shape: tuple[int, ...]
    buffer: torch.Tensor
    """uint8, contiguous, from a :class:`BufferPool`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.buffer.numel()


class BufferPool:
    """Buffers that come back: fresh memory costs a page fault every 4 KiB, more than the copy itself."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes``."""
        free = self._free.get(nbytes)
        if free:
            try:
                buffer = free.pop()
            except IndexError:  # another thread was quicker
                return _new_buffer(nbytes)
            self._held -= nbytes
            return buffer
        return _new_buffer(nbytes)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep the buffer for later, within the limit."""
        nbytes = buffer.numel()
        if nbytes and self._held + nbytes <= self._limit:
            self._held += nbytes
            self._free.setdefault(nbytes, []).append(buffer)


def _new_buffer(nbytes: int) -> torch.Tensor:
    # An inference tensor could not be written again once inference mode is left.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The dense strided tensor to look at; raises Unsupported with the reason where there is none."""
    to_local = getattr(tensor, "to_local", None)  # DTensor: this rank's shard
    tensor = tensor.detach() if to_local is None else to_local().detach()
    if tensor.layout != torch.strided:
        raise Unsupported(f"layout {tensor.layout} is not supported")
    if tensor.dtype not in _NAMES:
        raise Unsupported(f"dtype {tensor.dtype} is not supported")
    if tensor.is_meta:
        raise Unsupported("a meta tensor has no values")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype as records spell it."""
    return _NAMES[tensor.dtype]


def snapshot(tensor: torch.Tensor, pool: BufferPool) -> Snapshot:
    """Copy a :func:`local_tensor` into a buffer of the pool (from a device: synchronously)."""
    shape = tuple(tensor.shape)
    buffer = pool.take(tensor.numel() * tensor.element_size())
    if buffer.numel():
        buffer.view(tensor.dtype).view(shape).copy_(tensor)
    return Snapshot(_NAMES[tensor.dtype], shape, buffer)


def measure(tensor: torch.Tensor) -> Summary:
    """Statistics and hash of a :func:`local_tensor`, in one pass over its bytes."""
    dense = tensor.contiguous() if tensor.device.type == "cpu" else tensor.cpu().contiguous()
    return summarize(dense.data_ptr(), dense.numel(), _NAMES[dense.dtype])


def measure_snapshot(taken: Snapshot, count: int) -> Summary:
    """Statistics and hash of a snapshot of ``count`` elements."""
    return summarize(taken.buffer.data_ptr(), count, taken.dtype)
