"""RMSNorm over the last axis, arXiv:1910.07467, alone or behind the addition to the residual stream.

    summed = residual + states                             rounded to the dtype
    normed = round(summed / rms(summed)) * weight          Llama: transformers' LlamaRMSNorm
    normed = summed / rms(summed) * (1 + weight)           Gemma: transformers' Gemma2RMSNorm, in float32 to the end

rms(x) = sqrt(mean(x^2) + eps) in float32. Gemma 2 norms what it adds, too (arXiv:2408.00118): with ``post_weight``,
summed = residual + norm(states, post_weight). One program takes a row, or several where rows are short, as those of
one head are; a row's result does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power, wait_for_previous
from tapscope.kernels.triton.quantize import Quantized, store_quantized

_TILE = 1024
"""Elements of a program that takes several rows."""


def rms_norm_reference(states: Tensor, weight: Tensor, eps: float, *, is_gemma: bool = False) -> Tensor:
    """What :func:`rms_norm` computes."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(states.dtype) if is_gemma else weight * wide.to(states.dtype)


def add_rms_norm_reference(
    states: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    is_gemma: bool = False,
    post_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`add_rms_norm` computes."""
    if post_weight is not None:
        states = rms_norm_reference(states, post_weight, eps, is_gemma=is_gemma)
    summed = residual + states
    return rms_norm_reference(summed, weight, eps, is_gemma=is_gemma), summed


def rms_norm(states: Tensor, weight: Tensor, eps: float, *, is_gemma: bool = False) -> Tensor:
    """[..., size] -> [..., size], contiguous, in the dtype of ``states``; weight [size] of that dtype.

    ``states`` may be a view of [tokens, heads, size] or [tokens, size] with the last axis contiguous.
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
    """(normed, summed) of ``residual`` + ``states``, both [..., size]; contiguous, in the dtype of ``states``.

    ``residual`` has the shape and dtype of ``states``. ``quantized`` receives what :func:`.quantize.quantize` computes
    from ``normed``, in groups. Raises UsageError for tensors that do not fit together.
    """
    return _norm(states, residual, weight, post_weight, eps, is_gemma, quantized)


def _norm(
    states: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    post: Tensor | None,
    eps: float,
    is_gemma: bool,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    _check(states, residual, weight, post)
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
    args = states, added, weight, post, normed, summed, codes, scales, count, eps, *_steps(states), *_steps(added)
    constants = {"SIZE": size, "BLOCK": block, "ROWS": rows, "IS_GEMMA": is_gemma, "IS_ADDED": residual is not None}
    given = constants | Quantized.constants(quantized)
    _launch_norm(states.device, (-(-count // rows), 1, 1), args, given, num_warps=min(16, max(4, block // 512)))
    return normed, summed


def _check(states: Tensor, residual: Tensor | None, weight: Tensor, post: Tensor | None) -> None:
    """Raise UsageError for tensors that do not fit together."""
    check_same_device(states, residual, weight, post)
    for name, vector in (("weight", weight), ("post_weight", post)):
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
    """Rows of the second axis from the last, and how far apart rows of that axis and of the one before lie."""
    if states.stride(-1) != 1 and states.shape[-1] > 1:
        raise UsageError("the last axis must be contiguous")
    if states.ndim == 3:
        return states.shape[1], states.stride(1), states.stride(0)
    rows = states.view(-1, states.shape[-1])
    return 1, 0, rows.stride(0)


@triton.jit
def _normalised(wide, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr, IS_GEMMA: tl.constexpr):
    """[rows, size] in float32, normalised and weighted, rounded to ``dtype`` and in float32 again."""
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    if IS_GEMMA:
        wide *= 1.0 + weight
    else:
        wide = wide.to(dtype).to(tl.float32) * weight
    return wide.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _norm_kernel(
    states, residual, weight, post, normed, summed, codes, scales, count, eps,
    inner, inner_step, outer_step, residual_inner, residual_inner_step, residual_outer_step,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_GEMMA: tl.constexpr, IS_ADDED: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """ROWS rows: [count, SIZE] -> normed, and summed where there is something to add; codes and scales, if any."""
    dtype: tl.constexpr = states.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    last = tl.load(weight + column, mask=column < SIZE, other=0.0)
    wait_for_previous(IS_OVERLAPPED)
    real = (row < count) & (column < SIZE)
    at = row // inner * outer_step + row % inner * inner_step + column
    wide = tl.load(states + at, mask=real, other=0.0).to(tl.float32)
    if post is not None:
        by = tl.load(post + column, mask=column < SIZE, other=0.0).to(tl.float32)
        wide = _normalised(wide, by, eps, dtype, SIZE, IS_GEMMA)
    if IS_ADDED:
        at = row // residual_inner * residual_outer_step + row % residual_inner * residual_inner_step + column
        wide += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
        tl.store(summed + row * SIZE + column, wide.to(dtype), mask=real)
        wide = wide.to(dtype).to(tl.float32)
    wide = _normalised(wide, last.to(tl.float32), eps, dtype, SIZE, IS_GEMMA)
    tl.store(normed + row * SIZE + column, wide.to(dtype), mask=real)
    if codes is not None:
        part = tl.arange(0, ROWS * BLOCK // 128)[:, None]
        row = tl.program_id(0).to(tl.int64) * ROWS + part // (BLOCK // 128)
        group = part % (BLOCK // 128)
        wide = tl.reshape(wide, (ROWS * BLOCK // 128, 128))
        real = (row < count) & (group < SIZE // 128)
        at = row * SIZE + group * 128 + tl.arange(0, 128)[None, :]
        store_quantized(wide, codes + at, scales + row * (SIZE // 128) + group, real, MOST, LEAST, IS_UE8M0)


_launch_norm = Launcher(_norm_kernel, overlaps=True)
