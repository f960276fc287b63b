"""Quantization of activations, and matrix products with weights that stay quantized in memory.

    scale[i, g] = max(|input[i, g]|, 1e-10) / most               most: 448 of float8_e4m3fn, 57344 of e5m2, 127 of int8
                                                                 UE8M0: rounded up to a power of two
    codes[i, g] = input[i, g] / scale[i, g]                      rounded to nearest, ties to even
    output[i, o] = bias[o] + sum over g of (codes[i, g] . weight[o, g]) * scale[i, g] * weight_scale[row[o], g]

A group g is 128 features, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3: blocks of 128 x 128), or a whole row
(arXiv:2211.10438: int8 per token and per output channel). Products of a group are summed in float32, those of int8 in
int32, before they are scaled. Without scales of the input it is multiplied as it is (weight-only formats). NaN stays
NaN in FP8. The plain references are in kernels/quantization.py, where the engine uses them without Triton.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tapscope.core.errors import UsageError
from tapscope.kernels.quantization import LEAST, MOST, next_powers_of_two, quantize_reference, scaled_linear_reference
from tapscope.kernels.triton.launch import (
    Launcher,
    check_same_device,
    check_stored,
    next_power,
    num_sms,
    shared_memory,
    wait_for_previous,
)

GROUP = 128
"""Features that share a scale, of the input and of the weight, unless a row has one scale."""


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


class FewLaunch(NamedTuple):
    """Launch configuration of the product with few input rows in groups of 128."""

    outputs: int
    """Rows of the weight of a program."""
    groups: int
    """Groups of 128 features of one iteration, each of a warp of its own."""
    most_stages: int
    """There are fewer where a multiprocessor could not run all its programs side by side, and 4 at the least."""


def few_launch(rows: int, outs: int, ins: int, device: torch.device) -> FewLaunch:
    """For up to 16 rows times a weight [outs, ins]; measured on the layers of Llama-8B (H200).

    ``groups`` decides in which order products are added, so one row has other bits than the same row among others.
    """
    if rows == 1 and outs > 48 * num_sms(device):
        return FewLaunch(32, 2, 4)  # programs of two warps, that all run side by side
    return FewLaunch(16, 8, 12) if rows == 1 and ins > 64 * GROUP else FewLaunch(16, 4, 6)


_LEAST_STAGES = 4


class Quantized(NamedTuple):
    """Where a kernel puts the quantized form of its output [rows, n] besides the output itself."""

    codes: Tensor
    """[rows, n], contiguous."""
    scales: Tensor
    """[rows, n / 128] float32, contiguous."""
    is_ue8m0: bool

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device, is_ue8m0: bool) -> "Quantized":
        """For an output [rows, columns]; ``columns`` is a multiple of 128."""
        codes = torch.empty(rows, columns, dtype=dtype, device=device)
        return cls(codes, torch.empty(rows, columns // GROUP, dtype=torch.float32, device=device), is_ue8m0)

    def check(self, rows: int, columns: int) -> None:
        """Raise UsageError unless this is the form of an output [rows, columns]."""
        codes, scales = self.codes, self.scales
        if codes.shape != (rows, columns) or columns % GROUP or scales.shape != (rows, columns // GROUP):
            raise UsageError(
                f"codes are {list(codes.shape)}, scales {list(scales.shape)}; expected [{rows}, {columns}] and "
                f"[{rows}, {columns} / {GROUP}], for a multiple of {GROUP} columns"
            )
        if not (codes.dtype in MOST and scales.dtype == torch.float32):
            raise UsageError(f"codes are {codes.dtype}, scales {scales.dtype}; expected a quantized dtype and float32")
        check_stored(codes.dtype, codes.device)

    @staticmethod
    def constants(quantized: "Quantized | None") -> dict[str, float | bool]:
        """Of a kernel that calls :func:`store_quantized`."""
        most = 0.0 if quantized is None else MOST[quantized.codes.dtype]
        return {"MOST": most, "LEAST": LEAST, "IS_UE8M0": quantized is not None and quantized.is_ue8m0}


class RowLaunch(NamedTuple):
    """Launch configuration of the product with one input row."""

    outputs: int
    """Rows of the weight of a program."""
    groups: int
    """Groups of 128 features of one iteration."""
    warps: int
    stages: int


ROW_LAUNCH = RowLaunch(8, 8, 4, 1)
"""Measured on the layers of Llama-8B (H100)."""

FEW_ROWS = 16
LIBRARY_ROWS = 256
"""cuBLAS is faster from this number of rows on, where it has the product (compute capability 9.0)."""


def quantize(
    input: Tensor,
    dtype: torch.dtype,
    group: int | None = GROUP,
    scale: Tensor | None = None,
    *,
    is_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """[rows, n] -> (codes [rows, n] of ``dtype``, scales [rows, groups] float32), both contiguous.

    ``group`` features, a power of two that divides n, share a scale; None: all of a row. With ``scale``, one float32
    on the device, rows are divided by it instead (static quantization; ``group`` is None). With ``is_ue8m0`` scales
    are rounded up to powers of two. Rows of the input need not be adjacent. Raises UsageError for another dtype or
    shape.
    """
    check_same_device(input, scale)
    check_stored(dtype, input.device)
    if dtype not in MOST:
        raise UsageError(f"cannot quantize to {dtype}; supported: {', '.join(map(str, MOST))}")
    if input.ndim != 2 or input.stride(1) != 1 or (scale is not None and group is not None):
        raise UsageError(f"input {list(input.shape)}: expected [rows, n] with contiguous rows")
    if group is not None and (group < 16 or group & (group - 1) or input.shape[1] % group):
        raise UsageError(f"input {list(input.shape)}: expected groups of a power of two from 16, not {group}")
    rows, columns = input.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=input.device)
    groups = 1 if group is None else columns // group
    scales = torch.empty(rows, groups, dtype=torch.float32, device=input.device)
    if not codes.numel():
        scales.fill_(LEAST / MOST[dtype])
        return codes, next_powers_of_two(scales) if is_ue8m0 else scales
    constants = {"MOST": MOST[dtype], "LEAST": LEAST, "IS_UE8M0": is_ue8m0}
    if group is None:
        args = input, codes, scales, scale, columns, input.stride(0)
        constants |= {"BLOCK": min(4096, max(16, next_power(columns)))}
        _launch_quantize_rows(input.device, (rows, 1, 1), args, constants, num_warps=4)
        return codes, scales
    _quantize_groups(input, codes, scales, group, constants)
    return codes, scales


def quantize_into(input: Tensor, quantized: Quantized) -> None:
    """:func:`quantize` of [rows, n] in groups of 128; rows may be apart. Raises UsageError for another shape."""
    quantized.check(*input.shape)
    if input.numel():
        _quantize_groups(input, quantized.codes, quantized.scales, GROUP, Quantized.constants(quantized))


def _quantize_groups(
    input: Tensor, codes: Tensor, scales: Tensor, group: int, constants: Mapping[str, float | bool]
) -> None:
    """:func:`quantize` in groups."""
    (rows, groups), block = scales.shape, max(1, 1024 // group)
    grid = rows, -(-groups // block), 1
    args = input, codes, scales, groups, input.stride(0)
    _launch_quantize(input.device, grid, args, {"GROUP": group, "BLOCK": block, **constants}, num_warps=4)


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
        _launch_few(input, input_scale, weight, weight_scale, rows, bias, output, group, tile, is_constant)
        return output
    if count == 1 and launch is None:
        x_group = 0 if input_scale is None or input_scale.shape[1] == 1 else GROUP
        _launch_row(input, input_scale, weight, weight_scale, rows, bias, output, group, tile, x_group, False)
        return output
    is_in_blocks = tile == GROUP == group and input_scale is not None and input_scale.shape[1] * GROUP == ins
    is_plain = bias is None and launch is None and dtype == torch.bfloat16
    if input_scale is not None and is_in_blocks and is_plain and _is_for_library(input, weight, weight_scale):
        return _library_product(input, input_scale, weight, weight_scale)
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


def _launch_few(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    output: Tensor,
    group: int | None,
    tile: int,
    is_constant: bool,
) -> None:
    """:func:`scaled_linear` of up to 16 rows in groups of 128, by a weight in groups."""
    (count, ins), outs, device = input.shape, len(weight), input.device
    chosen = few_launch(count, outs, ins, device)
    groups, block = min(chosen.groups, next_power(-(-ins // GROUP))), 1 if count == 1 else max(8, next_power(count))
    programs = -(-outs // chosen.outputs)
    constants = {
        "W_GROUP": group or 0,
        "BLOCK_M": block,
        "BLOCK_N": chosen.outputs,
        "GROUPS": groups,
        "IS_UNIFORM": tile % chosen.outputs == 0,
        "IS_EVEN": ins % (groups * GROUP) == 0 and outs % chosen.outputs == 0,
        "IS_CONSTANT": is_constant,
    }
    numbers = count, ins, outs, input.stride(0), weight_scale.shape[1]
    args = input, input_scale, weight, weight_scale, rows, bias, output, *numbers
    free = (shared_memory(device) + 1024) // -(-programs // num_sms(device)) - 1024  # the driver takes 1 KiB of each
    held, buffered = (2, chosen.outputs) if count == 1 else (0, chosen.outputs + block)  # bytes by features
    buffers = (free // (groups * GROUP) - held) // buffered
    iterations = -(-ins // (groups * GROUP))
    stages = max(_LEAST_STAGES, 1 + min(chosen.most_stages - 1, buffers, iterations))
    _launch_scaled_few(device, (programs, 1, 1), args, constants, num_warps=groups, num_stages=stages)


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


def _is_for_library(input: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
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
        found = _library_product(codes, scales, weight, by).float()
    except (RuntimeError, ValueError, NotImplementedError):  # built without it
        return False
    return bool((found - expected).norm() < 0.01 * expected.norm())


def _library_product(input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
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
        _launch_row(*tensors, group, tile, input_group or 0, True, is_ue8m0, launch or ROW_LAUNCH)
    return output


def _launch_row(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    output: Tensor,
    group: int | None,
    tile: int,
    x_group: int,
    quantizes: bool,
    is_ue8m0: bool = False,
    chosen: RowLaunch = ROW_LAUNCH,
) -> None:
    """One row of :func:`scaled_linear` or :func:`quantizing_linear`."""
    outs, ins = weight.shape
    groups = min(chosen.groups, next_power(-(-ins // GROUP)))
    constants = {
        "MOST": MOST[weight.dtype],
        "LEAST": LEAST,
        "IS_UE8M0": is_ue8m0,
        "X_GROUP": x_group,
        "W_GROUP": group or 0,
        "BLOCK_N": chosen.outputs,
        "GROUPS": groups,
        "QUANTIZES": quantizes,
        "IS_UNIFORM": tile % chosen.outputs == 0,
        "IS_EVEN": ins % (groups * GROUP) == 0 and outs % chosen.outputs == 0,
        "STAGES": chosen.stages,
    }
    args = input, input_scale, weight, weight_scale, rows, bias, output, ins, outs, weight_scale.shape[1]
    grid = -(-outs // chosen.outputs), 1, 1
    _launch_scaled_row(input.device, grid, args, constants, num_warps=chosen.warps, num_stages=chosen.stages)


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


_FLOATS = torch.float32, torch.float16, torch.bfloat16


@triton.jit
def _codes(x, MOST: tl.constexpr, dtype: tl.constexpr):
    """Saturated, for int8 rounded; NaN becomes 0 in int8."""
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if dtype == tl.int8:
        x = tl.where(x == x, (x + 12582912.0) - 12582912.0, 0.0)  # to the nearest integer, ties to even
    return x.to(dtype)


@triton.jit
def _scale_of(most, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr):
    """Scale of a group with the largest absolute value ``most``."""
    scale = tl.div_rn(tl.maximum(most, LEAST), tl.full(most.shape, MOST, tl.float32))
    if IS_UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_quantized(
    x, codes, scales, real, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Quantize float32 values [groups, features]; ``codes`` are pointers of that shape, ``scales`` [groups, 1]."""
    most = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)[:, None]
    scale = _scale_of(most, MOST, LEAST, IS_UE8M0)
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    tl.store(codes, _codes(x, MOST, codes.dtype.element_ty), mask=real)
    tl.store(scales, scale, mask=real)


@triton.jit
def _quantize_kernel(
    input, codes, scales, groups, input_row,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK groups of one row."""
    wait_for_previous(IS_OVERLAPPED)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at, real = group * GROUP + tl.arange(0, GROUP)[None, :], group < groups
    x = tl.load(input + row * input_row + at, mask=real, other=0.0).to(tl.float32)
    store_quantized(x, codes + row * groups * GROUP + at, scales + row * groups + group, real, MOST, LEAST, IS_UE8M0)


@triton.jit
def _quantize_rows_kernel(
    input, codes, scales, fixed, columns, input_row,
    BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """One row with one scale, which is ``fixed`` or follows from its largest value."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if fixed is not None:
        scale = tl.load(fixed)
    else:
        top = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, columns, BLOCK):
            x = tl.load(input + row * input_row + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.where(x == x, tl.abs(x), 0.0))
        scale = _scale_of(tl.max(top, 0), MOST, LEAST, IS_UE8M0)
    for start in tl.range(0, columns, BLOCK):
        x = tl.load(input + row * input_row + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * scale)
        tl.store(codes + row * columns + start + k, _codes(x, MOST, codes.dtype.element_ty), mask=start + k < columns)
    tl.store(scales + row, scale)


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


@triton.jit(do_not_specialize=["rows"])
def _scaled_few_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, rows, ins, outs, input_row, w_groups,
    W_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr, IS_CONSTANT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows. An iteration is a batch of GROUPS products, of which each warp computes its own.

    The compiler moves loads of a product's operands ahead of the iteration that uses them, those of the first
    iterations before the loop. One row is loaded by the iteration before instead, so that only the weight is loaded
    ahead of the wait for the previous kernel, which is in the loop. Of more rows that takes too many registers.
    """
    IS_ROW: tl.constexpr = BLOCK_M == 1
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        if not (IS_ROW and IS_CONSTANT):
            gdc_wait()
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    g, k = tl.arange(0, GROUPS), tl.arange(0, 128)
    is_output, is_row, x_groups = n < outs, m < rows, ins // 128
    w_at = weight + n.to(tl.int64)[None, :, None] * ins + g[:, None, None] * 128 + k[None, None, :]
    x_at = input + m[None, None, :] * input_row + g[:, None, None] * 128 + k[None, :, None]
    x_by_at = input_scale + m[None, :] * x_groups + g[:, None]
    w_by_at = weight_scale + tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.int32)
    total = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    if IS_ROW:
        x = tl.zeros([GROUPS, 128, 1], input.dtype.element_ty)
    x_by = tl.zeros([GROUPS, BLOCK_M], tl.float32)
    w_by = tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.float32)
    for first in tl.range(0, x_groups, GROUPS):
        here, later = (first + g < x_groups)[:, None], (first + GROUPS + g < x_groups)[:, None]
        if IS_EVEN:
            w = tl.load(w_at + first * 128)
        else:
            w = tl.load(w_at + first * 128, mask=is_output[None, :, None] & here[:, :, None], other=0.0)
        if first == 0:
            if IS_UNIFORM:
                w_by_at += tl.load(scale_row + tl.program_id(0) * BLOCK_N) * w_groups
            else:
                w_by_at += tl.load(scale_row + n, mask=is_output, other=0)[None, :] * w_groups
            w_by = tl.load(w_by_at + g[:, None] * 128 // W_GROUP, mask=here, other=0.0)
            if IS_OVERLAPPED and IS_ROW and IS_CONSTANT:
                gdc_wait()
            if IS_ROW:
                x = tl.load(x_at, mask=here[:, :, None], other=0.0)
            x_by = tl.load(x_by_at, mask=is_row[None, :] & here, other=0.0)
        start = first + GROUPS  # of the next iteration
        if IS_ROW:
            x_next = tl.load(x_at + start * 128, mask=later[:, :, None], other=0.0)
        else:
            x = tl.load(x_at + first * 128, mask=is_row[None, None, :] & here[:, :, None], other=0.0)
        x_by_next = tl.load(x_by_at + start, mask=is_row[None, :] & later, other=0.0)
        w_by_next = tl.load(w_by_at + (start + g[:, None]) * 128 // W_GROUP, mask=later, other=0.0)
        if weight.dtype.element_ty == tl.int8:
            part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
        else:
            part = tl.dot(w, x, input_precision="ieee")
        if IS_UNIFORM:
            total += part * (x_by * w_by)[:, None, :]
        else:
            total += part * x_by[:, None, :] * w_by[:, :, None]
        x_by, w_by = x_by_next, w_by_next
        if IS_ROW:
            x = x_next
    result = tl.sum(total, 0)
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = output + m[None, :] * outs + n[:, None]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit
def _row_block(
    input, scales, at, real, group, scale, ins,
    MOST: tl.constexpr, X_GROUP: tl.constexpr, QUANTIZES: tl.constexpr, IS_EVEN: tl.constexpr, dtype: tl.constexpr,
    LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """[groups, 128] codes or values of the row as float32, multiplied by the scale of their group, if they have one.

    ``scale`` divides what is quantized with one scale for the row.
    """
    if IS_EVEN:
        x = tl.load(input + at).to(tl.float32)
    else:
        x = tl.load(input + at, mask=real, other=0.0).to(tl.float32)
    if QUANTIZES:
        if X_GROUP:
            most = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
            by = _scale_of(most, MOST, LEAST, IS_UE8M0)
            codes = _codes(tl.div_rn(x, tl.broadcast_to(by[:, None], x.shape)), MOST, dtype)
            return codes.to(tl.float32) * by[:, None]
        else:
            return _codes(tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale), MOST, dtype).to(tl.float32)
    else:
        if X_GROUP:
            x = x * tl.load(scales + group, mask=group * 128 < ins, other=0.0)[:, None]
        return x


@triton.jit
def _scaled_row_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, ins, outs, w_groups,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, QUANTIZES: tl.constexpr, IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row, which is quantized here if QUANTIZES."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, group = n < outs, tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    w_at = weight + n.to(tl.int64)[:, None, None] * ins + k[None, :, :]
    wait_for_previous(IS_OVERLAPPED)
    by_row = tl.load(scale_row + n, mask=is_output, other=0)
    if IS_UNIFORM:
        by_row = tl.load(scale_row + tl.program_id(0) * BLOCK_N)
    x_scale = 1.0
    if QUANTIZES and X_GROUP == 0:
        if input_scale is not None:
            x_scale = tl.load(input_scale)
        else:
            top = tl.zeros([GROUPS, 128], tl.float32)
            for start in tl.range(0, ins, GROUPS * 128):
                x = tl.load(input + start + k, mask=start + k < ins, other=0.0).to(tl.float32)
                top = tl.maximum(top, tl.where(x == x, tl.abs(x), 0.0))
            x_scale = _scale_of(tl.max(tl.max(top, 1), 0), MOST, LEAST, IS_UE8M0)
    total = tl.zeros([BLOCK_N, GROUPS, 128], tl.float32)
    for start in tl.range(0, ins, GROUPS * 128, num_stages=STAGES):
        real = start + k < ins
        if IS_EVEN:
            w = tl.load(w_at + start)
        else:
            w = tl.load(w_at + start, mask=is_output[:, None, None] & real[None, :, :], other=0.0)
        x = _row_block(
            input, input_scale, start + k, real, start // 128 + group, x_scale, ins,
            MOST, X_GROUP, QUANTIZES, IS_EVEN, weight.dtype.element_ty, LEAST, IS_UE8M0,
        )  # fmt: skip
        wide = w.to(tl.float32)
        if W_GROUP:
            which = (start + group * 128) // W_GROUP
            if IS_UNIFORM:
                by = tl.load(weight_scale + by_row * w_groups + which, mask=which < w_groups, other=0.0)
                x = x * by[:, None]
            else:
                scale_at = weight_scale + by_row[:, None] * w_groups + which[None, :]
                by = tl.load(scale_at, mask=is_output[:, None] & (which < w_groups)[None, :], other=0.0)
                wide = wide * by[:, :, None]
        total += wide * x[None, :, :]
    result = tl.sum(tl.sum(total, 2), 1)
    if W_GROUP == 0:
        if IS_UNIFORM:
            result = result * tl.load(weight_scale + by_row)
        else:
            result = result * tl.load(weight_scale + by_row, mask=is_output, other=0.0)
    if X_GROUP == 0:
        if QUANTIZES:
            result = result * x_scale
        elif input_scale is not None:
            result = result * tl.load(input_scale)
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + n, result.to(output.dtype.element_ty), mask=is_output)


_launch_quantize, _launch_quantize_rows = Launcher(_quantize_kernel, overlaps=True), Launcher(_quantize_rows_kernel)
_launch_scaled, _launch_scaled_row = Launcher(_scaled_kernel), Launcher(_scaled_row_kernel, overlaps=True)
_launch_scaled_few = Launcher(_scaled_few_kernel, overlaps=True)
