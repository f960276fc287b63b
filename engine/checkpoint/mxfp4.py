"""MXFP4: blocks of 32 4-bit floats (E2M1) that share a power of two (E8M0); OCP Microscaling Formats 1.0, section 5.

A matrix [rows, columns] is stored as two uint8 tensors. ``NAME_blocks`` [rows, columns / 32, 16] has the even column in
the low four bits; ``NAME_scales`` [rows, columns / 32] has exponents with a bias of 127. Stacked experts add a leading
axis.
"""

import torch
from torch import Tensor

BLOCK = 32
"""Number of values that share a scale."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensor names."""
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize blocks [..., rows, n, 16] and scales [..., rows, n], both uint8, to [..., rows, 32 n] in ``dtype``.

    The result is exact if ``dtype`` has the range.
    """
    values = torch.tensor(_VALUES, dtype=dtype, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # the two values of every byte
    wide = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(wide, (scales.int() - _BIAS).unsqueeze(-1)).to(dtype).flatten(-2)


def quantize_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [..., rows, 32 n]; return its blocks and scales.

    The scale maps the largest value of each block to exponent 2, the largest exponent of E2M1 (values 4 to 6).
    """
    wide = matrix.float().reshape(*matrix.shape[:-1], -1, BLOCK)
    largest = wide.abs().amax(-1).clamp(min=2.0**-_BIAS)
    exponent = (torch.floor(torch.log2(largest)) - 2).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(wide, -exponent.int().unsqueeze(-1))
    levels = torch.tensor(_POSITIVE, device=matrix.device)
    middle = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled.abs().contiguous(), middle) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponent + _BIAS).to(torch.uint8)
