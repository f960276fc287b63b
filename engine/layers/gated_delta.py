"""Gated delta rule, arXiv:2412.06464: linear attention whose state is a matrix [key, value] per head.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T,    o_t = S_t^T q_t

The decay g_t is one number per head, or one per head and key feature, in which case exp(g_t) multiplies the rows of S
(Kimi Delta Attention, arXiv:2510.26692, section 3). Two forms give the same sum: :func:`recurrent` computes one row at
a time, :func:`chunked` computes blocks of rows with matrix products (arXiv:2412.06464, section 3.3). All in float32.
"""

import torch
from torch import Tensor

CHUNK = 64
FEATURE_CHUNK = 16
"""Rows per block of the chunked form: with one decay per head, and with one per key feature."""


def l2_normalised(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6), with the norm over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one row of each of n requests; return the output [n, heads, value] and the new state.

    Query and key are [n, heads, key], value is [n, heads, value], decay (log) [n, heads, 1 or key], beta [n, heads] and
    state [n, heads, key, value]. The caller has scaled the query.
    """
    state = state * torch.exp(decay).unsqueeze(-1)
    predicted = (state * key.unsqueeze(-1)).sum(-2)
    state = state + key.unsqueeze(-1) * ((value - predicted) * beta.unsqueeze(-1)).unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2), state


def chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute n rows of one request in blocks, equivalent to :func:`recurrent` per row; state [heads, key, value]."""
    outputs, size = [], CHUNK if decay.shape[-1] == 1 else FEATURE_CHUNK
    for rows in range(0, len(query), size):
        q, k, v, d, b = (x[rows : rows + size].transpose(0, 1) for x in (query, key, value, decay, beta))
        output, state = _block(q, k, v, d, b, state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _block(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one block: [heads, rows, ...], state [heads, key, value] -> [heads, rows, value] and the new state.

    Each row's correction depends on the corrections of earlier rows of the block: a unit lower triangular system.
    """
    total, weighted = decay.cumsum(1), key * beta.unsqueeze(-1)
    since_start = torch.exp(total)
    system, scores = _products(weighted, query, key, total)
    wanted = value * beta.unsqueeze(-1) - (weighted * since_start) @ state
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (query * since_start) @ state + scores @ corrections
    until_end = torch.exp(total[:, -1:] - total)
    return output, state * since_start[:, -1].unsqueeze(-1) + (key * until_end).mT @ corrections


def _products(weighted: Tensor, query: Tensor, key: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over features of x_i key_j exp(total_i - total_j) for x = ``weighted`` and x = ``query``.

    Each result is [heads, i, j], with 0 for j > i. Only differences are exponentiated, which are at most 0 for j <= i.
    """
    if total.shape[-1] == 1:
        between = torch.exp((total - total.mT).clamp(max=0))
        return ((weighted @ key.mT) * between).tril(), ((query @ key.mT) * between).tril()
    between = (total.unsqueeze(2) - total.unsqueeze(1)).clamp_(max=0).exp_().mul_(key.unsqueeze(1))
    products = between @ torch.stack((weighted, query), dim=-1)
    return products[..., 0].tril(), products[..., 1].tril()
