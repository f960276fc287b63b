"""The Triton linear layer for 17 to 32 rows against torch's linear."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import split_linear as module
from tapscope.kernels.triton.activation import KINDS, gated
from tapscope.kernels.triton.split_linear import is_worth_it, parts_of, split_linear, split_linear_reference

ROUNDED = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=8)
@given(
    rows=st.sampled_from([0, 1, 17, 24, 31, 32]),
    outs=st.sampled_from([64, 192]),
    ins=st.sampled_from([1024, 2048, 3072, 4096]),
    dtype=st.sampled_from(FLOATS),
    has_bias=st.booleans(),
    is_constant=st.booleans(),
    is_cut=st.booleans(),
    kind=st.none() | st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
)
def test_split_linear_matches_torch(device, rows, outs, ins, dtype, has_bias, is_constant, is_cut, kind, seed):
    dtype = served(device, torch.float16 if dtype == torch.float32 else dtype)
    wide = noise(rows, ins + 16, seed=seed, dtype=dtype)
    weight, bias = (noise(*shape, seed=seed + 1, dtype=dtype) for shape in ((outs, ins), (outs,)))
    moved, weight_there = wide.to(device), weight.to(device)
    states, there = (each[:, :ins] if is_cut else each[:, :ins].contiguous() for each in (wide, moved))
    for _ in range(2):  # the counters must be zero again
        found = split_linear(there, weight_there, bias.to(device) if has_bias else None, kind, is_constant=is_constant)
        if kind is not None:  # bit-equal to the two kernels that a tapped step runs
            whole = split_linear(there, weight_there, bias.to(device) if has_bias else None)
            assert torch.equal(found, gated(whole, None, kind))
            continue
        expected = split_linear_reference(states.double(), weight.double(), bias.double() if has_bias else None)
        assert found.dtype == dtype
        assert_near(found, expected.to(dtype), ROUNDED[dtype] * ins**0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_split_linear_has_the_same_bits_at_any_number_of_rows(device):
    dtype = served(device, torch.bfloat16)
    states, weight = noise(32, 1024, seed=0, dtype=dtype).to(device), noise(128, 1024, seed=1, dtype=dtype).to(device)
    whole = split_linear(states, weight)
    assert torch.equal(whole[:20], split_linear(states[:20], weight))
    assert torch.equal(whole, split_linear(states, weight))


def test_split_linear_cuts_weights_to_fill_the_device():
    assert parts_of(4096, 1024) == (1, 2, 512)
    assert parts_of(1024, 2048) == (4, 1, 512)
    assert parts_of(6144, 1024) == (1, 2, 512)
    assert parts_of(1024, 3072) == (4, 3, 256)
    assert parts_of(1024, 8192) is None
    assert parts_of(1000, 1024) is None
    assert parts_of(1024, 1000) is None
    assert parts_of(1024, 512) is None


def test_split_linear_refuses_invalid_arguments(monkeypatch):
    if not torch.cuda.is_available() and pytest.importorskip("triton").knobs.runtime.interpret is not True:
        pytest.skip("needs the interpreter")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states, weight = torch.ones(20, 1024, device=device).half(), torch.ones(64, 1024, device=device).half()
    for wrong, message in (
        ((torch.ones(33, 1024, device=device).half(), weight), "of at most 32 rows"),
        ((states, weight[:63]), "cannot be cut"),
        ((states, weight, weight[:3, 0].contiguous()), r"expected one per output \(64\)"),
        ((states.float(), weight), r"one dtype; the input is torch\.float32"),
        ((states, weight, weight[:, 0]), "contiguous"),
        ((states, weight, None, "selu"), "activation 'selu'"),
    ):
        with pytest.raises(UsageError, match=message):
            split_linear(*wrong)
    monkeypatch.setattr(module, "may_overlap", lambda _: True)
    assert is_worth_it(states, weight)
    assert not is_worth_it(states[:16], weight)
    assert not is_worth_it(states.float(), weight.float())
    assert not is_worth_it(states, weight[:63])
    monkeypatch.setattr(module, "may_overlap", lambda _: False)
    assert not is_worth_it(states, weight)
