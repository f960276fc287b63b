"""Fused kernels of layers on a GPU: one Triton kernel where the modules would launch several.

A fused kernel computes what the modules that it replaces compute, rounded where they round, and only runs where nobody
watches one of them (:func:`~tapscope.engine.layers.probe.is_watched`): a hook sees the module called as ever.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tapscope.engine.layers.probe import is_watched
from tapscope.kernels import cpu, triton


class Kernels(NamedTuple):
    """What layers call; see the modules of :mod:`tapscope.kernels.triton`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    linear: ModuleType
    rope: ModuleType


@functools.lru_cache(maxsize=64)
def kernels(device: torch.device) -> Kernels | None:
    """The kernels that run on ``device``; None where Triton cannot."""
    if triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import activation, linear, norm, rope  # need Triton

    return Kernels(norm.rms_norm, norm.add_rms_norm, activation.gated, linear, rope)


def may_run_on(device: torch.device) -> bool:
    """Whether layers look for kernels at all; on a CPU only Triton's interpreter would run them."""
    return device.type == "cuda"


def fused_for(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """The kernels that may run instead of calling ``modules`` on ``states``; None where the modules are to be called.

    Not while a torch function mode is on: it replaces functions of torch, which kernels do not call.
    """
    if (
        not may_run_on(states.device)
        or torch._C._len_torch_function_stack()
        or any(is_watched(module) for module in modules)
    ):
        return None
    return kernels(states.device)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` by the quickest kernel there is for the device and the number of rows.

    Which one that is depends on shapes and dtypes alone.
    """
    fused = fused_for(input)
    if fused is not None and fused.linear.is_worth_it(input, weight):
        output: Tensor = fused.linear.few_rows_linear(input, weight, bias)
        return output
    return cpu.linear(input, weight, bias)
