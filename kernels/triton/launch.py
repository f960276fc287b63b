"""What the wrappers of all kernels share: checks of tensors, and sizes that the device has."""

import functools

import torch
from torch import Tensor

from tapscope.errors import UsageError
from tapscope.kernels.triton import is_interpreted, why_not

_INTERPRETED_SMS = 2
"""Keeps grids small where each program is Python."""


@functools.lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    if is_interpreted():
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def check_device(device: torch.device) -> None:
    """Raise UsageError where the kernels do not run on ``device``."""
    reason = why_not(device)
    if reason is not None:
        raise UsageError(f"no Triton kernel for tensors on {device}: {reason}")


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise UsageError unless all tensors lie on one device that the kernels run on."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise UsageError(f"tensors of one kernel lie on {', '.join(sorted(map(str, devices)))}; one device is needed")
    check_device(devices.pop())


@functools.lru_cache(maxsize=64)
def check_stored(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError where kernels cannot convert a stored ``dtype`` on ``device``."""
    if dtype != torch.float8_e4m3fn or is_interpreted():
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UsageError(f"float8_e4m3fn needs compute capability 8.9, {device} has {capability}; take float8_e5m2")


def next_power(count: int) -> int:
    """The least power of two that is not less than ``count``."""
    return 1 << max(0, count - 1).bit_length()
