"""Equivalent forms of the Mamba and Mamba-2 scans."""

import pytest
import torch

from tapscope.engine.layers.state_space import scan_by_doubling, scan_row, scan_rows, selective_row, selective_rows


@pytest.mark.parametrize("rows", [1, 64, 150])
def test_scan_rows_equals_one_row_after_the_other(rows: int) -> None:
    torch.manual_seed(rows)
    c, b, x = torch.randn(rows, 3, 8), torch.randn(rows, 3, 8), torch.randn(rows, 3, 5)
    decay, state = -torch.rand(rows, 3), torch.randn(1, 3, 8, 5)
    output, after = scan_rows(c, b, x, decay, state[0])
    expected = []
    for row in range(rows):
        step, state = scan_row(*(part[row : row + 1] for part in (c, b, x, decay)), state)
        expected.append(step)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, state[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 150])
def test_selective_scans_equal_one_row_after_the_other(rows: int) -> None:
    """Includes the doubling form, which GPUs use."""
    torch.manual_seed(rows)
    c, b, x = torch.randn(rows, 3), torch.randn(rows, 3), torch.randn(rows, 6)
    decay, state = -torch.rand(rows, 6, 3), torch.randn(6, 3)
    output, after = selective_rows(c, b, x, decay, state)
    states = scan_by_doubling(decay.exp(), x.unsqueeze(-1) * b.unsqueeze(1), state)
    expected, state = [], state.unsqueeze(0)
    for row in range(rows):
        step, state = selective_row(*(part[row : row + 1] for part in (c, b, x, decay)), state)
        expected.append(step)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close((states * c.unsqueeze(1)).sum(-1), torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, state[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[-1], state[0], atol=1e-4, rtol=1e-4)
