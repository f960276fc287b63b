"""MachineLimits: memory bandwidth and matrix multiplication throughput of this machine, measured in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

_READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
_SIDE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Hardware limits, as the best of several measurements; load from other programs lowers them."""

    read_bytes_per_s: float
    """Read bandwidth, measured by summing a buffer much larger than the caches."""
    flops_per_s: float
    """Throughput of a square matrix multiplication in the model's dtype."""
    dtype: str
    threads: int

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> "MachineLimits":
        """Measure on ``device``; takes about a second."""
        flops = _flops_per_s(device, dtype)
        name = str(dtype).removeprefix("torch.")
        threads = torch.get_num_threads()
        return cls(read_bytes_per_s=_read_bytes_per_s(device), flops_per_s=flops, dtype=name, threads=threads)


def _read_bytes_per_s(device: torch.device) -> float:
    buffer = torch.ones(_READ_BYTES[device.type] // 8, dtype=torch.int64, device=device)
    return buffer.numel() * buffer.element_size() / _best(buffer.sum, device)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE[device.type]
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(left)
    return 2 * side**3 / _best(lambda: torch.mm(left, right, out=out), device)


def _best(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls, including device synchronization."""
    seconds = []
    for _ in range(_REPEATS):
        _wait(device)
        begun = perf_counter()
        function()
        _wait(device)
        seconds.append(perf_counter() - begun)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
