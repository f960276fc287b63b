"""OneShotAllReduce: all-reduce of small tensors in a single kernel that reads the memory of peer GPUs."""

import logging
from typing import Any

import torch
from torch import Tensor

from tapscope.engine.distributed.peer_memory import PeerMemory, PeerMemoryError
from tapscope.kernels.triton import why_not

_log = logging.getLogger(__name__)
_MAX_READ_BYTES = 512 << 10
"""Maximum bytes that a rank reads from its peers per call; above, NCCL is faster (two H200s,
benchmarks/all_reduce.py).
"""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class OneShotAllReduce:
    """:func:`tapscope.kernels.triton.all_reduce.all_reduce` among watched ranks.

    Like NCCL's kernels among watched ranks, the kernel waits for peers without a timeout, until :meth:`abort`.
    """

    def __init__(self, memory: PeerMemory, rank: int, size: int, device: torch.device) -> None:
        from tapscope.kernels.triton import all_reduce  # imports Triton

        self._kernel = all_reduce.all_reduce
        self._memory, self._rank = memory, rank
        self._max_bytes = min(all_reduce.MAX_BYTES, _MAX_READ_BYTES // (size - 1))
        self._calls = all_reduce.new_calls(device)
        self._give_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    @classmethod
    def connect(
        cls, store: Any, rank: int, size: int, device: torch.device, *, is_asked: bool = True
    ) -> "OneShotAllReduce | None":
        """Set up the all-reduce; collective over all ranks. Returns None on every rank if any cannot map its peers.

        The reason is logged: as a warning if ``is_asked``, meaning that the user requested the kernel, else as info.
        """
        level = logging.WARNING if is_asked else logging.INFO
        reason = why_not(device)
        if reason is not None:  # the same on every rank, because all run the same code on one machine
            _log.log(level, "custom_all_reduce has no effect, NCCL is used: %s", reason)
            return None
        from tapscope.kernels.triton.all_reduce import window_bytes

        try:
            memory = PeerMemory(store, rank, size, window_bytes(size), device)
        except PeerMemoryError as error:
            _log.log(level, "custom_all_reduce has no effect, NCCL is used: %s", error)
            return None
        return cls(memory, rank, size, device)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the kernel supports ``tensor``; the result is the same on all ranks."""
        return tensor.is_cuda and tensor.nbytes <= self._max_bytes and tensor.dtype in _DTYPES

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in rank order and float32, as a new contiguous tensor.

        Undefined after :meth:`abort`.
        """
        return self._kernel(tensor, self._memory.addresses, self._rank, self._calls, self._give_up)

    def abort(self) -> None:
        """Make running and later kernels return immediately. Thread-safe."""
        self._give_up.fill_(1)

    def close(self) -> None:
        """Unmap the peers' memory; no kernel may be running. Idempotent."""
        self._memory.close()
