"""WeightGroup: the process group in which a trainer broadcasts new weights to the ranks of an engine.

The group is created as in SGLang and the trainers that update it (slime, verl, OpenRLHF): a rendezvous at the trainer's
address, a store prefixed with the group's name, and PyTorch's helper for a group separate from the default one.
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from tapscope.core.dtypes import NAMES
from tapscope.core.errors import UsageError

c10d: Any = distributed_c10d
distributed: Any = torch.distributed
BACKENDS = ("gloo", "nccl")


class WeightGroup:
    """Rank ``rank`` of a group of ``world_size``; the trainer is rank 0."""

    def __init__(
        self, address: str, port: int, *, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Join the group at ``address``, where rank 0 listens. Raises UsageError after ``timeout_s``."""
        self.name, self.backend = name, backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        timeout = timedelta(seconds=timeout_s)
        what = f"group {name!r} at {address}:{port}"
        try:
            store, _, _ = next(iter(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)))
            store.set_timeout(timeout)
            prefixed = distributed.PrefixStore(name, store)
            self._group, _ = c10d._new_process_group_helper(
                world_size, rank, [], backend, prefixed, group_name=name, timeout=timeout
            )
            # required by destroy_process_group
            c10d._world.pg_group_ranks[self._group] = {each: each for each in range(world_size)}
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"rank {rank} of {world_size} could not join {what}: {reason}") from None

    def broadcast(self, tensor: Tensor) -> None:
        """Receive rank 0's values into ``tensor``, contiguous and on :attr:`device`.

        Raises UsageError if a rank is lost.
        """
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"no weights arrived in group {self.name!r}; destroy it: {reason}") from None

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Receive the tensors that rank 0 broadcasts, in the given order. Raises UsageError."""
        tensors = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensors[name] = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
            self.broadcast(tensors[name])
        return tensors

    def close(self) -> None:
        """Leave the group."""
        distributed.destroy_process_group(self._group)


def check_metadata(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
    """Return the dtype names without ``torch.``. Raises UsageError for tensors that cannot be received."""
    if not len(names) == len(dtypes) == len(shapes):
        raise UsageError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one each")
    names_of_dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
    unknown = next((dtype for dtype in names_of_dtypes if dtype not in NAMES), None)
    if unknown is not None:
        raise UsageError(f"unknown dtype {unknown!r}; supported: {', '.join(NAMES)}")
    for name, shape in zip(names, shapes, strict=True):
        if any(size < 0 for size in shape) or math.prod(shape) > 1 << 40:
            raise UsageError(f"{name} has the invalid shape {list(shape)}")
    return names_of_dtypes
