"""Gated delta rule, arXiv:2412.06464: linear attention whose state is a matrix [key, value] per head.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T,    o_t = S_t^T q_t

Two forms of the same sum: :func:`recurrent` computes one row after the other, :func:`chunked` blocks of rows by matrix
products (section 3.3). All in float32.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a block of the chunked form."""


def l2_normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row of each of n requests: query and key [n, heads, key], value [n, heads, value], decay (log) and beta
    [n, heads], state [n, heads, key, value] -> output [n, heads, value] and the new state. The query is scaled.
    """
    state = state * torch.exp(decay)[..., None, None]
    predicted = (state * key.unsqueeze(-1)).sum(-2)
    state = state + key.unsqueeze(-1) * ((value - predicted) * beta.unsqueeze(-1)).unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2), state


def chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """n rows of one request, as :func:`recurrent` for each in turn; state [heads, key, value] before and after them."""
    outputs = []
    for rows in range(0, len(query), CHUNK):
        q, k, v, d, b = (x[rows : rows + CHUNK].transpose(0, 1) for x in (query, key, value, decay, beta))
        output, state = _block(q, k, v, d, b, state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _block(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[heads, rows, ...] and state [heads, key, value] -> [heads, rows, value] and the state after the rows.

    The delta rule's corrections depend on those of earlier rows of the block: a unit lower triangular system.
    """
    total = decay.cumsum(-1)
    num_rows = decay.shape[1]
    later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=decay.device).triu_(1)
    between = torch.exp((total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(later, -torch.inf))
    weighted = key * beta.unsqueeze(-1)
    system = (weighted @ key.mT) * between
    since_start = torch.exp(total).unsqueeze(-1)
    wanted = value * beta.unsqueeze(-1) - (weighted * since_start) @ state
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (query * since_start) @ state + ((query @ key.mT) * between) @ corrections
    until_end = torch.exp(total[:, -1:] - total).unsqueeze(-1)
    return output, state * torch.exp(total[:, -1])[:, None, None] + (key * until_end).mT @ corrections


def causal_conv(rows: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution of n rows [..., n, channels] after ``window`` [..., channels, kernel - 1].

    ``weight`` [channels, kernel], ``bias`` [channels] -> ([..., n, channels], the window after the rows).
    """
    seen, taps = torch.cat((window.mT, rows), dim=-2), weight.float()
    wide, count, kernel = seen.float(), rows.shape[-2], weight.shape[1]
    output = wide[..., :count, :] * taps[:, 0]
    for tap in range(1, kernel):
        output += wide[..., tap : tap + count, :] * taps[:, tap]
    if bias is not None:
        output += bias
    return output.to(rows.dtype), seen[..., -(kernel - 1) :, :].mT


def windows_after(rows: Tensor, window: Tensor) -> Tensor:
    """The windows of :func:`causal_conv` after each of n rows [n, channels]: [n, channels, kernel - 1]."""
    return torch.cat((window.mT, rows)).unfold(0, window.shape[-1], 1)[1:].contiguous()
