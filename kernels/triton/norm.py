"""RMSNorm over the last axis, arXiv:1910.07467, alone or fused with the addition to the residual stream.

    summed = residual + states                             rounded to the dtype
    normed = round(summed / rms(summed)) * weight          Llama: transformers' LlamaRMSNorm
    normed = summed / rms(summed) * (1 + weight)           Gemma: transformers' Gemma2RMSNorm, float32 until the end

rms(x) = sqrt(mean(x^2) + eps) in float32. Gemma 2 also normalizes the states before the addition (arXiv:2408.00118):
with ``post_weight``, summed = residual + norm(states, post_weight). A program processes one row, or several short rows
(for example of single heads). A row's result does not depend on other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power, wait_for_previous
from tapscope.kernels.triton.quantize import Quantized, store_quantized

_TILE = 1024
"""Elements of a program that processes several rows."""


def rms_norm_reference(states: Tensor, weight: Tensor, eps: float, *, is_gemma: bool = False) -> Tensor:
    """Compute :func:`rms_norm` in plain PyTorch."""
    x = states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * (1.0 + weight.float())).to(states.dtype) if is_gemma else weight * x.to(states.dtype)


def add_rms_norm_reference(
    states: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    is_gemma: bool = False,
    post_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`add_rms_norm` in plain PyTorch."""
    if post_weight is not None:
        states = rms_norm_reference(states, post_weight, eps, is_gemma=is_gemma)
    summed = residual + states
    return rms_norm_reference(summed, weight, eps, is_gemma=is_gemma), summed


def rms_norm(states: Tensor, weight: Tensor, eps: float, *, is_gemma: bool = False) -> Tensor:
    """Return the RMSNorm of ``states`` [..., size], contiguous and in the same dtype.

    ``weight`` is [size] of that dtype. ``states`` may be a strided view [tokens, heads, size] or [tokens, size]
    with a contiguous last axis. Raises UsageError for inconsistent tensors.
    """
    return _norm(states, None, weight, None, eps, is_gemma)[0]


def add_rms_norm(
    states: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    is_gemma: bool = False,
    post_weight: Tensor | None = None,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, summed), the RMSNorm of ``residual + states`` and the sum, both [..., size] and contiguous.

    ``residual`` has the shape and dtype of ``states``, as do the results. ``quantized`` receives ``normed`` quantized
    in groups, see :func:`.quantize.quantize`. Raises UsageError for inconsistent tensors.
    """
    return _norm(states, residual, weight, post_weight, eps, is_gemma, quantized)


def _norm(
    states: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    post_weight: Tensor | None,
    eps: float,
    is_gemma: bool,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    _check(states, residual, weight, post_weight)
    size = states.shape[-1]
    if quantized is not None:
        quantized.check(states.numel() // size, size)
    normed = torch.empty_like(states, memory_format=torch.contiguous_format)
    summed = normed if residual is None else torch.empty_like(normed)
    if not states.numel():
        return normed, summed
    added = states if residual is None else residual
    count, block = states.numel() // size, next_power(size)
    rows = max(1, _TILE // block)
    codes, scales = (None, None) if quantized is None else quantized[:2]
    args = (
        states,
        added,
        weight,
        post_weight,
        normed,
        summed,
        codes,
        scales,
        count,
        eps,
        *_steps(states),
        *_steps(added),
    )
    constants = {"SIZE": size, "BLOCK": block, "ROWS": rows, "IS_GEMMA": is_gemma, "IS_ADDED": residual is not None}
    all_constants = constants | Quantized.constants(quantized)
    _launch_norm(states.device, (-(-count // rows), 1, 1), args, all_constants, num_warps=min(16, max(4, block // 512)))
    return normed, summed


def _check(states: Tensor, residual: Tensor | None, weight: Tensor, post_weight: Tensor | None) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    check_same_device(states, residual, weight, post_weight)
    for name, vector in (("weight", weight), ("post_weight", post_weight)):
        if vector is not None and (vector.shape != states.shape[-1:] or vector.dtype != states.dtype):
            raise UsageError(
                f"{name} is {vector.dtype} {list(vector.shape)}; states {states.dtype} {list(states.shape)}"
            )
        if vector is not None and not vector.is_contiguous():
            raise UsageError(f"{name} must be contiguous")
    if residual is not None and (residual.shape != states.shape or residual.dtype != states.dtype):
        what = f"{residual.dtype} {list(residual.shape)}"
        raise UsageError(f"residual is {what}; states are {states.dtype} {list(states.shape)}")


def _steps(states: Tensor) -> tuple[int, int, int]:
    """Return (size of the second-to-last axis, its stride, stride of the axis before); (1, 0, row stride) if not 3D."""
    if states.stride(-1) != 1 and states.shape[-1] > 1:
        raise UsageError("the last axis must be contiguous")
    if states.ndim == 3:
        return states.shape[1], states.stride(1), states.stride(0)
    rows = states.view(-1, states.shape[-1])
    return 1, 0, rows.stride(0)


@triton.jit
def _normalized(x, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr, IS_GEMMA: tl.constexpr):
    """Normalize and weight [rows, size] in float32; the result is rounded to ``dtype`` and returned in float32."""
    x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    if IS_GEMMA:
        x *= 1.0 + weight
    else:
        x = x.to(dtype).to(tl.float32) * weight
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _norm_kernel(
    states, residual, weight, post, normed, summed, codes, scales, count, eps,
    inner, inner_step, outer_step, residual_inner, residual_inner_step, residual_outer_step,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_GEMMA: tl.constexpr, IS_ADDED: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of [count, SIZE], with optional residual addition and quantization."""
    dtype: tl.constexpr = states.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    norm_weight = tl.load(weight + column, mask=column < SIZE, other=0.0)
    wait_for_previous(IS_OVERLAPPED)
    valid = (row < count) & (column < SIZE)
    offset = row // inner * outer_step + row % inner * inner_step + column
    x = tl.load(states + offset, mask=valid, other=0.0).to(tl.float32)
    if post is not None:
        post_weight = tl.load(post + column, mask=column < SIZE, other=0.0).to(tl.float32)
        x = _normalized(x, post_weight, eps, dtype, SIZE, IS_GEMMA)
    if IS_ADDED:
        offset = row // residual_inner * residual_outer_step + row % residual_inner * residual_inner_step + column
        x += tl.load(residual + offset, mask=valid, other=0.0).to(tl.float32)
        tl.store(summed + row * SIZE + column, x.to(dtype), mask=valid)
        x = x.to(dtype).to(tl.float32)
    x = _normalized(x, norm_weight.to(tl.float32), eps, dtype, SIZE, IS_GEMMA)
    tl.store(normed + row * SIZE + column, x.to(dtype), mask=valid)
    if codes is not None:
        index = tl.arange(0, ROWS * BLOCK // 128)[:, None]
        row = tl.program_id(0).to(tl.int64) * ROWS + index // (BLOCK // 128)
        group = index % (BLOCK // 128)
        x = tl.reshape(x, (ROWS * BLOCK // 128, 128))
        valid = (row < count) & (group < SIZE // 128)
        offset = row * SIZE + group * 128 + tl.arange(0, 128)[None, :]
        store_quantized(x, codes + offset, scales + row * (SIZE // 128) + group, valid, MOST, LEAST, IS_UE8M0)


_launch_norm = Launcher(_norm_kernel, overlaps=True)
