"""Matrix products with quantized weights (FP8 and int8), without dequantizing them in memory.

    output[i, o] = bias[o] + sum over g of (codes[i, g] . weight[o, g]) * scale[i, g] * weight_scale[row[o], g]

A group g is 128 features, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3: blocks of 128 x 128), or a whole row
(arXiv:2211.10438: int8 per token and per output channel). Products of a group are accumulated in float32 (int8 in
int32) before scaling. An input without scales is floating-point (weight-only formats). The reference implementations
are in kernels/quantization.py, for use without Triton.
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
    """Input rows per program (BLOCK_M)."""
    outputs: int
    """Rows of the weight per program (BLOCK_N)."""
    features: int
    """Features per iteration (BLOCK_K); at most 128 if scales vary along features."""
    warps: int
    stages: int


SCALED_LAUNCHES: dict[int, ScaledLaunch] = {
    16: ScaledLaunch(16, 64, 128, 4, 8),
    32: ScaledLaunch(32, 64, 128, 4, 4),
    64: ScaledLaunch(64, 64, 128, 4, 4),
    1 << 30: ScaledLaunch(128, 64, 128, 4, 4),
}
"""Launch by maximum number of rows; measured on the layers of Llama-8B (H100)."""


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
    """Return the scaled product of ``input`` [rows, ins] and ``weight`` [outs, ins], [rows, outs] of ``dtype``.

    ``weight`` is e4m3, e5m2 or int8. Output o is scaled by row ``rows``[o] (int32) of ``weight_scale`` [scale rows,
    ins / ``group``] float32, where ``group`` is a multiple of 128, or None for one scale per row. Outputs [i * tile,
    (i + 1) * tile) must share a scale row; ``tile`` is a power of two. ``input`` has the weight's dtype and scales
    [rows, ins / 128] or [rows, 1], or is floating-point without scales. A row's bits do not depend on other rows of a
    call with the same launch.

    Without ``launch``, the number of rows selects the kernel. Up to 16 rows in groups of 128 use a dedicated kernel.
    Any other single row is computed in float32 without tensor cores. Many rows in groups of 128, with a weight in
    blocks of 128 x 128, use cuBLAS if it supports them. ``is_constant`` promises that the previously launched kernel
    writes neither the weight nor its scales nor ``rows``, so that this kernel may read them early (PDL). Raises
    UsageError for inconsistent tensors.
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
    config = launch or _select_launch(count)
    constants = _constants(config, input, input_scale, count, group, tile)
    grid = -(-outs // config.outputs) * -(-count // constants["BLOCK_M"]), 1, 1
    tensors = input, input_scale, weight, weight_scale, rows, bias, output, None
    _launch_product(tensors, (count, outs, weight_scale.shape[1]), grid, config, constants)
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
    """Return the grouped product [rows, outs]: input rows [ends[e-1], ends[e]) times the weight of expert e.

    ``input`` is [rows, ins], ``weight`` [experts, outs, ins], ``weight_scale`` [experts, scale rows, groups]. ``ends``
    [experts] int32 is read on the device. No expert may have more than ``most`` rows; output rows from ends[-1] on are
    undefined. Other arguments are as in :func:`scaled_linear`. The launch depends on shapes alone. Raises UsageError
    for inconsistent tensors.
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
        config = _select_launch(min(most, -(-len(input) // experts)))
        constants = _constants(config, input, input_scale, most, group, tile)
        grid = -(-outs // config.outputs) * -(-most // constants["BLOCK_M"]), experts, 1
        tensors = input, input_scale, weight, weight_scale, rows, None, output, ends
        numbers = weight_scale.shape[1], outs, weight_scale.shape[2]
        _launch_product(tensors, numbers, grid, config, constants)
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
    """Quantize one floating-point row ``input`` [1, ins] and multiply it by ``weight``: [1, outs] in the input's dtype.

    The result equals ``scaled_linear(*quantize(input, weight.dtype, input_group, input_scale, ...), ...)`` bit for bit.
    It takes one launch, in which each program quantizes the row while reading it, unless both row and weight are in
    groups of features. Arguments are as in these two functions; ``input_group`` is 128 or None. Raises UsageError for
    inconsistent tensors.
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
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
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


def _select_launch(count: int) -> ScaledLaunch:
    """Return the launch configuration for ``count`` input rows."""
    return next(SCALED_LAUNCHES[max_rows] for max_rows in SCALED_LAUNCHES if count <= max_rows)


def _constants(
    config: ScaledLaunch, input: Tensor, input_scale: Tensor | None, count: int, group: int | None, tile: int
) -> dict[str, int | bool]:
    """Return the constexpr arguments of the kernel for at most ``count`` input rows per weight."""
    has_groups = input_scale is not None and input_scale.shape[1] > 1
    features = min(GROUP, config.features) if group is not None or has_groups else config.features
    if input.dtype == torch.float32:  # 128 x 128 tiles would exceed shared memory
        features //= 4
    return {
        "X_GROUP": GROUP if has_groups else 0,
        "W_GROUP": group or 0,
        "BLOCK_M": min(config.rows, max(16, next_power(count))),
        "BLOCK_N": config.outputs,
        "BLOCK_K": features,
        "IS_UNIFORM": tile % config.outputs == 0,
        "IS_EVEN": input.shape[1] % features == 0,
    }


def _launch_product(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    numbers: tuple[int, int, int],
    grid: tuple[int, int, int],
    config: ScaledLaunch,
    constants: dict[str, int | bool],
) -> None:
    """Launch the kernel.

    ``numbers`` is (input rows, or scale rows per expert for a grouped product; outputs; groups of a weight row).
    """
    (input, input_scale, *_), (rows, outs, w_groups) = tensors, numbers
    x_groups = 0 if input_scale is None else input_scale.shape[1]
    args = *tensors, rows, input.shape[1], outs, input.stride(0), x_groups, w_groups
    _launch_scaled(input.device, grid, args, constants, num_warps=config.warps, num_stages=config.stages)


@triton.jit
def _load_scales(scales, row, groups, start, valid, GROUP: tl.constexpr):
    """Load the scales of the group that contains feature ``start``, for the rows ``row``."""
    return tl.load(scales + row * groups + start // GROUP, mask=valid, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, ends,
    rows, ins, outs, input_row, x_groups, w_groups,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N outputs, BLOCK_M rows]; outputs come first so that few rows still fill the tensor cores.

    With ``ends``, the rows are those of one expert, and ``rows`` is the number of scale rows per expert.
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
    # Grouped program order for L2 reuse: up to 8 adjacent programs share a weight tile.
    m_blocks, n_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(outs, BLOCK_N)
    group_id = tl.program_id(0) // (8 * n_blocks)
    group_rows = tl.minimum(m_blocks - group_id * 8, 8)
    index_in_group = tl.program_id(0) - group_id * 8 * n_blocks
    m = (group_id * 8 + index_in_group % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = index_in_group // group_rows * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_output = m < rows, n < outs
    scale_index = tl.load(scale_row + n, mask=is_output, other=0)
    if IS_UNIFORM:
        scale_index = tl.load(scale_row + index_in_group // group_rows * BLOCK_N)
    w_ptrs = weight + n.to(tl.int64)[:, None] * ins + k[None, :]
    x_ptrs = input + m.to(tl.int64)[None, :] * input_row + k[:, None]
    is_integer: tl.constexpr = input_scale is not None and weight.dtype.element_ty == tl.int8
    if is_integer and X_GROUP == 0 and W_GROUP == 0:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, ins, BLOCK_K):
        if IS_EVEN:
            w = tl.load(w_ptrs + start, mask=is_output[:, None], other=0.0)
            x = tl.load(x_ptrs + start, mask=is_row[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + start, mask=is_output[:, None] & (start + k < ins)[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=is_row[None, :] & (start + k < ins)[:, None], other=0.0)
        if input_scale is None:
            w = w.to(x.dtype)
        if X_GROUP == 0 and W_GROUP == 0:
            if is_integer:
                acc = tl.dot(w, x, acc, out_dtype=tl.int32)
            elif input_scale is None:
                acc = tl.dot(w, x, acc, input_precision="ieee")
            else:
                acc = tl.dot(w, x, acc, max_num_imprecise_acc=128)
        else:
            if is_integer:
                product = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
            else:
                product = tl.dot(w, x, input_precision="ieee")
            if W_GROUP:
                if IS_UNIFORM:
                    product = product * tl.load(weight_scale + scale_index * w_groups + start // W_GROUP)
                else:
                    product = (
                        product * _load_scales(weight_scale, scale_index, w_groups, start, is_output, W_GROUP)[:, None]
                    )
            if X_GROUP:
                product = product * _load_scales(input_scale, m, x_groups, start, is_row, X_GROUP)[None, :]
            acc += product
    result = acc.to(tl.float32)
    if W_GROUP == 0:
        if IS_UNIFORM:
            result = result * tl.load(weight_scale + scale_index)
        else:
            result = result * tl.load(weight_scale + scale_index, mask=is_output, other=0.0)[:, None]
    if X_GROUP == 0 and input_scale is not None:
        result = result * tl.load(input_scale + m, mask=is_row, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_ptrs = output + m.to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(out_ptrs, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


_launch_scaled = Launcher(_scaled_kernel)
