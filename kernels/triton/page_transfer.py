"""Copy of KV-cache pages of all layers between two pools in one launch; either pool may be in pinned host memory.

    target[layer, target_pages[i]] = source[layer, source_pages[i]]     for every layer and i

cudaMemcpyAsync needs a call for each page and layer. A kernel that reads or writes mapped host memory needs one launch
and saturates the bus with a few programs, which leaves most SMs to the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device

_BLOCK = 2048
"""Words that a program copies per iteration."""
_HOST_PROGRAMS = 64
"""Maximum number of programs for transfers with host memory: enough to saturate the bus."""
_DEVICE_PROGRAMS = 4096
_WORDS = (torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1)


def copy_pages_reference(source: Tensor, target: Tensor, source_pages: Tensor, target_pages: Tensor) -> None:
    """Copy like :func:`copy_pages`, in plain PyTorch."""
    target[:, target_pages.to(target.device)] = source[:, source_pages.to(source.device)].to(target.device)


def copy_pages(source: Tensor, target: Tensor, source_pages: Tensor, target_pages: Tensor) -> None:
    """Copy pages of ``source`` [layers, pages, ...] to ``target`` [layers, other pages, ...], both contiguous.

    ``source_pages`` and ``target_pages`` [n] int64 are on the device. At most one pool may be in (pinned) host
    memory. The copy is asynchronous on the current stream. Target pages must be distinct and must not be among the
    pages read. Raises UsageError for inconsistent tensors; page numbers are not checked.
    """
    check_same_device(source_pages, target_pages)
    device = source_pages.device
    _check(source, target, source_pages, target_pages)
    count, layers = len(source_pages), len(source)
    if not count or not source.numel():
        return
    num_bytes = source[0, 0].numel() * source.element_size()
    dtype, size = next((dtype, size) for dtype, size in _WORDS if num_bytes % size == 0)
    programs = _DEVICE_PROGRAMS if source.device == target.device else _HOST_PROGRAMS
    words = num_bytes // size
    grid = min(programs, count * layers * -(-words // _BLOCK))
    read, written = (pool.view(layers, pool.shape[1], -1).view(dtype) for pool in (source, target))
    args = read, written, source_pages, target_pages, count, layers, source.shape[1], target.shape[1]
    _launch(device, (grid, 1, 1), args, {"WORDS": words, "BLOCK": _BLOCK}, num_warps=8)


def _check(source: Tensor, target: Tensor, source_pages: Tensor, target_pages: Tensor) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    for name, pages in (("source_pages", source_pages), ("target_pages", target_pages)):
        if pages.dtype != torch.int64 or pages.ndim != 1 or not pages.is_contiguous():
            raise UsageError(f"copy_pages: {name} is {pages.dtype} {list(pages.shape)}; expected contiguous int64 [n]")
    if len(source_pages) != len(target_pages):
        raise UsageError(f"copy_pages: {len(source_pages)} source pages, but {len(target_pages)} target pages")
    for name, pool in (("source", source), ("target", target)):
        if pool.ndim < 3 or not pool.is_contiguous():
            raise UsageError(f"copy_pages: {name} is {list(pool.shape)}; expected contiguous [layers, pages, ...]")
        if pool.device != source_pages.device and not (pool.device.type == "cpu" and pool.is_pinned()):
            raise UsageError(f"copy_pages: {name} is on {pool.device}; expected {source_pages.device} or pinned memory")
    if source.dtype != target.dtype or len(source) != len(target) or source.shape[2:] != target.shape[2:]:
        shapes = f"{source.dtype} {list(source.shape)} and {target.dtype} {list(target.shape)}"
        raise UsageError(f"copy_pages: pools differ in dtype, layers or page shape: {shapes}")


@triton.jit(do_not_specialize=["count"])
def _copy_pages_kernel(
    source, target, source_pages, target_pages, count, layers, num_source, num_target,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy blocks of (layer, page) pairs in a grid-stride loop."""
    chunks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * layers * chunks, tl.num_programs(0)):
        page, layer = item // chunks % count, item // chunks // count
        word = item % chunks * BLOCK + tl.arange(0, BLOCK)
        source_offset = (layer.to(tl.int64) * num_source + tl.load(source_pages + page)) * WORDS
        target_offset = (layer.to(tl.int64) * num_target + tl.load(target_pages + page)) * WORDS
        tl.store(
            target + target_offset + word, tl.load(source + source_offset + word, mask=word < WORDS), mask=word < WORDS
        )


_launch = Launcher(_copy_pages_kernel)
