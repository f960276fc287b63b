"""Triton Hadamard transform against the product with the Hadamard matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.hadamard import hadamard, hadamard_matrix, hadamard_reference

SIZES = [1, 2, 8, 12, 20, 28, 40, 48, 64, 80, 112, 128, 256, 320, 448]


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [*SIZES, 1024, 28 * 64])
def test_matrix_is_a_hadamard_matrix(size):
    matrix = hadamard_matrix(size)
    assert torch.equal(matrix.abs(), torch.ones(size, size))
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size))


def test_powers_of_two_are_sylvesters_matrices():
    rows = torch.arange(16)
    bits = (rows[:, None] & rows[None, :]).apply_(lambda n: n.bit_count())
    assert torch.equal(hadamard_matrix(16), 1.0 - 2.0 * (bits % 2))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(
    lead=st.sampled_from([(1,), (3,), (17,), (2, 5), (0,)]),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_hadamard_matches_the_reference(device, lead, size, dtype, seed):
    dtype = served(device, dtype)
    states = noise(*lead, size, seed=seed, dtype=dtype)
    expected = hadamard_reference(states, size**-0.5)
    assert_near(hadamard(states.to(device), size**-0.5), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4096, 14336, 28672, 32768])
@pytest.mark.parametrize("dtype", FLOATS)
def test_long_rows_match_the_reference(size, dtype):
    states = noise(5, size, seed=size, dtype=dtype)
    assert_near(hadamard(states.cuda(), size**-0.5), hadamard_reference(states, size**-0.5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 40])
def test_two_transforms_give_the_input_and_other_rows_do_not_matter(device, size):
    view = noise(6, 3, size, seed=1)[:, 1].to(device)
    once = hadamard(view, size**-0.5)
    matrix = hadamard_matrix(size).to(device)
    assert_near(once @ matrix * size**-0.5, view)
    assert torch.equal(hadamard(view[2:3], size**-0.5), once[2:3])
    broken = view.clone()
    broken[1, 3], broken[4, 0] = torch.nan, torch.inf
    found = hadamard(broken, size**-0.5)
    assert found[1].isnan().all()
    assert not found[4].isfinite().any()
    assert torch.equal(found[2], once[2])


@pytest.mark.parametrize("device", DEVICES)
def test_other_sizes_and_dtypes_are_refused(device):
    with pytest.raises(UsageError, match="order 36"):
        hadamard(torch.ones(2, 36, device=device))
    with pytest.raises(UsageError, match="order 0"):
        hadamard(torch.ones(2, 0, device=device))
    with pytest.raises(UsageError, match="size 65536 exceeds"):
        hadamard(torch.ones(1, 65536, device=device))
    with pytest.raises(UsageError, match=r"dtype torch\.int32"):
        hadamard(torch.ones(2, 8, dtype=torch.int32, device=device))
