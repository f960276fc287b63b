"""What the wrappers of all kernels share: launches, checks of tensors, and sizes that the device has."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import is_interpreted, why_not

_INTERPRETED_SMS = 2
"""Keeps grids small where each program is Python."""


Arguments = tuple[Tensor | float | None, ...]
"""Launch arguments of a kernel besides its constants."""


class Launcher:
    """Launches one kernel, and remembers what Triton compiled for which arguments.

    Triton recomputes that at every launch, which takes longer than many kernels run: it looks at every argument
    by its name. Here the same facts make one key: constants, types, which pointers and numbers are multiples of 16,
    and which numbers are 1 or need 64 bits.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, JITFunction)
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        args: Arguments,
        constants: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Launch on the current stream of ``device``, which is the current one; ``constants`` come after ``args``."""
        if not self._is_compiled:
            self._kernel[grid](*args, **constants, **options)
            return
        traits = [
            (arg.dtype, arg.data_ptr() % 16 == 0)
            if isinstance(arg, Tensor)
            else (arg == 1, arg % 16 == 0, arg.bit_length() > 31)
            if isinstance(arg, int)
            else type(arg)
            for arg in args
        ]
        key = device, *constants.values(), *options.values(), *traits
        known = self._known.get(key)
        if known is not None:
            known[0][grid](*args, *known[1])
            return
        compiled = self._kernel[grid](*args, **constants, **options)
        if compiled is not None:
            self._known[key] = compiled, tuple(constants[name] for name in self._kernel.arg_names[len(args) :])


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
    """Raise UsageError unless all tensors are on one device that the kernels run on."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise UsageError(f"expected all tensors on one device, found {', '.join(sorted(map(str, devices)))}")
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
