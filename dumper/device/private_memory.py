"""Device memory outside the pools of CUDA graphs.

In a thread that captures a graph, and in one where ``torch.compile`` warms a graph up, the allocator takes everything
from the graph's pool. Its owner takes that memory back, and fails where a tensor is still held. So another thread,
which takes part in no capture, allocates what outlives the call.
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
    """Call ``function`` in the other thread and wait for it."""
    if not _executor:
        _executor.append(ThreadPoolExecutor(1, "tapscope-allocator"))

    def run() -> _T:
        with cuda_graphs.relaxed():
            return function()

    return _executor[0].submit(run).result()


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor in memory of its own."""
    return call_apart(lambda: torch.empty(shape, dtype=dtype, device=device))


def copy_apart(tensor: Tensor) -> Tensor:
    """A dense copy in memory of its own, made in the current stream."""
    target = allocate(tuple(tensor.shape), tensor.dtype, tensor.device)
    return target.copy_(tensor.detach())


def is_pooled() -> bool:
    """Whether what this thread allocates may come from the pool of a graph of ``torch.compile``."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None)
    return containers is None or bool(containers)
