"""grouped_linear: one product for each group of rows, such as those of an expert or of an adapter."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.layers.fused import linear
from tapscope.kernels import cpu

_ALIGNMENT = 16
"""Bytes: required row alignment of grouped_mm's operands."""


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[n, in] with [groups, out, in] -> [n, out]: rows [ends[g-1], ends[g]) times weight[g].

    ``ends`` [groups] int32 stays on a GPU; rows from ends[-1] on are undefined. A GPU uses torch's grouped_mm, a CPU
    the C++ kernel for few rows. What neither supports is computed group by group.
    """
    if has_torch_function((input,)):  # overridden by a mode such as BatchInvariant
        return handle_torch_function(grouped_linear, (input,), input, weight, ends)
    if not (len(input) and weight.numel()):
        return input.new_zeros(len(input), weight.shape[1])
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


def one_matrix_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[n, in] with [out, in] -> [n, out], with the bits of :func:`grouped_linear` for an expert's rows."""
    assert bias is None, "experts have no bias within the product"
    return grouped_linear(input, weight[None], torch.full((1,), len(input), dtype=torch.int32, device=input.device))


def supports_grouped_mm(weight: Tensor) -> bool:
    """Whether the rows of the matrices are aligned as torch's grouped_mm requires."""
    return all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
