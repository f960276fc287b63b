"""TensorParallel: one process's rank in the tensor-parallel group, with the two collectives of the group.

The group is independent of torch.distributed's default group: two engines can live in one process, and programs that
already called ``init_process_group`` are unaffected.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d

from tapscope.core.errors import RankLostError
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat
from tapscope.engine.distributed.one_shot_all_reduce import OneShotAllReduce

_log = logging.getLogger(__name__)
distributed: Any = torch.distributed  # its type stubs lack most of what is used here
c10d: Any = distributed_c10d

_ABORT_S = 10.0
"""Maximum duration of an abort that waits for graphs that could not be destroyed."""
_IDLE_S = 5.0
"""Maximum time for the device to finish launched work or, after an abort, to cancel it."""
_WATCHED = timedelta(days=7)  # timeout of collectives of watched ranks, which the watchdog ends long before


class TensorParallel:
    """Rank ``rank`` of ``size`` ranks. With one rank, every collective returns its input."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, gpu_group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.ep = 1
        """Number of expert-parallel groups of adjacent ranks; divides ``size``. Set before the model is built."""
        self.ordered = False
        """Whether all-reduce adds in rank order. The order of NCCL and gloo depends on the tensor's size."""
        self.device: torch.device | None = None
        """Device of this rank; None until it is known."""
        self._group = group
        self._gpu_group = gpu_group
        self._one_shot: OneShotAllReduce | None = None
        self._is_lost = False
        self._is_rehearsing = False
        self._aborting = threading.Lock()
        self._unwatch: int | None = None
        self._graph_releases: list[Callable[[], None]] = []
        self.heartbeat = Heartbeat()
        """Heartbeat of this rank, read by its watchdog."""
        self._reduce_options: Any = distributed.AllreduceOptions()
        self._gather_options: Any = c10d.AllgatherOptions()

    @classmethod
    def connect(
        cls,
        path: Path,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device | None = None,
        *,
        is_watched: bool = False,
        custom_all_reduce: bool | None = False,
    ) -> "TensorParallel":
        """Connect to the other ranks over loopback, through the file ``path``.

        Collectives of watched ranks have no timeout: the watchdog kills a rank that blocks the others. Unless
        ``custom_all_reduce`` is False, watched ranks reduce small tensors with a single kernel if their GPUs can read
        each other's memory. If not, True logs a warning that it has no effect. Raises RankLostError after
        ``timeout_s``.
        """
        store = distributed.FileStore(str(path), size)
        tp = cls.join(store, rank, size, timeout_s, device, is_watched=is_watched)
        if tp._gpu_group is None:
            if custom_all_reduce:
                _log.warning("custom_all_reduce has no effect: the ranks have no GPUs")
        elif custom_all_reduce is not False and is_watched:
            assert device is not None
            is_asked = custom_all_reduce is True
            try:
                tp._one_shot = OneShotAllReduce.connect(store, rank, size, device, is_asked=is_asked)
            except RuntimeError as error:
                raise RankLostError(f"rank {rank} lost a peer at the start: {_first_line(error)}") from error
        return tp

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device | None = None,
        hostname: str = "127.0.0.1",
        *,
        is_watched: bool = False,
        collective_s: float | None = None,
    ) -> "TensorParallel":
        """Connect to the other ranks through ``store``, listening on ``hostname``.

        A collective fails after ``collective_s`` (None: ``timeout_s``); among watched ranks it never times out.

        CPU tensors use gloo; tensors on ``device``, if it is a GPU, use NCCL. Raises RankLostError after ``timeout_s``.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            store.set_timeout(timeout)
            group = _gloo(store, rank, size, timeout, hostname)
            is_gpu = device is not None and device.type == "cuda"
            limit = _WATCHED if is_watched else timedelta(seconds=collective_s or timeout_s)
            tp = cls(rank, size, group, _nccl(store, rank, size, limit, device) if is_gpu else None)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} could not join the other {size - 1}: {_first_line(error)}") from error
        tp.device = device
        if limit != timeout:
            tp._reduce_options.timeout = tp._gather_options.timeout = limit
        return tp

    @property
    def has_custom_all_reduce(self) -> bool:
        """Whether small GPU tensors are reduced by a single kernel, see :class:`OneShotAllReduce`."""
        return self._one_shot is not None

    def watch(self, sentinels: Sequence[int]) -> None:
        """Abort as soon as one of these descriptors is readable, which means that a peer's process has ended.

        Only needed on GPUs, where a kernel waits for the peer and this rank waits for the kernel; gloo detects lost
        peers itself.
        """
        if self._gpu_group is None:
            return
        stop, self._unwatch = os.pipe()

        def until_one_ends() -> None:
            if stop not in connection.wait([*sentinels, stop]):
                self._abort()
            os.close(stop)

        threading.Thread(target=until_one_ends, name="tapscope-peers", daemon=True).start()

    def check(self) -> None:
        """Raise RankLostError if a peer has ended, in which case later results may be wrong."""
        if self._is_lost:
            raise RankLostError(f"rank {self.rank} lost a peer")

    def _abort(self) -> None:
        """Make running GPU collectives return and later ones raise. Thread-safe.

        NCCL's abort waits until no CUDA graph contains its collectives, and meanwhile blocks threads that start another
        one.
        """
        with self._aborting:
            was_lost, self._is_lost = self._is_lost, True
            if self._gpu_group is None or was_lost:
                return
            if self._one_shot is not None:
                self._one_shot.abort()
            abort = threading.Thread(target=self._gpu_group.abort, name="tapscope-abort", daemon=True)
            abort.start()
            if self._becomes_idle():
                self._release_graphs()
            abort.join(_ABORT_S if self._graph_releases else None)

    def capture_collectives(self, *, apart: bool = False) -> None:
        """Prepare for capturing collectives in CUDA graphs.

        ``apart``: whether this rank also captures in steps in which other ranks capture nothing.
        """
        if apart:  # by default, NCCL exchanges buffer addresses during a capture, and ranks would wait for each other
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # Launch in the caller's stream: an all-reduce of a few rows takes 8 instead of 10 µs.
        self._reduce_options.asyncOp = self._gather_options.asyncOp = False

    def release_first(self, release: Callable[[], None]) -> None:
        """Register ``release``, which destroys CUDA graphs with collectives, to run before this rank disconnects."""
        if self.size > 1:
            self._graph_releases.append(release)

    @contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """Context manager: :meth:`release_first` for graphs that exist only inside."""
        self.release_first(release)
        try:
            yield
        finally:
            with suppress(ValueError):  # ``release`` was already called
                self._graph_releases.remove(release)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context manager: collectives inside do not communicate; shapes are right but values are meaningless.

        Used for warm-up.
        """
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def _release_graphs(self) -> None:
        while self._graph_releases:
            self._graph_releases.pop()()

    def _becomes_idle(self) -> bool:
        """Return whether the device finishes its work within ``_IDLE_S``. Waits only if graphs must be released."""
        stream: Any = torch.cuda.current_stream(self.device)
        deadline = time.monotonic() + _IDLE_S
        try:
            while self._graph_releases and not stream.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except RuntimeError:  # after a device error, every later call fails too
            return False
        return True

    def _is_idle(self) -> bool:
        """Return whether the device has finished all work; False if it failed."""
        try:
            return bool(torch.cuda.current_stream(self.device).query())
        except RuntimeError:
            return False

    def disconnect(self) -> None:
        """Leave the group: ranks that wait for this one in a collective raise RankLostError. Idempotent."""
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            os.close(unwatch)
        if not self._is_lost and self._gpu_group is not None and self._becomes_idle():
            self._release_graphs()
        self._abort()  # destroying an active group would wait for ranks that have ended
        if self._one_shot is not None and self._is_idle():
            self._one_shot.close()
        self._group = self._gpu_group = self._one_shot = None

    def span(self, total: int) -> tuple[int, int]:
        """Return this rank's [start, end) of ``total`` items, see :func:`span`."""
        return span(total, self.rank, self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks as a new tensor, because hooks may still hold the input. Raises RankLostError."""
        if self._group is None:
            return tensor
        if self.ordered and self.size > 2:  # the sum of two terms does not depend on their order
            parts = self.all_gather(tensor.reshape(1, -1), tensor.numel() * self.size).view(self.size, *tensor.shape)
            return sum(parts[1:], start=parts[0])
        if self._one_shot is not None and self._one_shot.takes(tensor) and not self._is_rehearsing:
            self.check()
            return self._one_shot(tensor)
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._wait_for(lambda: self._group_of(total).allreduce([total], self._reduce_options), "an all-reduce")
        return total

    def all_gather(self, tensor: Tensor, width: int) -> Tensor:
        """Concatenate column shards: [rows, this rank's span of ``width``] -> [rows, width]. Raises RankLostError.

        Shards are padded to the widest one for the transfer, so ``width`` need not be divisible.
        """
        if self._group is None:
            return tensor
        widths = [end - start for start, end in (span(width, rank, self.size) for rank in range(self.size))]
        padded = tensor.new_zeros(tensor.shape[0], widths[0])
        padded[:, : tensor.shape[1]] = tensor
        shards = [torch.empty_like(padded) for _ in widths]
        gather = self._group_of(padded).allgather
        self._wait_for(lambda: gather([shards], [padded], self._gather_options), "an all-gather")
        return torch.cat([shard[:, :columns] for shard, columns in zip(shards, widths, strict=True)], dim=1)

    def _wait_for(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective and wait for it. Raises RankLostError; ``what`` names the collective in the message."""
        if self._is_rehearsing:
            return
        self.heartbeat.set_activity(Activity.WAITING)
        try:
            if (work := start()) is not None:  # None: runs in the caller's stream
                work.wait()
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} lost a peer in {what}: {_first_line(error)}") from error
        finally:
            self.heartbeat.set_activity(Activity.WORKING)

    def _group_of(self, tensor: Tensor) -> Any:
        return self._gpu_group if tensor.is_cuda else self._group


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, hostname: str) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=hostname)]
    options._timeout = timeout
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device | None) -> Any:
    """Create a communicator on ``device``, connected eagerly so that errors appear at startup."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl/", store), rank, size, options)
    group.eager_connect_single_device(device)
    return group


def span(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return [start, end) of block ``rank`` of ``total`` items in ``size`` blocks; the first blocks may be longer by
    one.
    """
    block, longer = divmod(total, size)
    return rank * block + min(rank, longer), (rank + 1) * block + min(rank + 1, longer)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
