"""linear and grouped_linear: matrix products optimized for few rows, as in decoding."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function
from torch.profiler import record_function

from tapscope.kernels.native import library

_KINDS = {torch.float32: (library.CODES["float32"], 64), torch.bfloat16: (library.CODES["bfloat16"], 32)}
"""dtype -> (its code, maximum number of rows).

With more rows PyTorch is faster, because packing the weights first pays off (measured with AVX-512).
"""
_NOT_PROFILED = nullcontext()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear``: [rows, ins], [outs, ins], [outs] -> [rows, outs], in the input's dtype.

    Accumulates in float32. With the kernel (kernels/native/linear.cpp), each output row depends only on the same input
    row, bit for bit. PyTorch is the fallback on other devices, processors and dtypes, for many rows, when gradients are
    recorded and under torch function or dispatch modes. Raises the errors of PyTorch.
    """
    output = None if is_intercepted(input) else _native(input, weight, bias)
    return functional.linear(input, weight, bias) if output is None else output


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor | None:
    """Multiply rows [ends[g-1], ends[g]) by weight[g]: [rows, ins], [groups, outs, ins] -> [rows, outs].

    ``ends`` is [groups] int32; output rows from ends[-1] on are undefined. Each group is bit-identical to
    :func:`linear`. Returns None where the kernel is not applicable, for example for a group with many rows.
    """
    functions, (code, most_rows) = library.functions(), _KINDS.get(input.dtype, (0, 0))
    if functions is None or not most_rows or is_intercepted(input):
        return None
    if input.ndim != 2 or not _is_supported(input, input) or not _is_supported(weight, input):
        return None
    (rows, ins), (groups, outs, _) = input.shape, weight.shape
    if weight.shape[2] != ins or not ins or ends.shape != (groups,):
        return None
    assert ends.dtype == torch.int32, "ends of groups are int32"
    output, ends = input.new_empty(rows, outs), ends.contiguous()
    addresses = input.data_ptr(), weight.data_ptr(), ends.data_ptr(), output.data_ptr()
    sizes = rows, groups, outs, ins, most_rows
    with in_profile("grouped_linear"):
        done = functions.grouped_linear(*addresses, *sizes, code, torch.get_num_threads())
    return output if done else None


def in_profile(name: str) -> AbstractContextManager[Any]:
    """Context manager: show native computation as ``tapscope::NAME`` in the PyTorch profiler.

    The profiler only sees PyTorch operators otherwise.
    """
    profiling: Any = torch.autograd  # partly without type hints
    return record_function(f"tapscope::{name}") if profiling._profiler_enabled() else _NOT_PROFILED


def is_intercepted(tensor: Tensor) -> bool:
    """Return whether PyTorch would dispatch an operation on ``tensor`` to a mode or a tensor subclass."""
    modes: Any = torch._C
    return type(tensor) is not Tensor or has_torch_function((tensor,)) or modes._len_torch_dispatch_stack() > 0


def _native(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute the product with the C++ kernel; None if it is not applicable."""
    functions, (code, most_rows) = library.functions(), _KINDS.get(input.dtype, (0, 0))
    if functions is None or input.ndim != 2 or not 0 < len(input) <= most_rows:
        return None
    (rows, ins), outs = input.shape, len(weight)
    if weight.shape != (outs, ins) or not ins or not _is_supported(input, input) or not _is_supported(weight, input):
        return None
    if bias is not None and (bias.shape != (outs,) or not _is_supported(bias, input)):
        return None
    output = input.new_empty(rows, outs)
    addresses = input.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), output.data_ptr()
    with in_profile("linear"):
        done = functions.linear(*addresses, rows, ins, outs, ins, code, torch.get_num_threads())
    return output if done else None


def _is_supported(tensor: Tensor, like: Tensor) -> bool:
    """Return whether ``tensor`` is a contiguous CPU tensor without gradient and has the dtype of ``like``."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == like.dtype and not tensor.requires_grad
