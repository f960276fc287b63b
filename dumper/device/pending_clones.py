"""PendingClones: staging clones in device memory whose copies to the host are pending."""

import functools
import math
import threading
import weakref
from collections import deque

import torch


class PendingClones:
    """Weak references to staging clones, by device, the stream that wrote the clone, and size in bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[
            tuple[torch.device, int, int], deque[tuple[torch.cuda.Event, weakref.ref[torch.Tensor]]]
        ] = {}

    def __len__(self) -> int:
        """Return the number of (device, stream, size) queues, including queues whose clones have been freed."""
        return len(self._queues)

    def add(self, stream: torch.cuda.Stream, clone: torch.Tensor, copied: torch.cuda.Event) -> None:
        """Register a clone; it may be overwritten once the event ``copied`` completes."""
        place = clone.device, stream.cuda_stream, clone.nbytes
        with self._lock:
            if place not in self._queues:
                self._forget_arrived()
            queue = self._queues.setdefault(place, deque())
            while queue and queue[0][1]() is None:
                queue.popleft()
            queue.append((copied, weakref.ref(clone)))

    def _forget_arrived(self) -> None:
        """Drop queues without live clones: sizes change with the number of tokens in a step."""
        self._queues = {
            place: queue for place, queue in self._queues.items() if any(clone() is not None for _, clone in queue)
        }

    def overwrite(self, stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy ``tensor`` into the memory of the oldest clone of its size; returns None if there is no clone.

        ``stream``, which must be the current stream, waits until that clone has been copied to the host.
        """
        oldest = self._take((tensor.device, stream.cuda_stream, tensor.nbytes))
        if oldest is None:
            return None
        copied, clone = oldest
        stream.wait_event(copied)
        with torch.inference_mode(False):  # a new tensor, because a view would inherit the clone's inference mode
            reused = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            reused.set_(clone.untyped_storage(), 0, tensor.shape, dense_strides(tensor.shape))
        with torch.no_grad():
            return reused.copy_(tensor, non_blocking=True)

    def _take(self, place: tuple[torch.device, int, int]) -> tuple[torch.cuda.Event, torch.Tensor] | None:
        with self._lock:
            queue = self._queues.get(place)
            while queue:
                copied, reference = queue.popleft()
                if (clone := reference()) is not None:
                    return copied, clone
        return None


@functools.lru_cache(maxsize=4096)
def dense_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
