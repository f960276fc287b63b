"""Scans of state space models: a linear recurrence on a decaying state, all in float32.

    S_t = exp(g_t) S_(t-1) + b_t x_t^T,    y_t = S_t^T c_t

In Mamba-2 (arXiv:2405.21060) a head has a state [state, features] and one decay g. Two forms give the same sum:
:func:`scan_row` computes one row, :func:`scan_rows` computes blocks of rows with matrix products (section 6).

In Mamba (arXiv:2312.00752, selective scan) a channel has a state [state] with a decay per element:
:func:`selective_row` and :func:`selective_rows`. The latter computes row by row on a CPU. On a GPU, where each row
would be a launch, it doubles the scanned distance per pass (Hillis and Steele, 1986): six passes for 64 rows.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Rows per block."""


def scan_row(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one row of each of n requests; return the output [n, heads, features] and the new state.

    c and b are [n, heads, state], x [n, heads, features], decay (log) [n, heads] and state [n, heads, state, features].
    """
    state = state * torch.exp(decay)[..., None, None] + b.unsqueeze(-1) * x.unsqueeze(-2)
    return (state * c.unsqueeze(-1)).sum(-2), state


def scan_rows(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute n rows of one request, equivalent to :func:`scan_row` per row; state [heads, state, features]."""
    outputs = []
    for rows in range(0, len(c), CHUNK):
        of_rows = slice(rows, rows + CHUNK)
        c_rows, b_rows, x_rows, decays = (part[of_rows].transpose(0, 1) for part in (c, b, x, decay))
        output, state = _block(c_rows, b_rows, x_rows, decays, state)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs), state


def _block(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one block: [heads, rows, ...], state [heads, state, features] -> [heads, rows, features], new state."""
    total, rows = decay.cumsum(-1), decay.shape[1]
    later = torch.ones(rows, rows, dtype=torch.bool, device=decay.device).triu_(1)
    between = torch.exp((total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(later, -torch.inf))
    output = (c * torch.exp(total).unsqueeze(-1)) @ state + ((c @ b.mT) * between) @ x
    until_end = torch.exp(total[:, -1:] - total).unsqueeze(-1)
    return output, state * torch.exp(total[:, -1])[:, None, None] + (b * until_end).mT @ x


def selective_row(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one row of each of n requests; return the output [n, channels] and the new state.

    c and b are [n, state], x [n, channels], decay (log) and state [n, channels, state].
    """
    state = state * torch.exp(decay) + x.unsqueeze(-1) * b.unsqueeze(1)
    return (state * c.unsqueeze(1)).sum(-1), state


def selective_rows(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute n rows of one request, equivalent to :func:`selective_row` per row; state [channels, state]."""
    outputs = []
    for first in range(0, len(c), CHUNK):
        rows = slice(first, first + CHUNK)
        kept, states = torch.exp(decay[rows]), x[rows].unsqueeze(-1) * b[rows].unsqueeze(1)
        if decay.is_cpu:
            for after, factor in zip(states, kept, strict=True):
                state = after.addcmul_(factor, state)
        else:
            states = scan_by_doubling(kept, states, state)
            state = states[-1]
        outputs.append((states * c[rows].unsqueeze(1)).sum(-1))
    return torch.cat(outputs), state.clone()


def scan_by_doubling(kept: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Return the states after each of n rows, state[t] = kept[t] * state[t-1] + added[t].

    ``kept`` and ``added`` are [n, ...], the initial ``state`` is [...]; the result is [n, ...].
    """
    states, span = torch.cat((added[:1] + kept[:1] * state, added[1:])), 1
    while span < len(states):
        states = torch.cat((states[:span], torch.addcmul(states[span:], kept[span:], states[:-span])))
        kept = torch.cat((kept[:span], kept[span:] * kept[:-span]))
        span *= 2
    return states
