"""Triton key selection for sparse attention against its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_inputs import pages_of
from triton_helpers import DEVICES, FLOATS, TOLERANCE, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.indexer import (
    choose_keys,
    choose_keys_reference,
    index_scores,
    index_scores_reference,
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([1, 4, 20]),
    dim=st.sampled_from([8, 20, 64]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_scores_match_the_reference(device, lengths, page_size, heads, dim, dtype, seed):
    dtype = served(device, dtype)
    keys, table, sizes = pages_of(lengths, page_size, 1, dim, dtype=dtype, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    query = torch.randn(len(lengths), heads, dim, generator=noise).to(dtype)
    weights = torch.randn(len(lengths), heads, generator=noise) / heads / dim**0.5
    found = index_scores(*(each.to(device) for each in (query, keys, weights, table, sizes)))
    for own, expected, length in zip(
        found.cpu(), index_scores_reference(query, keys, weights, table, sizes), lengths, strict=True
    ):
        torch.testing.assert_close(own[:length], expected, rtol=0, atol=TOLERANCE[torch.float32])


def scores_of(kind, lengths, width, seed):
    """Return scores of a kind that is difficult for a search, and noise beyond each length, which must not be read."""
    noise = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), width, generator=noise)
    if kind == "equal":
        scores = scores.round()
    elif kind == "zeros":
        scores = torch.where(scores > 1, scores, torch.where(scores > 0, 0.0, -0.0))
    elif kind == "near":
        scores = 1 + scores * 1e-6
    elif kind == "infinite":
        scores = torch.where(scores > 1.5, torch.inf, torch.where(scores < -1, -torch.inf, scores))
    return scores


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 2500), min_size=1, max_size=3),
    kind=st.sampled_from(["any", "equal", "zeros", "near", "infinite"]),
    page_size=st.sampled_from([1, 16, 7]),
    top_k=st.sampled_from([1, 48, 1100]),
    seed=st.integers(0, 2**31),
)
def test_choice_matches_the_reference(device, lengths, kind, page_size, top_k, seed):
    _, table, sizes = pages_of(lengths, page_size, 1, 1, dtype=torch.float32, seed=seed)
    scores = scores_of(kind, lengths, table.shape[1] * page_size, seed)
    ids, slots, counts = (
        each.cpu() for each in choose_keys(scores.to(device), table.to(device), sizes.to(device), page_size, top_k)
    )
    own = [row[:length] for row, length in zip(scores, lengths, strict=True)]
    assert ids.tolist() == choose_keys_reference(own, top_k).tolist()
    assert counts.tolist() == [min(length, top_k) for length in lengths]
    for pages, chosen, places, count in zip(table, ids, slots, counts.tolist(), strict=True):
        chosen = chosen[:count]
        assert places[:count].tolist() == (pages[chosen // page_size] * page_size + chosen % page_size).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_leaves_a_whole_choice(device):
    """The requested number of keys is selected, each once, even if scores are NaN."""
    _, table, sizes = pages_of([90], 16, 1, 1, dtype=torch.float32, seed=0)
    scores = torch.randn(1, table.shape[1] * 16, generator=torch.Generator().manual_seed(0))
    scores[:, 5:60] = torch.nan
    ids, _, counts = choose_keys(scores.to(device), table.to(device), sizes.to(device), 16, 70)
    assert counts.item() == 70
    assert ids.sort().values.tolist() == ids.unique().unsqueeze(0).tolist()
    assert ids.min() >= 0
    assert ids.max() < 90


def test_tensors_that_do_not_fit_are_refused():
    keys, table, sizes = pages_of([5], 16, 1, 8, dtype=torch.float32, seed=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, weights = torch.zeros(1, 2, 8), torch.zeros(1, 2)
    whole = [each.to(device) for each in (query, keys, weights, table, sizes)]
    for place, wrong in ((0, query[..., :4]), (2, weights[:, :1]), (3, table.long()), (4, sizes[:0])):
        with pytest.raises(UsageError):
            index_scores(*(wrong.to(device) if i == place else each for i, each in enumerate(whole)))
    with pytest.raises(UsageError):
        choose_keys(torch.zeros(1, 32, dtype=torch.float64, device=device), whole[3], whole[4], 16, 4)
