"""Capture: a tensor as bytes of our own, so that a later in-place change does not show."""

import threading
from collections import OrderedDict
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
    """Buffers that come back: fresh memory costs a page fault every 4 KiB, more than the copy itself.

    Idle buffers are bounded in bytes; the sizes that were not asked for the longest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes``."""
        with self._lock:
            idle = self._idle.get(nbytes)
            if idle is not None:
                self._idle.move_to_end(nbytes)
                if idle:
                    self._held -= nbytes
                    return idle.pop()
        return _new_buffer(nbytes)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep the buffer for later."""
        nbytes = buffer.numel()
        if not nbytes or nbytes > self._limit:
            return
        with self._lock:
            self._idle.setdefault(nbytes, []).append(buffer)
            self._held += nbytes
            while self._held > self._limit:
                oldest, buffers = next(iter(self._idle.items()))
                if buffers:
                    buffers.pop()
                    self._held -= oldest
                else:
                    del self._idle[oldest]


def _new_buffer(nbytes: int) -> torch.Tensor:
    # An inference tensor could not be written again once inference mode is left.
    with torch.inference_mode(False):
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if type(buffer) is not torch.Tensor:
        raise Unsupported(f"a tensor mode is active that makes a {type(buffer).__name__} of every tensor")
    return buffer


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
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsupported(f"a {type(tensor).__name__} is no plain memory")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise Unsupported("a tensor inside torch.func has no memory of its own")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("a CUDA graph is being captured: its tensors hold no values yet")
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
    if dense.numel() and not dense.data_ptr():
        raise Unsupported(f"a {type(dense).__name__} has no memory")
    return summarize(dense.data_ptr(), dense.numel(), _NAMES[dense.dtype])


def measure_snapshot(taken: Snapshot, count: int) -> Summary:
    """Statistics and hash of a snapshot of ``count`` elements."""
    return summarize(taken.buffer.data_ptr(), count, taken.dtype)
