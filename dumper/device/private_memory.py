"""Allocation of device memory outside the memory pools of CUDA graphs.

In a thread that captures a graph, or in which ``torch.compile`` warms up a graph, the allocator serves every allocation
from the graph's pool. The pool's owner reclaims that memory and fails if a tensor in it is still referenced. Tensors
that outlive the call are therefore allocated in a separate thread that takes part in no capture.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from tapscope.dumper.device import cuda_graphs

_T = TypeVar("_T")
_executor: list[ThreadPoolExecutor] = []


def call_apart(function: Callable[[], _T]) -> _T:
    """Call ``function`` in the allocator thread; waits for it and returns its result."""
    if not _executor:
        _executor.append(ThreadPoolExecutor(1, "tapscope-allocator"))

    def run() -> _T:
        with cuda_graphs.relaxed():
            return function()

    return _executor[0].submit(run).result()


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor outside of any graph pool."""
    return call_apart(lambda: torch.empty(shape, dtype=dtype, device=device))


def copy_apart(tensor: Tensor) -> Tensor:
    """Return a contiguous copy outside of any graph pool; the copy runs in the current stream."""
    target = allocate(tuple(tensor.shape), tensor.dtype, tensor.device)
    return target.copy_(tensor.detach())


def is_pooled() -> bool:
    """Return whether allocations of this thread may come from the pool of a ``torch.compile`` CUDA graph."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None)
    return containers is None or bool(containers)
