"""The product of :mod:`.scaled_linear` by cuBLAS: many rows in groups of 128, by a weight in blocks of 128 x 128."""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.kernels.quantization import quantize_reference, scaled_linear_reference
from tapscope.kernels.triton.quantize import GROUP

LIBRARY_ROWS = 256
"""cuBLAS is faster from this number of rows on, where it has the product (compute capability 9.0)."""


def is_for_library(input: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
    """Whether cuBLAS multiplies codes in groups of 128 by a weight in blocks of 128 x 128, and is the faster."""
    outs, ins = weight.shape
    return (
        len(input) >= LIBRARY_ROWS
        and input.dtype == torch.float8_e4m3fn
        and input.is_contiguous()
        and outs % GROUP == 0
        and ins % (4 * GROUP) == 0
        and len(weight_scale) == outs // GROUP
        and _has_library_product(input.device)
    )


@functools.lru_cache(maxsize=64)
def _has_library_product(device: torch.device) -> bool:
    """Whether torch's ``scaled_mm`` computes such products on ``device``, tried on a small one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator().manual_seed(0)
    plain, weight = (torch.randn(size, 512, generator=generator) for size in (12, 256))
    codes, scales = (part.to(device) for part in quantize_reference(plain, torch.float8_e4m3fn, GROUP))
    by = torch.rand(2, 4, generator=generator).to(device) + 0.5
    weight = weight.to(device, torch.float8_e4m3fn)
    rows = torch.arange(256, device=device) // GROUP
    expected = scaled_linear_reference(codes, scales, weight, by, rows, torch.float32)
    try:
        found = library_product(codes, scales, weight, by).float()
    except (RuntimeError, ValueError, NotImplementedError):  # built without it
        return False
    return bool((found - expected).norm() < 0.01 * expected.norm())


def library_product(input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The product by cuBLAS: it wants the input's scales by columns, and a multiple of four rows."""
    count = len(input)
    if count % 4:
        input, input_scale = (functional.pad(part, (0, 0, 0, -count % 4)) for part in (input, input_scale))
    kinds = functional.ScalingType
    output: Tensor = functional.scaled_mm(
        input, weight.T, input_scale.T.contiguous().T, kinds.BlockWise1x128, weight_scale.T, kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return output[:count]
