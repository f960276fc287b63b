"""Snapshot: copies the bytes of a tensor, so that a later in-place change does not show."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tapscope.core import dtypes
from tapscope.dumper.records.dedup_cache import MIN_LOOKUP_BYTES, DedupCache
from tapscope.dumper.records.payload_slot import PayloadSlot, SlotSource
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.kernels.native import summary

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
keys_of = torch._C._dispatch_keys


def _plain_keys() -> set[int]:
    """Dispatch keys of plain tensors, created outside and inside inference mode."""
    keys = set()
    for mode in (False, True):
        with torch.inference_mode(mode):
            keys.add(keys_of(torch.empty(0, device="cpu")).raw_repr())
    return keys


HOST_KEYS = frozenset(_plain_keys())
"""``raw_repr()`` of the dispatch keys of plain tensors in host memory."""
_PLAIN_KEYS = set(HOST_KEYS)
is_functional = torch._C._functorch.is_functorch_wrapped_tensor
_NAMES = {getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)}


class UnsupportedTensor(Exception):
    """A tensor cannot be captured, with the reason. Never leaves the dumper."""


TensorSnapshot = tuple[bytes, bytes, int | None, PayloadSlot | None]
"""A captured tensor: hash, multiset hash and statistics as members of its record line; the hash as 16 bytes; the number
of the payload that holds its bytes, if any; the slot with a copy of them, if they are new in this step."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The dense strided tensor to read; raises UnsupportedTensor with the reason where there is none."""
    to_local = getattr(tensor, "to_local", None)  # DTensor: this rank's shard
    tensor = tensor.detach() if to_local is None else to_local().detach()
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"layout {tensor.layout} is not supported")
    if tensor.dtype not in _NAMES:
        raise UnsupportedTensor(f"dtype {tensor.dtype} is not supported")
    if tensor.is_meta:
        raise UnsupportedTensor("a meta tensor has no values")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedTensor(f"a {type(tensor).__name__} is not plain memory")
    if is_functional(tensor):
        raise UnsupportedTensor("a tensor inside a torch.func transform has no memory")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedTensor("a CUDA graph is being captured: its tensors hold no values yet")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def has_name(dtype: torch.dtype) -> bool:
    """Whether records can name this dtype."""
    return dtype in _NAMES


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of the dtype in records."""
    return _NAMES[tensor.dtype]


def is_plain(value: Any) -> bool:
    """Whether it is a tensor in ordinary dense memory, of the CPU or a device. Nearly all are, and need no closer look.

    The dispatch keys tell device, layout, lazy conjugation and torch.func transforms in one call; asking the tensor for
    each would also release the GIL each time.
    """
    return type(value) in PLAIN_TYPES and keys_of(value).raw_repr() in _PLAIN_KEYS and value.dtype in _NAMES


def learn_plain(tensor: torch.Tensor) -> None:
    """Register tensors like this one, which a device has accepted, as plain:.

    Their keys are known only once one exists.
    """
    if type(tensor) is torch.Tensor:
        _PLAIN_KEYS.add(keys_of(tensor).raw_repr())


def measure(tensor: torch.Tensor, layout: RecordLayout, dedup: DedupCache) -> TensorSnapshot:
    """Statistics, hash and multiset hash of a :func:`local_tensor`; one on a device is copied synchronously."""
    dense = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous()
    address, nbytes, dtype = _address(dense, layout), layout.nbytes, layout.dtype
    if nbytes < MIN_LOOKUP_BYTES:
        return *summary.take(address, layout.count, dtype), None, None
    known = dedup.find(address, nbytes, dtype)
    if known is None:
        known = summary.take(address, layout.count, dtype)
        dedup.remember(address, nbytes, dtype, *known)
    return *known, None, None


def snapshot(tensor: torch.Tensor, layout: RecordLayout, dedup: DedupCache, sink: SlotSource) -> TensorSnapshot | None:
    """As :func:`measure`, with the bytes in a slot of ``sink`` if they are new in this step; None without room for
    them.

    One pass over bytes that were just computed and are still in the cache.
    """
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return _take_elsewhere(tensor, layout, dedup, sink)
    return dense_snapshot(_address(tensor, layout), layout, dedup, sink)


def dense_snapshot(address: int, layout: RecordLayout, dedup: DedupCache, sink: SlotSource) -> TensorSnapshot | None:
    """As :func:`snapshot`, for a contiguous tensor in host memory at ``address``."""
    nbytes, dtype = layout.nbytes, layout.dtype
    known = dedup.find(address, nbytes, dtype) if nbytes >= MIN_LOOKUP_BYTES else None
    if known is not None and (payload := dedup.payload_number(known[1], nbytes)) is not None:
        return *known, payload, None
    taken = _copied(nbytes, dedup, sink, summary.take, address, layout.count, dtype)
    if nbytes >= MIN_LOOKUP_BYTES and taken is not None:
        dedup.remember(address, nbytes, dtype, taken[0], taken[1])
    return taken


def snapshot_at(
    writer: Any, address: int, layout: RecordLayout, dedup: DedupCache, sink: SlotSource
) -> TensorSnapshot | None:
    """As :func:`snapshot`, for a tensor at ``address`` with a known layout: the native writer reads it."""
    return _copied(layout.nbytes, dedup, sink, writer.copy, layout.template, address)


def _copied(
    nbytes: int, dedup: DedupCache, sink: SlotSource, copy: Callable[..., tuple[bytes, bytes]], *what: Any
) -> TensorSnapshot | None:
    """The result of ``copy(*what, target)``; the copied bytes are kept unless this step has sent the same."""
    slot = sink.reserve(nbytes)
    if slot is None:
        return None
    try:
        text, digest = copy(*what, slot.address)
    except BaseException:
        sink.cancel(slot)
        raise
    return _unless_known(text, digest, slot, dedup, sink)


def _take_elsewhere(
    tensor: torch.Tensor, layout: RecordLayout, dedup: DedupCache, sink: SlotSource
) -> TensorSnapshot | None:
    """A strided tensor, or one on a device: torch copies it, then the copy is read."""
    slot = sink.reserve(layout.nbytes)
    if slot is None:
        return None
    try:
        if layout.count:
            _memory(slot).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        known = summary.take(slot.address, layout.count, layout.dtype)
    except BaseException:
        sink.cancel(slot)
        raise
    return _unless_known(*known, slot, dedup, sink)


def _unless_known(text: bytes, digest: bytes, slot: PayloadSlot, dedup: DedupCache, sink: SlotSource) -> TensorSnapshot:
    """Discard the copy if this step has already sent the same bytes."""
    payload = dedup.payload_number(digest, slot.nbytes)
    if payload is None:
        return text, digest, dedup.next_number(), slot
    sink.cancel(slot)
    return text, digest, payload, None


def _memory(slot: PayloadSlot) -> torch.Tensor:
    # An inference tensor could not be written again outside inference mode.
    with torch.inference_mode(False):
        memory = torch.frombuffer((ctypes.c_ubyte * slot.nbytes).from_address(slot.address), dtype=torch.uint8)
    if type(memory) is not torch.Tensor:
        raise UnsupportedTensor(f"a tensor mode is active that makes a {type(memory).__name__} of every tensor")
    return memory


def _address(dense: torch.Tensor, layout: RecordLayout) -> int:
    address = dense.data_ptr()
    if not address and layout.count:
        raise UnsupportedTensor(f"a {type(dense).__name__} has no memory")
    return address
