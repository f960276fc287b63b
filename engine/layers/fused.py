"""Fused kernels on a GPU: one Triton kernel in place of several modules.

A fused kernel computes what the modules it replaces compute, with the same roundings. It is used only if none of them
has hooks other than an observer's taps (:func:`~tapscope.engine.layers.probe.must_be_called`). The layer then shows the
taps what the kernel has computed (:func:`~tapscope.engine.layers.probe.notify`), in the order of the calls.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tapscope.engine.layers.probe import must_be_called
from tapscope.kernels import cpu, triton
from tapscope.kernels.native import library

_modes: Callable[[], list[Any]] = _get_current_function_mode_stack  # has no type hints


class Kernels(NamedTuple):
    """The fused kernels of :mod:`tapscope.kernels.triton`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    linear: ModuleType
    split_linear: ModuleType
    rope: ModuleType
    quantize: ModuleType
    scaled_linear: ModuleType
    moe: ModuleType
    matmul: ModuleType
    prefill: Callable[..., Tensor]
    indexer: ModuleType
    int4: ModuleType


@functools.lru_cache(maxsize=64)
def kernels(device: torch.device) -> Kernels | None:
    """The kernels for ``device``; None if Triton does not support it."""
    if triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import (  # imports it
        activation,
        indexer,
        int4,
        launch,
        linear,
        matmul,
        moe,
        norm,
        paged_prefill,
        quantize,
        rope,
        scaled_linear,
        split_linear,
    )

    if (functions := library.functions()) is not None:
        launch.launch_kernel = functions.launch_kernel
    norms, products = (norm.rms_norm, norm.add_rms_norm), (linear, split_linear)
    quantized, prefill = (quantize, scaled_linear), paged_prefill.paged_prefill
    return Kernels(*norms, activation.gated, *products, rope, *quantized, moe, matmul, prefill, indexer, int4)


def may_run_on(device: torch.device) -> bool:
    """Whether layers use kernels on ``device``; on a CPU only Triton's interpreter could run them."""
    return device.type == "cuda"


def fused_for(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """Kernels to use instead of calling ``modules`` on ``states``; None if the modules must be called.

    The caller notifies the taps of ``modules``. None while a torch function mode is active that overrides torch
    functions which the kernels do not call; a mode whose ``allows_fused`` is true permits them.
    """
    if not may_run_on(states.device) or any(must_be_called(module) for module in modules):
        return None
    if _is_overridden() and not all(getattr(mode, "allows_fused", False) for mode in _modes()):
        return None
    return kernels(states.device)


def product_kernels(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """As :func:`fused_for`, kernels of matrix products; None while any torch function mode is active, which may
    override products.
    """
    return None if _is_overridden() else fused_for(states, *modules)


def _is_overridden() -> bool:
    """Whether a torch function mode is active."""
    return bool(torch._C._len_torch_function_stack())


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_constant: bool = False) -> Tensor:
    """``torch.nn.functional.linear`` with the fastest kernel for the device, shapes and dtypes.

    ``is_constant``: the weight is a parameter of the model, which the kernel launched last has not written.
    """
    fused, output = product_kernels(input), None
    if fused is not None and fused.linear.is_worth_it(input, weight):
        output = fused.linear.few_rows_linear(input, weight, bias)
    elif fused is not None and fused.split_linear.is_worth_it(input, weight):
        output = fused.split_linear.split_linear(input, weight, bias, is_constant=is_constant)
    return cpu.linear(input, weight, bias) if output is None else output
