"""The Triton linear layer for few rows against torch's linear."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.linear import few_rows_linear, few_rows_linear_reference, is_worth_it

ROUNDED = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 8, 15, 16]),
    outs=st.sampled_from([1, 5, 64, 100]),
    ins=st.sampled_from([1, 16, 80, 257, 1500]),
    dtype=st.sampled_from(FLOATS),
    has_bias=st.booleans(),
    is_cut=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear_matches_torch(device, rows, outs, ins, dtype, has_bias, is_cut, seed):
    dtype = served(device, dtype)
    wide = noise(rows, ins + 3, seed=seed, dtype=dtype)
    weight, bias = (noise(*shape, seed=seed + 1, dtype=dtype) for shape in ((outs, ins), (outs,)))
    moved, weight_there = wide.to(device), weight.to(device)
    states, there = (each[:, :ins] if is_cut else each[:, :ins].contiguous() for each in (wide, moved))
    found = few_rows_linear(there, weight_there, bias.to(device) if has_bias else None)
    expected = few_rows_linear_reference(states.double(), weight.double(), bias.double() if has_bias else None)
    assert found.dtype == dtype
    assert_near(found, expected.to(dtype), ROUNDED[dtype] * max(1, ins) ** 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_linear_is_batch_invariant(device):
    dtype = served(device, torch.bfloat16)
    states, weight = (noise(16, 96, seed=i, dtype=dtype).to(device) for i in range(2))
    whole = few_rows_linear(states, weight)
    assert torch.equal(whole[:10], few_rows_linear(states[:10].contiguous(), weight))
    assert torch.equal(few_rows_linear(states[3:9], weight), few_rows_linear(states[:9], weight)[3:])


def test_linear_refuses_invalid_arguments():
    if not torch.cuda.is_available() and pytest.importorskip("triton").knobs.runtime.interpret is not True:
        pytest.skip("needs the interpreter")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states, weight = torch.ones(2, 8, device=device), torch.ones(4, 8, device=device)
    with pytest.raises(UsageError, match=r"\[33, 8\] and weight \[4, 8\]: expected \[rows, ins\] of at most 16 rows"):
        few_rows_linear(torch.ones(33, 8, device=device), weight)
    with pytest.raises(UsageError, match=r"bias \[3\]: expected one per output \(4\)"):
        few_rows_linear(states, weight, torch.ones(3, device=device))
    with pytest.raises(UsageError, match=r"one dtype; the input is torch\.float32"):
        few_rows_linear(states, weight.half())
    with pytest.raises(UsageError, match="contiguous"):
        few_rows_linear(states, torch.ones(8, 4, device=device).T)
    assert not is_worth_it(states, weight)  # float32
    assert is_worth_it(states.half(), weight.half())
    assert not is_worth_it(states.half(), weight)
