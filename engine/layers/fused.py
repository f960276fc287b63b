"""Fused kernels on a GPU: one Triton kernel in place of several modules.

A fused kernel computes what the modules it replaces compute, with the same roundings. It is used only if none of them
has hooks other than an observer's taps (:func:`~tapscope.engine.layers.probe.must_be_called`). The layer then shows the
taps what the kernel has computed (:func:`~tapscope.engine.layers.probe.notify`), in the order of the calls.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tapscope.engine.layers.probe import must_be_called
from tapscope.kernels import cpu, triton


class Kernels(NamedTuple):
    """The fused kernels of :mod:`tapscope.kernels.triton`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    linear: ModuleType
    rope: ModuleType
    quant: ModuleType
    moe: ModuleType


@functools.lru_cache(maxsize=64)
def kernels(device: torch.device) -> Kernels | None:
    """The kernels for ``device``; None if Triton does not support it."""
    if triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import activation, linear, moe, norm, quant, rope  # imports Triton

    return Kernels(norm.rms_norm, norm.add_rms_norm, activation.gated, linear, rope, quant, moe)


def may_run_on(device: torch.device) -> bool:
    """Whether layers use kernels on ``device``; on a CPU only Triton's interpreter could run them."""
    return device.type == "cuda"


def fused_for(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """Kernels to use instead of calling ``modules`` on ``states``; None if the modules must be called.

    The caller notifies the taps of ``modules``. None while a torch function mode is active, because it overrides torch
    functions that the kernels do not call.
    """
    if (
        not may_run_on(states.device)
        or torch._C._len_torch_function_stack()
        or any(must_be_called(module) for module in modules)
    ):
        return None
    return kernels(states.device)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` with the fastest kernel for the device, shapes and dtypes."""
    fused = fused_for(input)
    if fused is not None and fused.linear.is_worth_it(input, weight):
        output: Tensor = fused.linear.few_rows_linear(input, weight, bias)
        return output
    return cpu.linear(input, weight, bias)
