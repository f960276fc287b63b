"""Fused kernels on a GPU: one Triton kernel in place of several modules.

A fused kernel has the same results and roundings as the modules that it replaces. It is used only if none of these
modules has hooks other than an observer's taps (:func:`~tapscope.engine.layers.probe.must_be_called`). The layer then
passes the kernel's results to the taps (:func:`~tapscope.engine.layers.probe.notify`), in the order of the calls.
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
    """Return the kernels for ``device``; None if Triton does not support the device."""
    if triton.why_not(device) is not None:
        return None
    from tapscope.kernels.triton import (  # imports Triton
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
    """Return whether layers use kernels on ``device``: on CUDA only, because a CPU would need Triton's interpreter."""
    return device.type == "cuda"


def fused_for(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """Return the kernels to use on ``states`` instead of calling ``modules``; None if the modules must be called.

    The caller notifies the taps of ``modules``. The result is None while a torch function mode is active, because
    kernels bypass the torch functions that the mode overrides. Modes whose ``allows_fused`` is true do not prevent
    fused kernels.
    """
    if not may_run_on(states.device) or any(must_be_called(module) for module in modules):
        return None
    if _is_overridden() and not all(getattr(mode, "allows_fused", False) for mode in _modes()):
        return None
    return kernels(states.device)


def product_kernels(states: Tensor, *modules: nn.Module) -> Kernels | None:
    """Return the kernels of matrix products, as :func:`fused_for`, but None while any torch function mode is active.

    The mode may override matrix products.
    """
    return None if _is_overridden() else fused_for(states, *modules)


def _is_overridden() -> bool:
    """Return whether a torch function mode is active."""
    return bool(torch._C._len_torch_function_stack())


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_constant: bool = False) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the fastest kernel for the device, shapes and dtypes.

    ``is_constant``: the weight is a model parameter, so the kernel launched before this one has not written it.
    """
    fused, output = product_kernels(input), None
    if fused is not None and fused.linear.is_worth_it(input, weight):
        output = fused.linear.few_rows_linear(input, weight, bias)
    elif fused is not None and fused.split_linear.is_worth_it(input, weight):
        output = fused.split_linear.split_linear(input, weight, bias, is_constant=is_constant)
    return cpu.linear(input, weight, bias) if output is None else output
