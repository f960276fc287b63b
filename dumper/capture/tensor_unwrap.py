"""Unwrapping of tensors that are not a single dense strided block of memory into parts that can be recorded.

* sparse: ``indices`` (or ``crow_indices`` and ``col_indices``, ...), ``values`` and ``shape``;
* MKL-DNN layout: ``dense``;
* quantized by torch: ``int_repr``, ``scale``, ``zero_point``, and ``axis`` if quantized per channel;
* nested, strided: ``values`` and ``sizes``, or the components by index if not contiguous;
* nested, jagged: the tensors of ``__tensor_flatten__``;
* any class with ``__tensor_flatten__``: the inner tensors by name, without leading underscores;
* DTensor: this rank's shard, with its placements;
* a dtype that records cannot name (``float4_e2m1fn_x2``): ``bytes`` and ``dtype``.

Each part gets its own port: ``out[indices]``, ``out[0.values]``, ``in[x.scale]``, ``out[indices].grad``.
"""

from typing import Any, NamedTuple

import torch

from tapscope.dumper.capture.pending_collectives import CollectivePending
from tapscope.dumper.records import snapshot
from tapscope.dumper.records.dtensor_dims import Placement, placement_of
from tapscope.dumper.records.snapshot import UnsupportedTensor

Parts = list[tuple[str, Any]]

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class DenseTensor(NamedTuple):
    """The dense strided tensor to record."""

    tensor: torch.Tensor
    placement: Placement | None = None
    """Placement of the whole tensor on the mesh, if ``tensor`` is a shard."""


def unwrap(tensor: torch.Tensor) -> DenseTensor | Parts:
    """Return the dense tensor to record, or the named parts, which may need unwrapping as well.

    Never synchronizes or communicates. Raises :class:`UnsupportedTensor` with the reason if there is no readable
    memory, and :class:`CollectivePending` if a collective is still computing the tensor.
    """
    if _is_collective(tensor):
        return unwrap(_collected(tensor))
    if hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor"):
        inner = unwrap(tensor._local_tensor)
        return DenseTensor(inner.tensor, placement_of(tensor)) if isinstance(inner, DenseTensor) else inner
    parts = _parts(tensor)
    return DenseTensor(snapshot.local_tensor(tensor)) if parts is None else parts


def _parts(tensor: torch.Tensor) -> Parts | None:
    if snapshot.is_functional(tensor):
        return None  # local_tensor() raises the reason
    if tensor.is_nested and tensor.layout is torch.strided:
        return _nested(tensor)
    if hasattr(type(tensor), "__tensor_flatten__"):
        names = list(tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        return [(name.lstrip("_") or name, getattr(tensor, name)) for name in names]
    if tensor.layout is not torch.strided:
        return _sparse(tensor.detach())
    if tensor.is_quantized:
        return _quantized(tensor)
    if not snapshot.has_name(tensor.dtype) and not tensor.is_meta:
        return _raw(tensor)
    return None


def _sparse(tensor: torch.Tensor) -> Parts:
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return [("dense", tensor.to_dense())]
    if tensor.layout is torch.sparse_coo:
        return [("indices", tensor._indices()), ("values", tensor._values()), ("shape", list(tensor.shape))]
    names = _COMPRESSED.get(tensor.layout)
    if names is None:
        raise UnsupportedTensor(f"layout {tensor.layout} is not supported")
    indices = [(name, getattr(tensor, name)()) for name in names]
    return [*indices, ("values", tensor.values()), ("shape", list(tensor.shape))]


def _quantized(tensor: torch.Tensor) -> Parts:
    parts: Parts = [("int_repr", tensor.int_repr())]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [*parts, ("scale", tensor.q_scale()), ("zero_point", tensor.q_zero_point())]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [*parts, ("scale", scales), ("zero_point", zeros), ("axis", tensor.q_per_channel_axis())]


def _nested(tensor: torch.Tensor) -> Parts:
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        return [(str(i), child) for i, child in enumerate(tensor.unbind())]
    return [("values", tensor.values()), ("sizes", tensor._nested_tensor_size())]


def _raw(tensor: torch.Tensor) -> Parts | None:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    try:
        plain = tensor.detach().contiguous().view(torch.uint8)
    except RuntimeError as error:
        raise UnsupportedTensor(f"dtype {tensor.dtype} is not supported: {error}") from None
    return [("bytes", plain), ("dtype", str(tensor.dtype).removeprefix("torch."))]


def _is_collective(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "trigger_wait") and hasattr(tensor, "elem")


def _collected(tensor: Any) -> torch.Tensor:
    """Return the result of a collective without waiting; raises :class:`CollectivePending` if it is in progress."""
    if not tensor.completed:
        raise CollectivePending(tensor)
    inner: torch.Tensor = tensor.elem
    return inner
