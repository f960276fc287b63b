"""Triton kernels that order (token, expert) pairs and sum a token's expert outputs, against torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, TOLERANCE, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.moe import combine, combine_reference, route, route_reference


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    tokens=st.sampled_from([0, 1, 7, 140]),
    k=st.sampled_from([1, 2, 8]),
    share=st.sampled_from([(8, 0, 8), (8, 2, 3), (1, 0, 1), (20, 5, 0), (64, 60, 4)]),
    dtype=st.sampled_from(FLOATS),
    are_weights_wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_moe_permutation_round_trips(device, tokens, k, share, dtype, are_weights_wide, seed):
    dtype, (experts, first, count) = served(device, dtype), share
    noise = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, experts, (tokens * k,), generator=noise)
    found, expected = route(chosen.to(device), first, count), route_reference(chosen, first, count)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)
    down = torch.randn(tokens * k, 40, generator=noise).to(dtype)
    weights = torch.rand(tokens, k, generator=noise).to(torch.float32 if are_weights_wide else dtype)
    summed = combine(down.to(device), found[1], weights.to(device))
    assert_near(summed, combine_reference(down, expected[1], weights), TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_moe_nonfinite_values_stay_in_their_token(device):
    down, weights = torch.ones(6, 40, device=device), torch.ones(3, 2, device=device)
    down[3, 7] = torch.nan
    places = torch.tensor([5, 4, 3, 2, 1, 0], device=device)
    summed = combine(down, places, weights)
    assert summed.isnan().nonzero().tolist() == [[1, 7]]


def test_moe_refuses_invalid_arguments():
    down, places, weights = torch.ones(6, 4), torch.arange(6), torch.ones(3, 2)
    for call in (
        lambda: route(places.int(), 0, 2),
        lambda: route(places.view(2, 3), 0, 2),
        lambda: combine(down[:5], places, weights),
        lambda: combine(down, places.int(), weights),
        lambda: combine(down, places, weights.double()),
        lambda: combine(down.mT.contiguous().mT, places, weights),
    ):
        with pytest.raises(UsageError):
            call()
