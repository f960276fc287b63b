"""Elementwise part of a gated MLP, arXiv:2002.05202: act(gate) * up.

act is named as in transformers: ``silu`` x / (1 + exp(-x)), ``gelu`` x Phi(x), ``gelu_pytorch_tanh``
(arXiv:1606.08415, section 2) or ``relu``. The activation is computed in float32 and rounded to the dtype before the
product, as in the PyTorch modules.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, wait_for_previous
from tapscope.kernels.triton.quantize import Quantized, store_quantized

KINDS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_BLOCK = 1024


def gated_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Compute :func:`gated` in plain PyTorch."""
    if kind == "silu":
        return functional.silu(gate) * up
    if kind == "relu":
        return functional.relu(gate) * up
    return functional.gelu(gate, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none") * up


def gated(
    gate: Tensor, up: Tensor | None, kind: str, *, active: Tensor | None = None, quantized: Quantized | None = None
) -> Tensor:
    """Return ``act(gate) * up`` [tokens, n], contiguous, in the dtype of ``gate``; ``kind`` names the activation.

    ``gate`` and ``up`` are [tokens, n]. Without ``up``, ``gate`` is [tokens, 2n]: n gate features, then n of ``up``.
    Rows may have any stride. ``active`` [tokens, n], contiguous, receives act(gate). ``quantized`` receives the output
    quantized in groups, see :func:`.quantize.quantize`. Raises UsageError for an unknown kind and for inconsistent
    tensors.
    """
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    check_same_device(gate, up, active)
    if kind not in KINDS:
        raise UsageError(f"activation {kind!r}: expected one of {', '.join(KINDS)}")
    if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise UsageError(f"gate {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)} do not fit")
    if active is not None and not (
        active.shape == gate.shape and active.dtype == gate.dtype and active.is_contiguous()
    ):
        raise UsageError(f"active {active.dtype} {list(active.shape)} does not fit gate {list(gate.shape)}")
    if quantized is not None:
        quantized.check(*gate.shape)
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    (rows, columns), steps = gate.shape, (gate.stride(0), gate.stride(1), up.stride(0), up.stride(1))
    if output.numel():
        constants = {"KIND": KINDS.index(kind), "BLOCK": _BLOCK} | Quantized.constants(quantized)
        codes, scales = (None, None) if quantized is None else quantized[:2]
        args = gate, up, output, active, codes, scales, columns, *steps
        _launch_gated(gate.device, (rows, -(-columns // _BLOCK), 1), args, constants, num_warps=4)
    return output


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply the activation KIND, an index in :data:`KINDS`, to float32 values."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))  # 1 + tanh(inner)
    else:
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _gated_kernel(
    gate, up, output, active, codes, scales, columns, gate_row, gate_column, up_row, up_column,
    KIND: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK features of one row."""
    wait_for_previous(IS_OVERLAPPED)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = gate.dtype.element_ty
    x = tl.load(gate + row * gate_row + column * gate_column, mask=column < columns, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column * up_column, mask=column < columns, other=0.0).to(tl.float32)
    active_x = activated(x, KIND).to(dtype)
    if active is not None:
        tl.store(active + row * columns + column, active_x, mask=column < columns)
    product = (active_x.to(tl.float32) * y).to(dtype)
    tl.store(output + row * columns + column, product, mask=column < columns)
    if codes is not None:
        group = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)[:, None]
        offset = row * columns + group * 128 + tl.arange(0, 128)[None, :]
        values, scale_ptrs = (
            tl.reshape(product.to(tl.float32), (BLOCK // 128, 128)),
            scales + row * (columns // 128) + group,
        )
        store_quantized(values, codes + offset, scale_ptrs, group * 128 < columns, MOST, LEAST, IS_UE8M0)


_launch_gated = Launcher(_gated_kernel, overlaps=True)
