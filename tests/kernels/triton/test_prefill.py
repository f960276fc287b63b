"""Triton paged prefill attention against its reference, and against decoding the same rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_inputs import pages_of
from triton_helpers import DEVICES, FLOATS, FP8, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.engine.layers.paged_attention import AttentionSpec, attend_one
from tapscope.kernels.triton.paged_decode import paged_decode
from tapscope.kernels.triton.paged_prefill import (
    PREFILL_LAUNCHES,
    PrefillLaunch,
    paged_prefill,
    paged_prefill_reference,
)


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts_of(counts):
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def check(device, *tensors, scale=0.3, tolerance=None, **settings):
    """Check that the kernel on ``device`` agrees with the reference on the CPU; return the kernel's output."""
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    found = paged_prefill(*(tensor.to(device) for tensor in tensors), scale, **placed)
    assert_near(found, paged_prefill_reference(*tensors, scale, **settings), tolerance)
    return found


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=7)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 130)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (14, 2), (40, 1)]),
    dims=st.sampled_from([(8, 8), (16, 5), (64, 64), (80, 96), (33, 40), (192, 128)]),
    window=st.sampled_from([None, None, 1, 7, 64, 150]),
    softcap=st.sampled_from([None, None, 3.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    stored=st.sampled_from([None, None, None, *FP8]),
    seed=st.integers(0, 2**31),
)
def test_prefill_matches_the_reference(
    device, requests, page_size, heads, dims, window, softcap, with_sinks, dtype, stored, seed
):
    """``requests`` are pairs of cached positions and rows in the step."""
    dtype, lengths = served(device, dtype), [before + count for before, count in requests]
    keys, table, sizes = pages_of(lengths, page_size, heads[1], dims[0], dtype=stored or dtype, seed=seed)
    values = pages_of(lengths, page_size, heads[1], dims[1], dtype=stored or dtype, seed=seed + 1)[0]
    starts = starts_of([count for _, count in requests])
    query = noise(int(starts[-1]), heads[0], dims[0], seed=seed).to(dtype)
    features = {"window": window, "softcap": softcap, "sinks": torch.linspace(-2, 3, heads[0]) if with_sinks else None}
    scales = {} if stored is None else {"stored_scales": (0.7, 0.25)}
    check(device, query, keys, values, table, starts, sizes, **features, **scales)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prefill_reference_matches_the_engine(window, softcap):
    keys, table, lengths = pages_of([70], 16, 2, 16, dtype=torch.float32, seed=1)
    query = noise(30, 6, 16, seed=2)
    found = paged_prefill_reference(
        query, keys, keys.flip(0), table, starts_of([30]), lengths, 0.2, window=window, softcap=softcap
    )
    k, v = (pool[table[0, :5]].flatten(0, 1)[:70] for pool in (keys, keys.flip(0)))
    spec = AttentionSpec(scale=0.2, window=window, softcap=softcap)
    assert_near(found, attend_one(query, k, v, 40, spec))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 50])
def test_prefill_is_chunk_and_batch_invariant(device, window):
    keys, table, _ = pages_of([150, 40, 90], 16, 2, 16, dtype=torch.float32, seed=3)
    query = noise(280, 6, 16, seed=4).to(device)
    pools = keys.to(device), keys.flip(1).to(device)

    def run(rows, requests, counts, sizes):
        more = table[requests].to(device), starts_of(counts).to(device)
        return paged_prefill(
            query[rows], *pools, *more, torch.tensor(sizes, dtype=torch.int32, device=device), 0.3, window=window
        )

    together = run(slice(0, 280), [0, 1, 2], [150, 40, 90], [150, 40, 90])
    assert torch.equal(run(slice(0, 150), [0], [150], [150]), together[:150])
    for first, end in ((0, 37), (37, 38), (38, 150)):
        assert torch.equal(run(slice(first, end), [0], [end - first], [end]), together[first:end])


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_bits_do_not_depend_on_the_rows_of_a_program(device, monkeypatch):
    """This lets short requests use smaller programs than long ones."""
    # On a GPU this holds for bfloat16 only, whose launches are shortened: float32 sums in a different order.
    dtype, choices = (torch.float32, (32, 128, 512)) if device == "cpu" else (torch.bfloat16, (128, 256))
    keys, table, lengths = pages_of([150, 40], 16, 2, 16, dtype=dtype, seed=3)
    tensors = noise(190, 6, 16, seed=4).to(dtype), keys, keys.flip(1), table, starts_of([150, 40]), lengths
    found = []
    for rows in choices:
        launch = PrefillLaunch(rows, 32, 4, 2)
        monkeypatch.setitem(PREFILL_LAUNCHES, (64, keys.element_size()), launch)
        found.append(paged_prefill(*(tensor.to(device) for tensor in tensors), 0.3))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_of_single_rows_equals_decode(device):
    keys, table, lengths = pages_of([100, 1, 37], 16, 2, 32, dtype=torch.float32, seed=5)
    query = noise(3, 8, 32, seed=6)
    sinks = torch.linspace(-1, 1, 8)
    tensors = [tensor.to(device) for tensor in (query, keys, keys.flip(0), table)]
    for features in ({}, {"window": 20}, {"softcap": 2.0}, {"sinks": sinks.to(device)}):
        single = paged_decode(*tensors, lengths.to(device), 0.2, **features)
        rows = paged_prefill(*tensors, starts_of([1, 1, 1]).to(device), lengths.to(device), 0.2, **features)
        assert_near(rows, single)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_prefill_nonfinite_values_reach_only_rows_that_attend_to_them(device, special):
    keys, table, lengths = pages_of([90, 60], 16, 1, 16, dtype=torch.float32, seed=7)
    values = keys.flip(1, 3).clone()
    values[table[0, 4], 6, 0, 3] = special  # position 70
    query, starts = noise(150, 2, 16, seed=8), starts_of([90, 60])
    found = paged_prefill(*(t.to(device) for t in (query, keys, values, table, starts, lengths)), 0.3).cpu()
    assert not found[70:90, :, 3].isfinite().any()
    assert found[:64].isfinite().all()  # blocks that end before position 70
    assert found[90:].isfinite().all()
    pool = torch.full_like(keys, torch.nan)  # positions beyond a request are never read
    for request, length in enumerate((90, 60)):
        for place in range(length):
            pool[table[request, place // 16], place % 16] = keys[table[request, place // 16], place % 16]
    assert_near(
        paged_prefill(*(t.to(device) for t in (query, pool, pool, table, starts, lengths)), 0.3),
        paged_prefill_reference(query, keys, keys, table, starts, lengths, 0.3),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_leaves_padding_rows_unchanged(device):
    keys, table, lengths = pages_of([20], 16, 1, 16, dtype=torch.float32, seed=9)
    tensors = [
        tensor.to(device) for tensor in (noise(300, 2, 16, seed=10), keys, keys, table, starts_of([20]), lengths)
    ]
    out = torch.full((300, 4, 16), 7.0, device=device)[:, ::2]
    paged_prefill(*tensors, 0.3, out=out)
    assert (out[20:] == 7.0).all()
    assert torch.equal(out[:20], paged_prefill(tensors[0][:20], *tensors[1:], 0.3))


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_leaves_rows_before_the_first_request_unchanged(device):
    """Includes skipped rows that fill entire blocks."""
    keys, table, lengths = pages_of([20, 90], 16, 1, 16, dtype=torch.float32, seed=9)
    query, pools = noise(300, 2, 16, seed=10).to(device), (keys.to(device), keys.to(device))
    tables = table.to(device), (starts_of([20, 90]) + 190).to(device), lengths.to(device)
    out = torch.full((300, 2, 16), 7.0, device=device)
    paged_prefill(query, *pools, *tables, 0.3, num_prompts=1, out=out)
    assert (out[:190] == 7.0).all()
    plain = paged_prefill(query[190:], *pools, tables[0], tables[1] - 190, tables[2], 0.3)
    assert torch.equal(out[190:], plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_prefill_bits_do_not_depend_on_padding(device, is_batch_invariant):
    """Padding as in a CUDA graph: extra rows, which form one request on the dummy page, and requests without rows."""
    keys, table, lengths = pages_of([70, 33, 150], 16, 2, 16, dtype=torch.float32, seed=11)
    counts, (rows, requests) = [1, 33, 40], (128, 9)
    query, missing = noise(rows, 6, 16, seed=12).to(device), rows - sum(counts)
    pools = keys.to(device), keys.flip(1).to(device)

    def run(query, table, counts, lengths):
        tensors = table.to(device), starts_of(counts).to(device), lengths.to(device)
        return paged_prefill(query, *pools, *tensors, 0.3, is_batch_invariant=is_batch_invariant)

    plain = run(query[: sum(counts)], table, counts, lengths)
    dummy = torch.full((requests - 3, table.shape[1]), len(keys) - 1, dtype=torch.int32)
    sizes = torch.cat((lengths, torch.tensor([missing, *[0] * 5], dtype=torch.int32)))
    padded = run(query, torch.cat((table, dummy)), [*counts, missing, *[0] * 5], sizes)
    assert torch.equal(padded[: sum(counts)], plain)
    assert padded.isfinite().all()


def test_prefill_refuses_invalid_arguments():
    keys, table, lengths = pages_of([5, 6], 16, 2, 16, dtype=torch.float32, seed=10)
    query, starts = torch.randn(11, 4, 16), starts_of([5, 6])
    for wrong in (
        (query[:, :3], keys, keys, table, starts, lengths),
        (query, keys, keys[:1], table, starts, lengths),
        (query, keys, keys, table.long(), starts, lengths),
        (query, keys, keys, table, starts.long(), lengths),
        (query, keys, keys, table, starts[:2], lengths),
        (query, keys, keys.mT, table, starts, lengths),
        (query.to("meta"), keys, keys, table, starts, lengths),
        (torch.randn(11, 2, 300), torch.randn(2, 4, 2, 300), torch.randn(2, 4, 2, 8), table, starts, lengths),
    ):
        with pytest.raises(UsageError):
            paged_prefill(*wrong, 1.0)
    with pytest.raises(UsageError):
        paged_prefill(query, keys, keys, table, starts, lengths, 1.0, sinks=torch.zeros(3))
