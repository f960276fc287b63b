"""Capture: a tensor as bytes of our own, so that a later in-place change does not show."""

import ctypes
from typing import NamedTuple

import torch

from tapscope import dtypes
from tapscope.dumper.memo import Known, Memo
from tapscope.dumper.slot import Sink, Slot
from tapscope.kernels.native import summary

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_NAMES = {getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)}


class Unsupported(Exception):
    """This tensor cannot be captured; the text says why. Never leaves the dumper."""


class Taken(NamedTuple):
    """What was captured of a tensor."""

    text: bytes
    """Hash, bag and statistics, as members of the record's line."""
    known: Known
    slot: Slot | None
    """Its bytes, copied; None when they were not asked for or are known already."""


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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is ordinary dense memory of the CPU: nearly every tensor is, and needs no closer look."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in _NAMES
        and not (tensor.is_conj() or tensor.is_neg() or _is_wrapped(tensor))
    )


def take(tensor: torch.Tensor, memo: Memo, sink: Sink | None) -> Taken | None:
    """Statistics, hash and bag of a :func:`local_tensor`, and with a ``sink`` its bytes, if they are new to this step.

    One pass over bytes that were just computed and are in the cache. None when the sink had no room. From a device the
    copy is synchronous.
    """
    if sink is None:
        return _measure(tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous(), memo)
    if tensor.is_cpu and tensor.is_contiguous():
        return _take_dense(tensor, memo, sink)
    return _take_strided(tensor, memo, sink)


def _measure(dense: torch.Tensor, memo: Memo) -> Taken:
    address, count, dtype = _address(dense), dense.numel(), _NAMES[dense.dtype]
    nbytes = count * dense.element_size()
    digest, text = memo.recall(address, nbytes, dtype) or (b"", b"")
    if not digest:
        text, digest = summary.take(address, count, dtype)
        memo.note(address, nbytes, dtype, digest, text)
    return Taken(text, Known(digest, nbytes, None), None)


def _take_dense(tensor: torch.Tensor, memo: Memo, sink: Sink) -> Taken | None:
    address, count, dtype = _address(tensor), tensor.numel(), _NAMES[tensor.dtype]
    nbytes = count * tensor.element_size()
    seen = memo.recall(address, nbytes, dtype)
    if seen is not None and (payload := memo.payload(seen[0], nbytes)) is not None:
        return Taken(seen[1], Known(seen[0], nbytes, payload), None)
    slot = sink.reserve(nbytes)
    if slot is None:
        return None
    try:
        text, digest = summary.take(address, count, dtype, slot.address)
    except BaseException:
        sink.cancel(slot)
        raise
    memo.note(address, nbytes, dtype, digest, text)
    return _unless_known(slot, text, digest, memo, sink)


def _take_strided(tensor: torch.Tensor, memo: Memo, sink: Sink) -> Taken | None:
    dtype, count = _NAMES[tensor.dtype], tensor.numel()
    slot = sink.reserve(count * tensor.element_size())
    if slot is None:
        return None
    try:
        if count:
            memory = _memory(slot)
            memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        text, digest = summary.take(slot.address, count, dtype)
    except BaseException:
        sink.cancel(slot)
        raise
    return _unless_known(slot, text, digest, memo, sink)


def _unless_known(slot: Slot, text: bytes, digest: bytes, memo: Memo, sink: Sink) -> Taken:
    """Give the copy up if this step has sent the same bytes already."""
    payload = memo.payload(digest, slot.nbytes)
    if payload is not None:
        sink.cancel(slot)
        return Taken(text, Known(digest, slot.nbytes, payload), None)
    return Taken(text, Known(digest, slot.nbytes, memo.number()), slot)


def _memory(slot: Slot) -> torch.Tensor:
    # An inference tensor could not be written again once inference mode is left.
    with torch.inference_mode(False):
        memory = torch.frombuffer((ctypes.c_ubyte * slot.nbytes).from_address(slot.address), dtype=torch.uint8)
    if type(memory) is not torch.Tensor:
        raise Unsupported(f"a tensor mode is active that makes a {type(memory).__name__} of every tensor")
    return memory


def _address(dense: torch.Tensor) -> int:
    address = dense.data_ptr()
    if not address and dense.numel():
        raise Unsupported(f"a {type(dense).__name__} has no memory")
    return address
