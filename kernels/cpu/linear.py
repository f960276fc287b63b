"""linear and grouped_linear: matrix products that are quick when there are few rows, as in decoding."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function
from torch.profiler import record_function

from tapscope.kernels.native import library

_KINDS = {torch.float32: (library.CODES["float32"], 64), torch.bfloat16: (library.CODES["bfloat16"], 32)}
"""Number of the dtype, and up to how many rows this is the quicker way (measured, AVX-512); beyond them torch, which
packs the weights first, has won that back."""
_UNSEEN = nullcontext()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: [rows, ins], [outs, ins], [outs] -> [rows, outs], in the input's dtype.

    Sums are in float32. Where kernels/native/linear.cpp serves, a row of the result depends on that row of the input
    alone, to the last bit. torch serves elsewhere: on other devices, processors and dtypes, for many rows, where
    gradients are recorded and under torch's modes. Raises what torch raises.
    """
    output = None if is_intercepted(input) else _native(input, weight, bias)
    return functional.linear(input, weight, bias) if output is None else output


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor | None:
    """[rows, ins] with [groups, outs, ins] -> [rows, outs]: rows [ends[g-1], ends[g]) times weight[g].

    ``ends`` is [groups] int32; rows from ends[-1] on are undefined. Each group has the bits of :func:`linear`. None
    where C++ does not serve, as for a group of many rows.
    """
    functions, (code, most_rows) = library.functions(), _KINDS.get(input.dtype, (0, 0))
    if functions is None or not most_rows or is_intercepted(input):
        return None
    if input.ndim != 2 or not _lies_flat(input, input) or not _lies_flat(weight, input):
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
    """Shows what is computed inside as ``tapscope::NAME`` to torch's profiler, which sees torch's operators alone."""
    profiling: Any = torch.autograd  # part of it has no type hints
    return record_function(f"tapscope::{name}") if profiling._profiler_enabled() else _UNSEEN


def is_intercepted(tensor: Tensor) -> bool:
    """Whether torch would dispatch an operation on ``tensor`` elsewhere: to a mode or a tensor subclass."""
    modes: Any = torch._C
    return type(tensor) is not Tensor or has_torch_function((tensor,)) or modes._len_torch_dispatch_stack() > 0


def _native(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product by C++; None where it cannot be had."""
    functions, (code, most_rows) = library.functions(), _KINDS.get(input.dtype, (0, 0))
    if functions is None or input.ndim != 2 or not 0 < len(input) <= most_rows:
        return None
    (rows, ins), outs = input.shape, len(weight)
    if weight.shape != (outs, ins) or not ins or not _lies_flat(input, input) or not _lies_flat(weight, input):
        return None
    if bias is not None and (bias.shape != (outs,) or not _lies_flat(bias, input)):
        return None
    output = input.new_empty(rows, outs)
    addresses = input.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), output.data_ptr()
    with in_profile("linear"):
        done = functions.linear(*addresses, rows, ins, outs, ins, code, torch.get_num_threads())
    return output if done else None


def _lies_flat(tensor: Tensor, like: Tensor) -> bool:
    """Whether its memory is a CPU's and in order, its dtype is that of ``like`` and no gradient is asked for."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == like.dtype and not tensor.requires_grad
