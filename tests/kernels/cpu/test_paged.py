"""CPU paged attention against its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import needs_library

from tapscope.kernels.cpu import paged_attention, paged_reference
from tapscope.kernels.native import use_backend

pytestmark = needs_library
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def pages_of(
    lengths: list[int], page_size: int, *shape: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, ...]:
    """Return a pool with shuffled pages, a table whose unused entries name the spare last page, and the lengths."""
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    pool = torch.randn(sum(counts) + 1, page_size, *shape, generator=noise).to(dtype)
    numbers = torch.randperm(sum(counts), generator=noise).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(numbers), batch_first=True, padding_value=sum(counts))
    return pool, table, torch.tensor(lengths, dtype=torch.int32)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 5), (33, 40)]),
    window=st.sampled_from([None, 1, 7, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    stored=st.sampled_from([None, None, torch.float8_e4m3fn, torch.float8_e5m2]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)
def test_paged_attention_matches_the_reference(lengths, page_size, heads, dims, window, dtype, stored, threads, seed):
    num_heads, kv_heads = heads
    kept = stored or dtype
    keys, table, given_lengths = pages_of(lengths, page_size, kv_heads, dims[0], dtype=kept, seed=seed)
    values = pages_of(lengths, page_size, kv_heads, dims[1], dtype=kept, seed=seed + 1)[0]
    scales = (1.0, 1.0) if stored is None else (0.7, 0.25)
    query = torch.randn(len(lengths), num_heads, dims[0]).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = paged_attention(query, keys, values, table, given_lengths, 0.3, window, stored_scales=scales)
    finally:
        torch.set_num_threads(before)
    expected = paged_reference(query, keys, values, table, given_lengths, 0.3, window, stored_scales=scales)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 3e9])
def test_paged_attention_reads_every_fp8_code_as_torch(stored, dtype, scale):
    """Each request has one position, so the output is that position's value."""
    every = torch.arange(256, dtype=torch.uint8).view(stored)
    values = every.view(256, 1, 1, 1)
    keys = torch.zeros(256, 1, 1, 8, dtype=torch.uint8).view(stored)
    table, lengths = torch.arange(256, dtype=torch.int32).view(256, 1), torch.ones(256, dtype=torch.int32)
    query = torch.ones(256, 1, 8, dtype=dtype)
    found = paged_attention(query, keys, values, table, lengths, 1.0, None, stored_scales=(1.0, scale))
    expected = (every.float() * scale).to(dtype)
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=0, equal_nan=True)


def test_paged_attention_accepts_mla_values_as_a_prefix_of_keys():
    """Multi-head latent attention uses this layout."""
    keys, table, lengths = pages_of([40, 3], 16, 1, 24, dtype=torch.float32, seed=0)
    query = torch.randn(2, 6, 24)
    call = query, keys, keys[..., :17], table, lengths, 0.2, None
    torch.testing.assert_close(paged_attention(*call), paged_reference(*call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 37, 39])
def test_paged_attention_propagates_nonfinite_values_as_the_reference(special, where):
    keys, table, lengths = pages_of([40], 16, 2, 8, dtype=torch.float32, seed=1)
    values = keys.flip(0, 1, 3).clone()
    values[table[0, where // 16], where % 16, 0, 3] = special
    query = torch.randn(1, 2, 8)
    call = query, keys, values, table, lengths, 0.3, None
    torch.testing.assert_close(paged_attention(*call), paged_reference(*call), rtol=1e-5, atol=1e-5, equal_nan=True)
    keys[table[0, where // 16], where % 16, 1] = torch.nan
    assert paged_attention(*call)[0, 1].isnan().all()


def test_paged_attention_large_scores_do_not_overflow():
    keys, table, lengths = pages_of([70], 16, 1, 16, dtype=torch.float32, seed=2)
    query = 300 * torch.randn(1, 1, 16)
    call = query, keys, keys, table, lengths, 1.0, None
    torch.testing.assert_close(paged_attention(*call), paged_reference(*call), rtol=1e-4, atol=1e-4)


def test_paged_attention_reports_unsupported_inputs():
    keys, table, lengths = pages_of([5, 6], 16, 1, 8, dtype=torch.float32, seed=3)
    query = torch.randn(2, 1, 8)
    assert paged_attention(query, keys, keys, table, lengths, 1.0, None) is not None
    assert paged_attention(query.double(), keys.double(), keys.double(), table, lengths, 1.0, None) is None
    assert paged_attention(query.bfloat16(), keys, keys, table, lengths, 1.0, None) is None
    assert paged_attention(query, keys, keys.bfloat16(), table, lengths, 1.0, None) is None
    small = keys.to(torch.float8_e4m3fn)
    assert paged_attention(query, small, small, table, lengths, 1.0, None) is not None
    assert paged_attention(query, small, keys, table, lengths, 1.0, None) is None
    assert paged_attention(query, small, small, table, lengths, 1.0, None, stored_scales=(1.0, 1e38)) is None
    assert paged_attention(query, keys.mT, keys.mT, table, lengths, 1.0, None) is None
    with use_backend("numpy"):
        assert paged_attention(query, keys, keys, table, lengths, 1.0, None) is None
