"""cuBLAS path of :mod:`.scaled_linear`: many rows in groups of 128 times a weight in blocks of 128 x 128."""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.kernels.quantization import quantize_reference, scaled_linear_reference
from tapscope.kernels.triton.quantize import GROUP

LIBRARY_ROWS = 256
"""Number of rows from which cuBLAS is faster, if it supports the product (compute capability 9.0)."""


def is_for_library(input: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
    """Return whether cuBLAS supports this product (groups of 128, blocks of 128 x 128) and is faster than Triton."""
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
    """Return whether ``scaled_mm`` computes these products correctly on ``device``, by a small test product."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator().manual_seed(0)
    plain, weight = (torch.randn(size, 512, generator=generator) for size in (12, 256))
    codes, scales = (part.to(device) for part in quantize_reference(plain, torch.float8_e4m3fn, GROUP))
    weight_scale = torch.rand(2, 4, generator=generator).to(device) + 0.5
    weight = weight.to(device, torch.float8_e4m3fn)
    rows = torch.arange(256, device=device) // GROUP
    expected = scaled_linear_reference(codes, scales, weight, weight_scale, rows, torch.float32)
    try:
        actual = library_product(codes, scales, weight, weight_scale).float()
    except (RuntimeError, ValueError, NotImplementedError):  # PyTorch was built without the product
        return False
    return bool((actual - expected).norm() < 0.01 * expected.norm())


def library_product(input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the product by cuBLAS [rows, outs] in bfloat16.

    cuBLAS needs column-major input scales and a multiple of four rows, so the input is padded.
    """
    count = len(input)
    if count % 4:
        input, input_scale = (functional.pad(part, (0, 0, 0, -count % 4)) for part in (input, input_scale))
    scaling = functional.ScalingType
    output: Tensor = functional.scaled_mm(
        input, weight.T, input_scale.T.contiguous().T, scaling.BlockWise1x128, weight_scale.T, scaling.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return output[:count]
