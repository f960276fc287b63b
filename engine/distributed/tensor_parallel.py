"""TensorParallel: one process's rank among the tensor-parallel ranks, and their two collectives.

The group is its own object, not torch.distributed's default one: two engines live in one process, and a
program that already called ``init_process_group`` is not affected.
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
"""How long an abort may take that waits for graphs which could not be destroyed."""
_IDLE_S = 5.0
"""How long the device may take to finish, or after an abort to give up, what was launched."""
_WATCHED = timedelta(days=7)  # for collectives of watched ranks: the watchdog ends them long before


class TensorParallel:
    """Rank ``rank`` of ``size``; with one rank every collective returns its input."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, gpu_group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.ep = 1
        """Number of expert-parallel groups of adjacent ranks; divides ``size``. Set before the model is built."""
        self.ordered = False
        """Whether all-reduce adds in rank order; the library's own order depends on the tensor's size."""
        self.device: torch.device | None = None
        """Device of this rank, once it is known."""
        self._group = group
        self._gpu_group = gpu_group
        self._one_shot: OneShotAllReduce | None = None
        self._is_lost = False
        self._is_rehearsing = False
        self._aborting = threading.Lock()
        self._unwatch: int | None = None
        self._graph_releases: list[Callable[[], None]] = []
        self.heartbeat = Heartbeat()
        """Activity of this rank, for its watchdog."""
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
        """Meet the other ranks through the file ``path`` over loopback; raises RankLostError after ``timeout_s``.

        Collectives of watched ranks have no timeout: the watchdog kills the rank that the others wait for. Unless
        ``custom_all_reduce`` is False, such ranks add small tensors with one kernel, on GPUs that can read each other's
        memory; elsewhere True is reported to be without effect.
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
        """Meet the other ranks through ``store``, listening on ``hostname``; raises RankLostError after ``timeout_s``.

        A collective fails after ``collective_s`` (None: ``timeout_s``), and never times out among watched ranks.

        Tensors on the CPU use gloo; those on ``device``, where it is a GPU, use NCCL.
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
        """Whether small tensors on GPUs are added up by one kernel; see :class:`OneShotAllReduce`."""
        return self._one_shot is not None

    def watch(self, sentinels: Sequence[int]) -> None:
        """Abort once one of these descriptors is readable, which means that a peer's process has ended.

        Needed on GPUs only, where a kernel waits for the peer and this rank for the kernel; gloo detects it by itself.
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
        """Raise RankLostError when a peer has ended: later results may be wrong."""
        if self._is_lost:
            raise RankLostError(f"rank {self.rank} lost a peer")

    def _abort(self) -> None:
        """Make running collectives on GPUs return and later ones raise; callable from any thread.

        NCCL then waits until no CUDA graph contains its collectives, and meanwhile blocks threads that start another.
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
        """CUDA graphs with collectives will be captured; ``apart``: also in steps where other ranks capture nothing."""
        if apart:  # else NCCL's ranks exchange addresses of buffers during a capture, and would wait for one another
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # In the stream of the caller: an all-reduce of a few rows takes 8 instead of 10 µs.
        self._reduce_options.asyncOp = self._gather_options.asyncOp = False

    def release_first(self, release: Callable[[], None]) -> None:
        """``release`` destroys CUDA graphs with collectives: it is called before this rank disconnects."""
        if self.size > 1:
            self._graph_releases.append(release)

    @contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """:meth:`release_first` for graphs that only exist inside."""
        self.release_first(release)
        try:
            yield
        finally:
            with suppress(ValueError):  # it was called
                self._graph_releases.remove(release)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Collectives inside do not reach the other ranks: shapes are right and values meaningless, as in a warm-up."""
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def _release_graphs(self) -> None:
        while self._graph_releases:
            self._graph_releases.pop()()

    def _becomes_idle(self) -> bool:
        """Whether the device has nothing more to compute, now or soon; only asked where graphs must be released."""
        stream: Any = torch.cuda.current_stream(self.device)
        deadline = time.monotonic() + _IDLE_S
        try:
            while self._graph_releases and not stream.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except RuntimeError:  # an error on the device: every later call fails too
            return False
        return True

    def _is_idle(self) -> bool:
        """Whether the device has computed everything; False if it failed."""
        try:
            return bool(torch.cuda.current_stream(self.device).query())
        except RuntimeError:
            return False

    def disconnect(self) -> None:
        """Leave the group: ranks that wait for this one in a collective raise RankLostError. Safe to call twice."""
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            os.close(unwatch)
        if not self._is_lost and self._gpu_group is not None and self._becomes_idle():
            self._release_graphs()
        self._abort()  # freeing an active group would wait for ranks that have ended
        if self._one_shot is not None and self._is_idle():
            self._one_shot.close()
        self._group = self._gpu_group = self._one_shot = None

    def span(self, total: int) -> tuple[int, int]:
        """This rank's [start, end) of ``total`` items; see :func:`span`."""
        return span(total, self.rank, self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks as a new tensor, since hooks may still hold the input. Raises RankLostError."""
        if self._group is None:
            return tensor
        if self.ordered and self.size > 2:  # two terms have only one order
            parts = self.all_gather(tensor.reshape(1, -1), tensor.numel() * self.size).view(self.size, *tensor.shape)
            return sum(parts[1:], start=parts[0])
        if self._one_shot is not None and self._one_shot.takes(tensor) and not self._is_rehearsing:
            self.check()
            return self._one_shot(tensor)
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._wait_for(lambda: self._group_of(total).allreduce([total], self._reduce_options), "an all-reduce")
        return total

    def all_gather(self, tensor: Tensor, width: int) -> Tensor:
        """Join column shards: [rows, this rank's span of ``width``] -> [rows, width]. Raises RankLostError.

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
        """Start a collective and wait for it; raises RankLostError."""
        if self._is_rehearsing:
            return
        self.heartbeat.set_activity(Activity.WAITING)
        try:
            if (work := start()) is not None:  # None: it runs in the stream of the caller
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
    """A communicator on ``device``, connected eagerly so that errors appear at startup."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl/", store), rank, size, options)
    group.eager_connect_single_device(device)
    return group


def span(total: int, rank: int, size: int) -> tuple[int, int]:
    """Block ``rank`` of ``total`` items in ``size`` blocks, [start, end); the first blocks hold one more if needed."""
    block, longer = divmod(total, size)
    return rank * block + min(rank, longer), (rank + 1) * block + min(rank + 1, longer)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
