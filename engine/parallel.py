"""TensorParallel: this process's place among the tensor-parallel ranks, and the two collectives they share.

The group is its own object, not torch.distributed's default one: two engines live in one process, and a
program that already called ``init_process_group`` is left alone.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tapscope.errors import RankLostError

distributed: Any = torch.distributed  # its type stubs lack most of what is used here


class TensorParallel:
    """Rank ``rank`` of ``size``; with one rank every collective returns its input."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.ep = 1
        """Groups of neighbouring ranks that hold different experts; divides ``size``. Set before the model is built."""
        self.ordered = False
        """Add up in the order of ranks at every element; the library's own order depends on the tensor's size."""
        self._group = group

    @classmethod
    def connect(cls, path: Path, rank: int, size: int, timeout_s: float) -> "TensorParallel":
        """Meet the other ranks through the file ``path`` over loopback; raises RankLostError after ``timeout_s``."""
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        store = distributed.FileStore(str(path), size)
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            return cls(rank, size, distributed.ProcessGroupGloo(store, rank, size, options))
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} could not meet the other {size - 1}: {_first_line(error)}") from error

    def disconnect(self) -> None:
        """Leave the group: ranks that wait for this one in a collective raise RankLostError at once."""
        self._group = None

    def span(self, total: int) -> tuple[int, int]:
        """This rank's [start, end) of ``total`` items; see :func:`span`."""
        return span(total, self.rank, self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks as a new tensor: hooks may still hold the summand. Raises RankLostError."""
        if self._group is None:
            return tensor
        if self.ordered and self.size > 2:  # two summands have one order
            parts = self.all_gather(tensor.reshape(1, -1), tensor.numel() * self.size).view(self.size, *tensor.shape)
            return sum(parts[1:], start=parts[0])
        total = tensor.clone(memory_format=torch.contiguous_format)
        try:
            self._group.allreduce([total]).wait()
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} lost a peer in an all-reduce: {_first_line(error)}") from error
        return total

    def all_gather(self, tensor: Tensor, width: int) -> Tensor:
        """Join column shards: [rows, this rank's span of ``width``] -> [rows, width]. Raises RankLostError.

        Shards travel padded to the widest one and are cut back, so ``width`` need not divide.
        """
        if self._group is None:
            return tensor
        widths = [end - start for start, end in (span(width, rank, self.size) for rank in range(self.size))]
        padded = tensor.new_zeros(tensor.shape[0], widths[0])
        padded[:, : tensor.shape[1]] = tensor
        shards = [torch.empty_like(padded) for _ in widths]
        try:
            self._group.allgather([shards], [padded]).wait()
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} lost a peer in an all-gather: {_first_line(error)}") from error
        return torch.cat([shard[:, :columns] for shard, columns in zip(shards, widths, strict=True)], dim=1)


def span(total: int, rank: int, size: int) -> tuple[int, int]:
    """Block ``rank`` of ``total`` items in ``size``, [start, end): the first ones hold one more where need be."""
    block, longer = divmod(total, size)
    return rank * block + min(rank, longer), (rank + 1) * block + min(rank + 1, longer)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
