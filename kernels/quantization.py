"""Reference quantization of activations, and products with quantized weights, in plain PyTorch on any device.

These functions are the references of the kernels in :mod:`tapscope.kernels.triton.quantize` and ``scaled_linear``, and
use the same formulas.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Largest value of each supported dtype."""
LEAST = 1e-10
"""Lower bound on the absolute maximum of a group, so that its scale is not zero."""
_ELEMENTS = 1 << 22
"""Maximum number of elements to convert to float32 at a time."""


def quantize_reference(
    input: Tensor,
    dtype: torch.dtype,
    group: int | None = 128,
    scale: Tensor | None = None,
    *,
    is_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize [rows, n] to (codes [rows, n] of ``dtype``, scales [rows, groups] float32).

    ``group`` features share a scale; the last group may be shorter, and None means one group per row. With ``scale``, a
    single float32, all rows are divided by it (static quantization). With ``is_ue8m0``, scales are rounded up to powers
    of two.
    """
    rows, columns = input.shape
    width = max(1, columns) if group is None else group
    wide = functional.pad(input.float(), (0, -columns % width)).view(rows, -(-columns // width), width)
    if scale is None:
        scales = wide.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp(min=LEAST) / MOST[dtype]
        scales = next_powers_of_two(scales) if is_ue8m0 else scales
    else:
        scales = scale.float().reshape(1, 1).expand(rows, 1).contiguous()
    scaled = (wide / scales.unsqueeze(-1)).clamp(-MOST[dtype], MOST[dtype])
    codes = (scaled.nan_to_num().round() if dtype == torch.int8 else scaled).to(dtype)
    return codes.flatten(1)[:, :columns].contiguous(), scales


def next_powers_of_two(scales: Tensor) -> Tensor:
    """Round ``scales``, positive normal float32, up to powers of two.

    The results are representable as UE8M0 (float8_e8m0fnu): an 8-bit exponent without sign or mantissa.
    """
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack [..., n / 2] uint8 to [..., n] uint8 from 0 to 15; even elements are in the low bits."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def dequantize_reference(
    weight: Tensor,
    scale: Tensor,
    rows: Tensor,
    group: int | None,
    dtype: torch.dtype,
    offset: int = 0,
    zero: Tensor | None = None,
) -> Tensor:
    """Multiply codes [outs, ins] by ``scale`` [scale rows, groups] in float32 and round to ``dtype``.

    Codes of uint8 are packed as [outs, ins / 2], see :func:`unpack_int4`; ``zero`` [scale rows, groups] is subtracted
    from them, or 8 if None. Output o uses scale row ``rows``[o]; feature i uses group (``offset`` + i) // ``group``, or
    the only one if ``group`` is None. A few MiB are converted at a time.
    """
    is_int4 = weight.dtype == torch.uint8
    ins = weight.shape[1] * (2 if is_int4 else 1)
    output = torch.empty(len(weight), ins, dtype=dtype, device=weight.device)

    def of_features(values: Tensor) -> Tensor:
        return values if group is None else values.repeat_interleave(group, 1)[:, offset : offset + ins]

    step = max(1, _ELEMENTS // max(1, ins))
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        wide = weight[part].float()
        if is_int4:
            middle = of_features(zero[rows[part]].float()) if zero is not None else 8.0
            wide = unpack_int4(weight[part]).float() - middle
        output[part] = wide * of_features(scale[rows[part]].float())
    return output


def scaled_linear_reference(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    *,
    group: int | None = 128,
    offset: int = 0,
    input_group: int | None = None,
    bias: Tensor | None = None,
    zero: Tensor | None = None,
    product: Callable[..., Tensor] = functional.linear,
) -> Tensor:
    """Multiply [rows, ins] by quantized weights [outs, ins] -> [rows, outs] of ``dtype``.

    Weights are scaled as in :func:`dequantize_reference`. Without ``input_scale``, the weight is dequantized to the
    input's dtype (weight-only formats). int8 codes with one scale per row are multiplied as integers; other codes are
    dequantized and multiplied in float32. ``input_group`` features of a row share an input scale, and the last group
    may be shorter; None means ``group``, or equal parts of a row. ``product`` computes ``torch.nn.functional.linear``.
    """
    if input_scale is None:
        return product(input, dequantize_reference(weight, weight_scale, rows, group, input.dtype, offset, zero), bias)
    if weight.dtype == torch.int8 and group is None and input_scale.shape[1] == 1:
        output = _integer_product(input, weight).float() * (input_scale * weight_scale[rows].T)
    else:
        width = -(-input.shape[1] // max(1, input_scale.shape[1]))
        width = width if input_scale.shape[1] == 1 else input_group or group or width
        by = input_scale.repeat_interleave(width, 1)[:, : input.shape[1]]
        dense = dequantize_reference(weight, weight_scale, rows, group, torch.float32, offset)
        output = product(input.float() * by, dense)
    return (output if bias is None else output + bias.float()).to(dtype)


def _integer_product(input: Tensor, weight: Tensor) -> Tensor:
    """Return the exact product of [rows, ins] and [outs, ins] int8, [rows, outs]: int32, or float64 on a GPU."""
    if input.is_cpu:
        is_empty = not (len(input) and len(weight))
        return input.new_zeros(len(input), len(weight)) if is_empty else torch._int_mm(input, weight.T)
    return input.double() @ weight.double().T  # cuBLAS restricts the shapes of int8 products
