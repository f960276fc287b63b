"""Copies of host values to the device without a host synchronization."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy ``values`` to a tensor on ``device`` without waiting for the device.

    ``torch.tensor(values, device="cuda")`` would wait: it copies from pageable memory and synchronizes the stream.
    """
    if isinstance(values, np.ndarray):
        host = torch.from_numpy(values)
        return (host.pin_memory() if device.type == "cuda" else host).to(device, dtype, non_blocking=True)
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
