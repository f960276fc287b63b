"""Capture: a tensor as bytes of our own, so that a later in-place change does not show."""

import threading
from collections import OrderedDict
from collections.abc import Container
from typing import NamedTuple

import torch

from tapscope import dtypes
from tapscope.kernels.native import Summary, summarize
from tapscope.record import Stats

_NAMES = {getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)}


class Unsupported(Exception):
    """This tensor cannot be captured; the text says why. Never leaves the dumper."""


class Taken(NamedTuple):
    """What was captured of a tensor."""

    stats: Stats
    hash: str
    buffer: torch.Tensor | None
    """Its bytes, copied: uint8, contiguous, from a :class:`BufferPool`; None when they were not asked for."""


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


def measure(tensor: torch.Tensor) -> Taken:
    """Statistics and hash of a :func:`local_tensor`, in one pass over its bytes."""
    dense = tensor.contiguous() if tensor.device.type == "cpu" else tensor.cpu().contiguous()
    return Taken(*_summarize(dense, dense.numel(), _NAMES[dense.dtype]), None)


def take(tensor: torch.Tensor, pool: BufferPool, known: Container[tuple[str, int]]) -> Taken:
    """Statistics, hash and, unless ``known`` holds (hash, nbytes), a copy of a :func:`local_tensor`.

    Bytes that were just computed are in the cache: they are read there before they are copied, and what this step
    holds already is not copied at all. From a device the copy is synchronous.
    """
    nbytes, dtype = tensor.numel() * tensor.element_size(), _NAMES[tensor.dtype]
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        stats, digest = _summarize(tensor, tensor.numel(), dtype)
        return Taken(stats, digest, None if (digest, nbytes) in known else _copy(tensor, nbytes, pool))
    buffer = _copy(tensor, nbytes, pool)
    stats, digest = _summarize(buffer, tensor.numel(), dtype)
    if (digest, nbytes) not in known:
        return Taken(stats, digest, buffer)
    pool.give_back(buffer)
    return Taken(stats, digest, None)


def _copy(tensor: torch.Tensor, nbytes: int, pool: BufferPool) -> torch.Tensor:
    buffer = pool.take(nbytes)
    if nbytes:
        buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return buffer


def _summarize(dense: torch.Tensor, count: int, dtype: str) -> Summary:
    address = dense.data_ptr()
    if count and not address:
        raise Unsupported(f"a {type(dense).__name__} has no memory")
    return summarize(address, count, dtype)
