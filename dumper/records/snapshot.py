"""Snapshot: copy the bytes of a tensor and compute its statistics and hash, before later in-place changes."""

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
    """Return the dispatch key sets of plain tensors, created outside and inside inference mode."""
    keys = set()
    for mode in (False, True):
        with torch.inference_mode(mode):
            keys.add(keys_of(torch.empty(0, device="cpu")).raw_repr())
    return keys


HOST_KEYS = frozenset(_plain_keys())
"""``raw_repr()`` of the dispatch key sets of plain tensors in host memory."""
_PLAIN_KEYS = set(HOST_KEYS)
is_functional = torch._C._functorch.is_functorch_wrapped_tensor
_NAMES = {getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)}


class UnsupportedTensor(Exception):
    """A tensor cannot be captured, with the reason; never propagates out of the dumper."""


TensorSnapshot = tuple[bytes, bytes, int | None, PayloadSlot | None]
"""Result of capturing a tensor: (hash, bag and statistics as JSON fields of its record line; hash as 16 bytes; number
of the payload with its bytes, or None; slot with a copy of the bytes if they are new in this step, or None)."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the strided tensor to read: detached, the local shard of a DTensor, with lazy conj and neg resolved.

    Raises UnsupportedTensor with the reason for a layout, dtype or subclass without readable memory.
    """
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
    """Return whether the run format supports ``dtype``."""
    return dtype in _NAMES


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype in the run format."""
    return _NAMES[tensor.dtype]


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a plain strided tensor in host or device memory, as nearly all tensors are.

    One query of the dispatch key set covers device, layout, lazy conjugation and torch.func transforms; separate
    queries would also release the GIL each time.
    """
    return type(value) in PLAIN_TYPES and keys_of(value).raw_repr() in _PLAIN_KEYS and value.dtype in _NAMES


def learn_plain(tensor: torch.Tensor) -> None:
    """Register the dispatch keys of ``tensor``, which device kernels support, so that :func:`is_plain` accepts them.

    The keys of device tensors are unknown until a tensor exists.
    """
    if type(tensor) is torch.Tensor:
        _PLAIN_KEYS.add(keys_of(tensor).raw_repr())


def measure(tensor: torch.Tensor, layout: RecordLayout, dedup: DedupCache) -> TensorSnapshot:
    """Compute statistics, hash and bag of a :func:`local_tensor`, without keeping its bytes.

    A tensor on a device is copied to the host synchronously.
    """
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
    """Compute statistics and digests like :func:`measure`, and copy new bytes to a slot of ``sink``.

    Copies and computes in one pass, while the bytes are still in the CPU cache. Returns None if ``sink`` has no space.
    """
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return _take_elsewhere(tensor, layout, dedup, sink)
    return dense_snapshot(_address(tensor, layout), layout, dedup, sink)


def dense_snapshot(address: int, layout: RecordLayout, dedup: DedupCache, sink: SlotSource) -> TensorSnapshot | None:
    """Take a :func:`snapshot` of a contiguous tensor in host memory at ``address``."""
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
    """Take a :func:`snapshot` of a tensor at ``address`` with the native writer; ``layout`` must have a template."""
    return _copied(layout.nbytes, dedup, sink, writer.copy, layout.template, address)


def _copied(
    nbytes: int, dedup: DedupCache, sink: SlotSource, copy: Callable[..., tuple[bytes, bytes]], *what: Any
) -> TensorSnapshot | None:
    """Call ``copy(*what, target)`` with a slot as the target; drop the copy if equal bytes were sent in this step."""
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
    """Take a snapshot of a non-contiguous or device tensor: torch copies it to a slot, then the copy is read."""
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
    """Return the snapshot; discard the copy in ``slot`` if equal bytes were already sent in this step."""
    payload = dedup.payload_number(digest, slot.nbytes)
    if payload is None:
        return text, digest, dedup.next_number(), slot
    sink.cancel(slot)
    return text, digest, payload, None


def _memory(slot: PayloadSlot) -> torch.Tensor:
    # Outside inference mode, because an inference tensor cannot be written outside it later.
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
