"""grouped_linear: one matrix product per group of rows, where a group belongs to one expert or one adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.layers.fused import linear, product_kernels
from tapscope.kernels import cpu

_ALIGNMENT = 16
"""Row alignment in bytes that grouped_mm requires of its operands."""
_MAX_ONE_LAUNCH_ROWS = 4096
"""Largest number of rows of all groups for one launch; beyond it, one product per group is faster."""

_captures = ContextVar("_captures", default=False)


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix: [n, in] and [groups, out, in] -> [n, out].

    Rows [ends[g-1], ends[g]) are multiplied by weight[g]; rows from ends[-1] on are undefined. ``ends`` [groups] int32
    stays on the GPU. A GPU runs torch's grouped_mm, or the Triton kernel if grouped_mm would wait for the host and
    there are few rows. A CPU runs the C++ kernel for few rows. All other cases run one product per group.
    """
    if has_torch_function((input,)):  # overridden by a mode such as BatchInvariant
        return handle_torch_function(grouped_linear, (input,), input, weight, ends)
    if not (len(input) and weight.numel()):
        return input.new_zeros(len(input), weight.shape[1])
    if waits_for_host(weight) and (output := few_grouped_rows(input, weight, ends)) is not None:
        return output
    if supports_grouped_mm(weight) and not input.is_cpu:
        return functional.grouped_mm(input, weight.transpose(1, 2), offs=ends)
    if (output := cpu.grouped_linear(input, weight, ends)) is not None:
        return output
    output, start = input.new_empty(len(input), weight.shape[1]), 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        if end > start:
            output[start:end] = linear(input[start:end], matrix)
        start = end
    return output


def few_grouped_rows(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor | None:
    """Compute :func:`grouped_linear` of few rows with the batch-invariant Triton kernel; None if not applicable.

    A CUDA graph may capture the launch.
    """
    kernels = product_kernels(input)
    if kernels is None or not is_one_launch(len(input)):
        return None
    output: Tensor = kernels.matmul.grouped_invariant_linear(input, weight, ends)
    return output


def is_one_launch(num_rows: int) -> bool:
    """Return whether the Triton kernels compute ``num_rows`` rows of all groups in one launch."""
    return num_rows <= _MAX_ONE_LAUNCH_ROWS or _captures.get()


@contextmanager
def in_one_launch() -> Iterator[None]:
    """Context manager: use one launch for any number of rows, during CUDA graph capture and the warm-up before it."""
    before = _captures.set(True)
    try:
        yield
    finally:
        _captures.reset(before)


def waits_for_host(weight: Tensor) -> bool:
    """Return whether torch's grouped_mm copies its groups' row counts to the host, or does not support ``weight``.

    Only bfloat16 on GPUs of compute capability 9 and above needs no copy.
    """
    if weight.dtype != torch.bfloat16 or not supports_grouped_mm(weight):
        return True
    return weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (9, 0)


def one_matrix_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute [n, in] times [out, in] -> [n, out], bit-identical to :func:`grouped_linear` for an expert's rows."""
    assert bias is None, "experts have no bias within the product"
    return grouped_linear(input, weight[None], torch.full((1,), len(input), dtype=torch.int32, device=input.device))


def supports_grouped_mm(weight: Tensor) -> bool:
    """Return whether the rows of the matrices have the alignment that torch's grouped_mm requires."""
    return all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
