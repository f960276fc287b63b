"""Depthwise causal convolution over a few positions before a recurrence: its weight, computation and window state."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard


class ConvWeight(CheckpointModule):
    """Weight of a depthwise convolution over the channels of this rank's queries, keys and values.

    As in transformers, the module is never called: the layer computes the convolution.
    """

    def __init__(self, parts: tuple[Shard, ...], kernel: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.parts, self.kernel = parts, kernel
        count = sum(part.count for part in parts)
        self.weight = parameter(count, 1, kernel, dtype=dtype)
        self.bias = parameter(count, dtype=dtype) if bias else None

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's channels of each part."""
        shape, offset = (sum(part.total for part in self.parts), 1, self.kernel), 0
        for part, into in zip(self.parts, torch.split(self.weight, [part.count for part in self.parts]), strict=True):
            yield WeightSlice(f"{path}.weight", shape, into, 0, offset + part.start)
            offset += part.total
        if self.bias is not None:
            offset = 0
            for part, into in zip(self.parts, torch.split(self.bias, [p.count for p in self.parts]), strict=True):
                yield WeightSlice(f"{path}.bias", shape[:1], into, 0, offset + part.start)
                offset += part.total


def causal_conv(rows: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolve n rows [..., n, channels] that follow ``window`` [..., channels, kernel - 1], depthwise and causal.

    ``weight`` is [channels, kernel], ``bias`` [channels]. Returns [..., n, channels] and the window after the rows.
    """
    seen, taps = torch.cat((window.mT, rows), dim=-2), weight.float()
    wide, count, kernel = seen.float(), rows.shape[-2], weight.shape[1]
    output = wide[..., :count, :] * taps[:, 0]
    for tap in range(1, kernel):
        output += wide[..., tap : tap + count, :] * taps[:, tap]
    if bias is not None:
        output += bias
    return output.to(rows.dtype), seen[..., -(kernel - 1) :, :].mT


def windows_after(rows: Tensor, window: Tensor) -> Tensor:
    """Return the window of :func:`causal_conv` after each of n rows [n, channels]: [n, channels, kernel - 1]."""
    return torch.cat((window.mT, rows)).unfold(0, window.shape[-1], 1)[1:].contiguous()
