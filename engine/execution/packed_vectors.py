"""PackedVectors: vectors copied to the device together, in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tapscope.engine.execution.streams import current_stream

cuda: Any = torch.cuda  # parts of it have no type hints
Vector = Sequence[int] | np.ndarray
_MOST_VIEWS = 512
"""Maximum number of cached views, mainly those of decode steps."""


class PackedVectors:
    """Several vectors of one dtype, packed in one host and one device buffer: one copy per step.

    On CUDA there are two pinned host buffers, used alternately, so that a step can be loaded while the previous one is
    still being copied.
    """

    def __init__(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(count * size, dtype=dtype, pin_memory=is_cuda) for _ in range(1 + is_cuda)]
        self._copied = [cuda.Event() for _ in self._hosts] if is_cuda else []
        self._device = self._hosts[0].to(device)
        self._views: dict[tuple[int, ...], list[Tensor]] = {}
        self._arrays = [host.numpy() for host in self._hosts]
        self._staged: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._host_index = 0

    def load(self, vectors: Sequence[Vector]) -> list[Tensor]:
        """Copy the vectors to the device and return their :meth:`views`."""
        given, kept = self.stage(vectors)
        kept.copy_(given, non_blocking=True)
        self.mark_read()
        return self.views([len(vector) for vector in vectors])

    def stage(self, vectors: Sequence[Vector]) -> tuple[Tensor, Tensor]:
        """Write the vectors to a host buffer; return (source, destination) of the copy before :meth:`mark_read`."""
        self._host_index = (self._host_index + 1) % len(self._hosts)
        array, end = self._arrays[self._host_index], 0
        if self._copied:
            self._copied[self._host_index].synchronize()
        for vector in vectors:
            begin, end = end, end + len(vector)
            array[begin:end] = vector
        place = self._host_index, end
        if place not in self._staged:
            if len(self._staged) >= _MOST_VIEWS:
                self._staged.clear()
            with torch.inference_mode(False):  # cached views outlive the caller's mode
                self._staged[place] = self._hosts[self._host_index][:end], self._device[:end]
        return self._staged[place]

    def mark_read(self) -> None:
        """Allow the host buffer to be overwritten once the device has reached this point."""
        if self._copied:
            self._copied[self._host_index].record(current_stream(self._device.get_device()))

    def views(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return device views of vectors of the given lengths, at the same addresses in every step."""
        key = tuple(sizes)
        if key not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # cached views outlive the caller's mode
                self._views[key] = list(torch.split(self._device[: sum(key)], list(key)))
        return list(self._views[key])
