"""Matrix products with weights that stay quantized in memory.

    output[i, o] = bias[o] + sum over g of (codes[i, g] . weight[o, g]) * scale[i, g] * weight_scale[row[o], g]

A group g is 128 features, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3: blocks of 128 x 128), or a whole row
(arXiv:2211.10438: int8 per token and per output channel). Products of a group are summed in float32, those of int8 in
int32, before they are scaled. Without scales of the input it is multiplied as it is (weight-only formats). The plain
references are in kernels/quantization.py, where the engine uses them without Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.quantization import MOST
from tapscope.kernels.triton.launch import Launcher, check_same_device, check_stored, next_power
from tapscope.kernels.triton.quantize import GROUP, quantize
from tapscope.kernels.triton.scaled_linear_few_rows import FEW_ROWS, launch_few_rows
from tapscope.kernels.triton.scaled_linear_library import is_for_library, library_product
from tapscope.kernels.triton.scaled_linear_one_row import ROW_LAUNCH, RowLaunch, launch_one_row

_FLOATS = torch.float32, torch.float16, torch.bfloat16


class ScaledLaunch(NamedTuple):
    """Launch configuration of the matrix product for a number of input rows."""

    rows: int
    """Input rows of a program."""
    outputs: int
    """Rows of the weight of a program."""
    features: int
    """Features of one product; at most 128 where scales change along them."""
    warps: int
    stages: int


SCALED_LAUNCHES: dict[int, ScaledLaunch] = {
    16: ScaledLaunch(16, 64, 128, 4, 8),
    32: ScaledLaunch(32, 64, 128, 4, 4),
    64: ScaledLaunch(64, 64, 128, 4, 4),
    1 << 30: ScaledLaunch(128, 64, 128, 4, 4),
}
"""By the largest number of rows; measured on the layers of Llama-8B (H100)."""


def scaled_linear(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    *,
    group: int | None = GROUP,
    tile: int = 1,
    bias: Tensor | None = None,
    launch: ScaledLaunch | None = None,
    is_constant: bool = False,
) -> Tensor:
    """[rows, ins] and [outs, ins] -> [rows, outs] of ``dtype``.

    ``weight`` is e4m3, e5m2 or int8. Output o is scaled by row ``rows``[o] (int32) of ``weight_scale`` [scale rows,
    ins / ``group``] float32, where ``group`` is a multiple of 128, or None for one scale per row. Outputs [i * tile,
    (i + 1) * tile) must have one scale row; ``tile`` is a power of two. ``input`` has the weight's dtype and scales
    [rows, ins / 128] or [rows, 1], or is floating-point without scales. A row's bits do not depend on other rows of a
    call with the same launch. Without ``launch``, up to 16 rows in groups of 128 have a kernel of their own, any other
    single row is computed in float32 without the tensor cores, and many rows in groups of 128 by blocks of 128 x 128 by
    cuBLAS, where it can. ``is_constant``: the kernel launched last writes neither the weight, nor its scales or
    ``rows``, so that this one may read them early. Raises UsageError for tensors that do not fit together.
    """
    _check(input, input_scale, weight, weight_scale, rows, group, bias)
    (count, ins), outs = input.shape, len(weight)
    output = torch.empty(count, outs, dtype=dtype, device=input.device)
    if not output.numel():
        return output
    is_in_groups = group is not None and input_scale is not None and input_scale.shape[1] * GROUP == ins
    if launch is None and count <= FEW_ROWS and is_in_groups:
        launch_few_rows(input, input_scale, weight, weight_scale, rows, bias, output, group, tile, is_constant)
        return output
    if count == 1 and launch is None:
        x_group = 0 if input_scale is None or input_scale.shape[1] == 1 else GROUP
        launch_one_row(input, input_scale, weight, weight_scale, rows, bias, output, group, tile, x_group, False)
        return output
    is_in_blocks = tile == GROUP == group and input_scale is not None and input_scale.shape[1] * GROUP == ins
    is_plain = bias is None and launch is None and dtype == torch.bfloat16
    if input_scale is not None and is_in_blocks and is_plain and is_for_library(input, weight, weight_scale):
        return library_product(input, input_scale, weight, weight_scale)
    chosen = launch or _launch_for(count)
    constants = _constants(chosen, input, input_scale, count, group, tile)
    grid = -(-outs // chosen.outputs) * -(-count // constants["BLOCK_M"]), 1, 1
    tensors = input, input_scale, weight, weight_scale, rows, bias, output, None
    _launch_product(tensors, (count, outs, weight_scale.shape[1]), grid, chosen, constants)
    return output


def grouped_scaled_linear(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    ends: Tensor,
    most: int,
    dtype: torch.dtype,
    *,
    group: int | None = GROUP,
    tile: int = 1,
) -> Tensor:
    """[rows, ins] and [experts, outs, ins] -> [rows, outs]: input rows [ends[e-1], ends[e]) times the weight of e.

    ``weight_scale`` is [experts, scale rows, groups]; ``ends`` [experts] int32 is read on the device, no expert has
    more than ``most`` rows, and those from ends[-1] on are undefined. Else as :func:`scaled_linear`; the launch depends
    on shapes alone. Raises UsageError for tensors that do not fit together.
    """
    if weight.ndim != 3 or weight_scale.ndim != 3 or not (len(weight) == len(weight_scale) == len(ends) > 0):
        shapes = f"weight {list(weight.shape)}, weight_scale {list(weight_scale.shape)}, ends {list(ends.shape)}"
        raise UsageError(f"{shapes} do not fit: [experts, outs, ins], [experts, scale rows, groups] and [experts]")
    _check(input, input_scale, weight[0], weight_scale[0], rows, group, None)
    check_same_device(input, ends)
    if ends.dtype != torch.int32 or not all(each.is_contiguous() for each in (weight, weight_scale, ends)):
        raise UsageError(f"ends are {ends.dtype}; expected contiguous int32, and contiguous weight and scales")
    experts, outs, _ = weight.shape
    output = torch.empty(len(input), outs, dtype=dtype, device=input.device)
    if output.numel() and most > 0:
        chosen = _launch_for(min(most, -(-len(input) // experts)))
        constants = _constants(chosen, input, input_scale, most, group, tile)
        grid = -(-outs // chosen.outputs) * -(-most // constants["BLOCK_M"]), experts, 1
        tensors = input, input_scale, weight, weight_scale, rows, None, output, ends
        numbers = weight_scale.shape[1], outs, weight_scale.shape[2]
        _launch_product(tensors, numbers, grid, chosen, constants)
    return output


def quantizing_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    *,
    input_group: int | None = GROUP,
    input_scale: Tensor | None = None,
    is_ue8m0: bool = False,
    group: int | None = GROUP,
    tile: int = 1,
    bias: Tensor | None = None,
    launch: RowLaunch | None = None,
    is_constant: bool = False,
) -> Tensor:
    """One row [1, ins] and [outs, ins] -> [1, outs], in the dtype of the input, which is floating-point.

    The bits are those of ``scaled_linear(*quantize(input, weight.dtype, input_group, input_scale, ...), ...)``. It is
    one launch, in which each program quantizes the row as it reads it, unless the row and the weight are in groups of
    features. Arguments are those of both functions; ``input_group`` is 128 or None. Raises UsageError for tensors that
    do not fit together.
    """
    _check(input, None, weight, weight_scale, rows, group, bias)
    is_static = input_scale is not None
    if len(input) != 1 or input_group not in (GROUP, None) or (is_static and input_group is not None):
        raise UsageError(f"input {list(input.shape)} in groups of {input_group}: expected one row, groups of {GROUP}")
    if input_group is not None and input.shape[1] % GROUP:
        raise UsageError(f"input {list(input.shape)}: expected features in groups of {GROUP}")
    if input_group is not None and group is not None and launch is None:
        codes, scales = quantize(input, weight.dtype, is_ue8m0=is_ue8m0)
        return scaled_linear(
            codes, scales, weight, weight_scale, rows, input.dtype,
            group=group, tile=tile, bias=bias, is_constant=is_constant,
        )  # fmt: skip
    output = input.new_empty(1, len(weight))
    if output.numel():
        tensors = input, input_scale, weight, weight_scale, rows, bias, output
        launch_one_row(*tensors, group, tile, input_group or 0, True, is_ue8m0, launch or ROW_LAUNCH)
    return output


def _check(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    group: int | None,
    bias: Tensor | None,
) -> None:
    """Raise UsageError for tensors that do not fit together."""
    check_same_device(input, input_scale, weight, weight_scale, rows, bias)
    check_stored(weight.dtype, weight.device)
    if weight.dtype not in MOST or input.dtype not in ((weight.dtype,) if input_scale is not None else _FLOATS):
        raise UsageError(f"input is {input.dtype}, weight {weight.dtype}: expected one quantized dtype, or float input")
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1]:
        raise UsageError(f"input {list(input.shape)}, weight {list(weight.shape)}: expected [rows, ins], [outs, ins]")
    ins = input.shape[1]
    if input_scale is not None and (
        len(input_scale) != len(input) or input_scale.shape[1] not in (1, ins / GROUP) or input_scale.ndim != 2
    ):
        raise UsageError(f"input_scale {list(input_scale.shape)}: expected one per row, or per {GROUP} features")
    groups = 1 if group is None else -(-ins // group)
    if (group is not None and group % GROUP) or weight_scale.ndim != 2 or weight_scale.shape[1] != groups:
        raise UsageError(f"weight_scale {list(weight_scale.shape)} of weight {list(weight.shape)}, groups of {group}")
    if rows.shape != weight.shape[:1] or rows.dtype != torch.int32:
        raise UsageError(f"rows {list(rows.shape)}: expected an int32 scale row for each of {len(weight)} outputs")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias {list(bias.shape)}: expected one per output, {len(weight)}")
    if {t.dtype for t in (input_scale, weight_scale) if t is not None} != {torch.float32}:
        raise UsageError("scales must be float32")
    vectors = [t for t in (input_scale, weight, weight_scale, rows, bias) if t is not None]
    if input.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in vectors):
        raise UsageError("weight, scales, rows, bias and each row of the input must be contiguous")


def _launch_for(count: int) -> ScaledLaunch:
    """That of ``count`` input rows."""
    return next(SCALED_LAUNCHES[most] for most in SCALED_LAUNCHES if count <= most)


def _constants(
    chosen: ScaledLaunch, input: Tensor, input_scale: Tensor | None, count: int, group: int | None, tile: int
) -> dict[str, int | bool]:
    """Of the kernel for at most ``count`` rows of a weight."""
    has_groups = input_scale is not None and input_scale.shape[1] > 1
    features = min(GROUP, chosen.features) if group is not None or has_groups else chosen.features
    if input.dtype == torch.float32:  # tiles of 128 rows and 128 features would not fit into shared memory
        features //= 4
    return {
        "X_GROUP": GROUP if has_groups else 0,
        "W_GROUP": group or 0,
        "BLOCK_M": min(chosen.rows, max(16, next_power(count))),
        "BLOCK_N": chosen.outputs,
        "BLOCK_K": features,
        "IS_UNIFORM": tile % chosen.outputs == 0,
        "IS_EVEN": input.shape[1] % features == 0,
    }


def _launch_product(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    numbers: tuple[int, int, int],
    grid: tuple[int, int, int],
    chosen: ScaledLaunch,
    constants: dict[str, int | bool],
) -> None:
    """Launch the kernel; ``numbers``: input rows, or scale rows of an expert; outputs; groups of a weight's row."""
    (input, input_scale, *_), (rows, outs, w_groups) = tensors, numbers
    x_groups = 0 if input_scale is None else input_scale.shape[1]
    args = *tensors, rows, input.shape[1], outs, input.stride(0), x_groups, w_groups
    _launch_scaled(input.device, grid, args, constants, num_warps=chosen.warps, num_stages=chosen.stages)


@triton.jit
def _scales_of(scales, row, groups, start, real, GROUP: tl.constexpr):
    """Scales of features from ``start`` on in the rows ``row``."""
    return tl.load(scales + row * groups + start // GROUP, mask=real, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, ends,
    rows, ins, outs, input_row, x_groups, w_groups,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_M rows, as [outputs, rows]: few rows then still fill the tensor cores.

    With ``ends`` of the rows of one expert, and ``rows`` is the number of scale rows of each.
    """
    if ends is not None:
        expert = tl.program_id(1).to(tl.int64)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
        input += first * input_row
        output += first * outs
        weight += expert * outs * ins
        weight_scale += expert * rows * w_groups
        if input_scale is not None:
            input_scale += first * x_groups
        rows = tl.load(ends + expert) - first.to(tl.int32)
        if tl.program_id(0) >= tl.cdiv(rows, BLOCK_M) * tl.cdiv(outs, BLOCK_N):
            return
    # Programs of the same rows of the weight are adjacent for up to 8 blocks of the input, which the cache then serves.
    m_blocks, n_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(outs, BLOCK_N)
    band = tl.program_id(0) // (8 * n_blocks)
    height = tl.minimum(m_blocks - band * 8, 8)
    place = tl.program_id(0) - band * 8 * n_blocks
    m = (band * 8 + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = place // height * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_output = m < rows, n < outs
    by_row = tl.load(scale_row + n, mask=is_output, other=0)
    if IS_UNIFORM:
        by_row = tl.load(scale_row + place // height * BLOCK_N)
    w_at = weight + n.to(tl.int64)[:, None] * ins + k[None, :]
    x_at = input + m.to(tl.int64)[None, :] * input_row + k[:, None]
    is_integer: tl.constexpr = input_scale is not None and weight.dtype.element_ty == tl.int8
    if is_integer and X_GROUP == 0 and W_GROUP == 0:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, ins, BLOCK_K):
        if IS_EVEN:
            w = tl.load(w_at + start, mask=is_output[:, None], other=0.0)
            x = tl.load(x_at + start, mask=is_row[None, :], other=0.0)
        else:
            w = tl.load(w_at + start, mask=is_output[:, None] & (start + k < ins)[None, :], other=0.0)
            x = tl.load(x_at + start, mask=is_row[None, :] & (start + k < ins)[:, None], other=0.0)
        if input_scale is None:
            w = w.to(x.dtype)
        if X_GROUP == 0 and W_GROUP == 0:
            if is_integer:
                total = tl.dot(w, x, total, out_dtype=tl.int32)
            elif input_scale is None:
                total = tl.dot(w, x, total, input_precision="ieee")
            else:
                total = tl.dot(w, x, total, max_num_imprecise_acc=128)
        else:
            if is_integer:
                part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(w, x, input_precision="ieee")
            if W_GROUP:
                if IS_UNIFORM:
                    part = part * tl.load(weight_scale + by_row * w_groups + start // W_GROUP)
                else:
                    part = part * _scales_of(weight_scale, by_row, w_groups, start, is_output, W_GROUP)[:, None]
            if X_GROUP:
                part = part * _scales_of(input_scale, m, x_groups, start, is_row, X_GROUP)[None, :]
            total += part
    result = total.to(tl.float32)
    if W_GROUP == 0:
        if IS_UNIFORM:
            result = result * tl.load(weight_scale + by_row)
        else:
            result = result * tl.load(weight_scale + by_row, mask=is_output, other=0.0)[:, None]
    if X_GROUP == 0 and input_scale is not None:
        result = result * tl.load(input_scale + m, mask=is_row, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = output + m.to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


_launch_scaled = Launcher(_scaled_kernel)
