"""Walsh-Hadamard transform of the last axis, which spreads outliers before quantization (QuaRot, arXiv:2404.00456).

    out[..., i] = scale * sum over j of H[i, j] * states[..., j]

The size is 2^k * {1, 12, 20, 28}, which includes 2^k * 40. H is the Kronecker product of a Hadamard matrix of order 1,
12, 20 or 28 and Sylvester's matrix of order 2^k. Orders 12 and 20 use Paley's first construction, order 28 his second
(J. Math. Phys. 12, 1933, 311-320). DeepSeek's indexer applies this transform to queries and keys before FP8 storage.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power

MAX_SIZE = 32768
"""Maximum size of the last axis: a program holds a row in registers."""
_TILE = 2048
"""Elements of a program that processes several short rows."""
_ORDERS = 12, 20, 28
"""Orders of the Hadamard factors that are not powers of two."""
_PALEY_PRIMES = {12: 11, 20: 19, 28: 13}


@functools.lru_cache(maxsize=32)
def hadamard_matrix(size: int) -> Tensor:
    """Return H [size, size] with entries 1 and -1, float32 on the CPU; H @ H.T is size * identity.

    Raises UsageError for a size that is not 2^k * {1, 12, 20, 28}.
    """
    order, power = _split(size)
    matrix = _paley(order) if order > 1 else torch.ones(1, 1)
    sylvester = torch.ones(1, 1)
    while len(sylvester) < power:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    return torch.kron(matrix, sylvester)


def hadamard_reference(states: Tensor, scale: float = 1.0) -> Tensor:
    """Compute :func:`hadamard` in plain PyTorch, in float64 with one final rounding."""
    matrix = hadamard_matrix(states.shape[-1]).to(states.device, torch.float64)
    return (states.double() @ matrix.T * scale).to(states.dtype)


def hadamard(states: Tensor, scale: float = 1.0) -> Tensor:
    """Return the Walsh-Hadamard transform of ``states`` [..., size], contiguous and in the same dtype.

    Sums are float32 and rounded once. ``scale`` = size ** -0.5 makes the transform orthogonal. Raises UsageError for a
    size that is not 2^k * {1, 12, 20, 28} or exceeds MAX_SIZE, and for a dtype other than float32, float16 and
    bfloat16.
    """
    check_same_device(states)
    if states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UsageError(f"hadamard: unsupported dtype {states.dtype}; use float32, float16 or bfloat16")
    size = states.shape[-1]
    order, power = _split(size)
    if size > MAX_SIZE:
        raise UsageError(f"hadamard: size {size} exceeds {MAX_SIZE}")
    states = states.contiguous()
    out = torch.empty_like(states)
    if not states.numel():
        return out
    count, lines = states.numel() // size, next_power(order)
    rows = max(1, min(next_power(count), _TILE // (lines * power)))
    if order > 1:
        rows = max(rows, 16 // power)  # tensor cores need at least 16 columns
    matrix = _on_device(order, lines, states.dtype, states.device) if order > 1 else None
    constants = {"ORDER": order, "LINES": lines, "POWER": power, "ROWS": rows, "STEPS": power.bit_length() - 1}
    warps = min(16, max(4, lines * rows * power // 2048))
    _launch(states.device, (-(-count // rows), 1, 1), (states, out, matrix, count, scale), constants, num_warps=warps)
    return out


def _split(size: int) -> tuple[int, int]:
    """Return (order, 2^k) with size = order * 2^k; raise UsageError for an unsupported size."""
    for order in (1, *_ORDERS):
        power = size // order
        if size > 0 and size % order == 0 and power & (power - 1) == 0:
            return order, power
    raise UsageError(f"no Hadamard matrix of order {size}: it must be 2^k * 1, 12, 20, 28 or 40")


def _paley(order: int) -> Tensor:
    """Return a Hadamard matrix of order 12, 20 or 28, from the quadratic residues of a prime field."""
    prime = _PALEY_PRIMES[order]
    numbers = torch.arange(prime)
    squares = set((numbers[1:] ** 2 % prime).tolist())
    residues = torch.tensor([0.0, *(1.0 if n in squares else -1.0 for n in range(1, prime))])
    core = residues[(numbers[:, None] - numbers[None, :]) % prime]
    conference = torch.zeros(prime + 1, prime + 1)
    conference[0, 1:], conference[1:, 1:] = 1.0, core
    if order == prime + 1:  # prime = 3 mod 4: skew
        conference[1:, 0] = -1.0
        return conference + torch.eye(order)
    conference[1:, 0] = 1.0  # prime = 1 mod 4: symmetric
    plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(conference, plus) + torch.kron(torch.eye(prime + 1), minus)


@functools.lru_cache(maxsize=32)
def _on_device(order: int, lines: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the Hadamard matrix of ``order`` on ``device``, zero-padded to [lines, lines]."""
    padded = torch.zeros(lines, lines)
    padded[:order, :order] = _paley(order)
    return padded.to(device, dtype)


@triton.jit(do_not_specialize=["count", "scale"])
def _hadamard_kernel(
    states, out, matrix, count, scale,
    ORDER: tl.constexpr, LINES: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Transform ROWS rows viewed as [ORDER, POWER]: matrix product over the first axis, butterflies over the second."""
    line = tl.arange(0, LINES)[:, None]
    column = tl.arange(0, ROWS * POWER)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + column // POWER
    offset = row * (ORDER * POWER) + line * POWER + column % POWER
    is_inside = (line < ORDER) & (row < count)
    x = tl.load(states + offset, mask=is_inside, other=0.0)
    if matrix is not None:
        signs = tl.load(matrix + line * LINES + tl.arange(0, LINES)[None, :])
        x = tl.dot(signs, x, input_precision="ieee")
    x = tl.reshape(x.to(tl.float32), [LINES * ROWS * POWER])
    for step in tl.static_range(STEPS):
        x = tl.reshape(x, [LINES * ROWS * POWER // 2 // (1 << step), 2, 1 << step])
        one, two = tl.split(tl.permute(x, [0, 2, 1]))
        x = tl.reshape(tl.permute(tl.join(one + two, one - two), [0, 2, 1]), [LINES * ROWS * POWER])
    x = tl.reshape(x, [LINES, ROWS * POWER]) * scale
    tl.store(out + offset, x.to(out.dtype.element_ty), mask=is_inside)


_launch = Launcher(_hadamard_kernel)
