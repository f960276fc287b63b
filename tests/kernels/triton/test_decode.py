"""Triton paged decode attention against its reference."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_inputs import pages_of
from soak_cases import mostly_soak
from triton_helpers import DEVICES, FLOATS, FP8, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import paged_decode as paged_decode_module
from tapscope.kernels.triton.paged_decode import paged_decode, paged_decode_reference


def check(device, *tensors, scale=0.3, tolerance=None, **settings):
    """Check that the kernel on ``device`` agrees with the reference on the CPU; return the kernel's output."""
    moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
    placed = settings | ({"sinks": settings["sinks"].to(device)} if settings.get("sinks") is not None else {})
    found = paged_decode(*moved, scale, **placed)
    for name in ("num_splits", "split_size", "most_rows"):
        settings.pop(name, None)
    assert_near(found, expected(*tensors, scale, **settings), tolerance)
    return found


def expected(query, keys, values, table, lengths, scale, **settings):
    """Return the reference output, with zeros for rows of length 0."""
    output = paged_decode_reference(query, keys, values, table, lengths, scale, **settings)
    return torch.where(lengths[:, None, None] > 0, output, 0)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3), (14, 2), (40, 1)]),
    dims=st.sampled_from([(8, 8), (16, 5), (64, 64), (80, 96), (33, 40), (128, 128)]),
    span=st.sampled_from([{}, {}, *({"window": size} for size in (1, 7, 64, 150)), {"chunk": 1}, {"chunk": 70}]),
    softcap=st.sampled_from([None, None, 3.0]),
    with_sinks=st.booleans(),
    parts=st.sampled_from([{}, {"num_splits": 1}, {"num_splits": 5}, {"num_splits": 9}, {"split_size": 128}]),
    dtype=st.sampled_from(FLOATS),
    stored=st.sampled_from([None, None, None, *FP8]),
    seed=st.integers(0, 2**31),
)
def test_decode_matches_the_reference(
    device, lengths, page_size, heads, dims, span, softcap, with_sinks, parts, dtype, stored, seed
):
    dtype = served(device, dtype)
    keys, table, sizes = pages_of(lengths, page_size, heads[1], dims[0], dtype=stored or dtype, seed=seed)
    values = pages_of(lengths, page_size, heads[1], dims[1], dtype=stored or dtype, seed=seed + 1)[0]
    query = torch.randn(len(lengths), heads[0], dims[0], generator=torch.Generator().manual_seed(seed)).to(dtype)
    sinks = torch.linspace(-2, 3, heads[0]) if with_sinks else None
    scales = {} if stored is None else {"stored_scales": (0.7, 0.25)}
    features = {"softcap": softcap, "sinks": sinks}
    check(device, query, keys, values, table, sizes, **span, **features, **scales, **parts)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    requests=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (8, 1), (14, 2), (20, 1)]),
    dims=st.sampled_from([(16, 5), (64, 64), (80, 96), (128, 128)]),
    span=st.sampled_from([{}, {}, {"window": 1}, {"window": 70}, {"chunk": 3}, {"chunk": 70}]),
    parts=st.sampled_from([{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    stored=st.sampled_from([None, None, *FP8]),
    seed=st.integers(0, 2**31),
)
def test_decode_computes_the_rows_of_a_request_together(
    device, requests, page_size, heads, dims, span, parts, with_sinks, dtype, stored, seed
):
    """Up to four rows per request at consecutive positions; the next request's lengths may happen to continue them."""
    dtype = served(device, dtype)
    last = [before + count for before, count in requests] + [0]
    keys, table, _ = pages_of(last, page_size, heads[1], dims[0], dtype=stored or dtype, seed=seed)
    values = pages_of(last, page_size, heads[1], dims[1], dtype=stored or dtype, seed=seed + 1)[0]
    lengths = [before + row + 1 for before, count in requests for row in range(count)] + [0]
    table = table.repeat_interleave(torch.tensor([count for _, count in requests] + [1]), 0)
    query = torch.randn(len(lengths), heads[0], dims[0], generator=torch.Generator().manual_seed(seed)).to(dtype)
    features = {"sinks": torch.linspace(-2, 3, heads[0])} if with_sinks else {}
    scales = {} if stored is None else {"stored_scales": (0.7, 0.25)}
    sizes = torch.tensor(lengths, dtype=torch.int32)
    check(device, query, keys, values, table, sizes, most_rows=4, **span, **features, **scales, **parts)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=4),
    num_others=st.integers(0, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (40, 1)]),
    window=st.sampled_from([None, None, 1, 70]),
    num_sms=st.sampled_from([1, 2, 40]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_decode_computes_active_requests_only(device, lengths, num_others, heads, window, num_sms, dtype, seed):
    """The number of requests is read on the device; the other rows stay unchanged, and their pages are not read."""
    most = max(1, len(lengths) + num_others)
    dtype = served(device, dtype)
    keys, table, sizes = pages_of([*lengths, *[300] * (most - len(lengths))], 16, heads[1], 32, dtype=dtype, seed=seed)
    query = torch.randn(most, heads[0], 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    sinks, active = torch.linspace(-2, 3, heads[0]), len(lengths)
    wanted = torch.full_like(query, 7.0)
    wanted[:active] = expected(query, keys, keys.flip(1), table, sizes, 0.3, window=window, sinks=sinks)[:active]
    table[active:] = 1 << 28
    out = torch.full_like(query, 7.0, device=device)
    moved = [tensor.to(device) for tensor in (query, keys, keys.flip(1), table, sizes)]
    count = torch.tensor([99, active], dtype=torch.int32, device=device)[1:]
    with patch.object(paged_decode_module, "num_sms", lambda _: num_sms):
        paged_decode(*moved, 0.3, window=window, sinks=sinks.to(device), num_active=count, out=out)
    assert_near(out, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_of_active_requests_takes_no_other_parts(device):
    keys, table, lengths = (tensor.to(device) for tensor in pages_of([70], 16, 1, 16, dtype=torch.float32, seed=0))
    query, count = torch.zeros(1, 1, 16, device=device), lengths.new_ones(1)
    for more in ({"num_splits": 2}, {"split_size": 128}, {"most_rows": 2}):
        with pytest.raises(UsageError, match="num_active"):
            paged_decode(query, keys, keys, table, lengths, 1.0, num_active=count, **more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most_rows", [2, 4])
def test_decode_keeps_requests_apart_that_share_a_prefix(device, most_rows):
    """The lengths are consecutive and the page tables equal, except for the page that each request writes."""
    keys, table, _ = pages_of([48, 48, 48], 16, 2, 32, dtype=torch.float32, seed=1)
    table[:, :2] = table[0, :2]
    lengths = torch.tensor([33, 34, 35], dtype=torch.int32)
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    check(device, query, keys, keys.flip(1), table, lengths, most_rows=most_rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "splits"), mostly_soak(product([1, 16, 40], [1, 3]), default=[(1, 1), (16, 3), (40, 1)])
)
def test_decode_accepts_mla_values_as_a_prefix_of_keys(device, heads, splits):
    """Multi-head latent attention: 512 latent features and 64 RoPE features."""
    keys, table, lengths = pages_of([70, 0, 1], 16, 1, 576, dtype=torch.float16, seed=0)
    query = torch.randn(3, heads, 576, generator=torch.Generator().manual_seed(1)).half()
    settings = {"scale": 0.04, "num_splits": splits}
    check(device, query, keys, None, table, lengths, value_dim=512, **settings)
    check(device, query, keys, None, table, lengths, value_dim=300, **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("where", mostly_soak([0, 137, 199], default=[0, 199]))
def test_decode_propagates_nonfinite_values_as_the_reference(device, special, splits, where):
    keys, table, lengths = pages_of([200, 30], 16, 2, 16, dtype=torch.float32, seed=1)
    values = keys.flip(0, 1, 3).clone()
    values[table[0, where // 16], where % 16, 0, 3] = special
    query = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))
    found = check(device, query, keys, values, table, lengths, num_splits=splits)
    assert found[1].isfinite().all()
    keys[table[0, where // 16], where % 16, 1] = torch.nan
    found = check(device, query, keys, values, table, lengths, num_splits=splits)
    assert found[0, 2:].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_decode_reads_only_pages_of_the_request(device):
    """The pool is NaN outside the requests' positions and before the window."""
    for window, first in ((None, 0), (20, 57)):
        keys, table, lengths = pages_of([77, 0], 16, 1, 16, dtype=torch.float32, seed=3)
        kept = torch.full_like(keys, torch.nan)
        for place in range(first, 77):
            kept[table[0, place // 16], place % 16] = keys[table[0, place // 16], place % 16]
        query = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(4))
        moved = [tensor.to(device) for tensor in (query, kept, kept, table, lengths)]
        found = paged_decode(*moved, 1.0, window=window, num_splits=3)
        assert_near(found, expected(query, keys, keys, table, lengths, 1.0, window=window))
        assert torch.equal(found[1], torch.zeros_like(found[1]))


@pytest.mark.parametrize("device", DEVICES)
def test_decode_accepts_views(device):
    """A query from a fused projection, a pool from the pool of all layers, and a caller's output buffer."""
    keys, table, lengths = pages_of([100, 5], 16, 2, 32, dtype=torch.float32, seed=5)
    pool = torch.stack((keys, keys.flip(0)), dim=3).to(device)
    fused = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(6)).to(device)
    out = torch.full((2, 4, 64), 7.0, device=device)
    found = paged_decode(
        fused[:, 3:7], pool[..., 0, :], pool[..., 1, :], table.to(device), lengths.to(device), 0.2, out=out[..., :32]
    )
    assert found.data_ptr() == out.data_ptr()
    query = fused[:, 3:7].cpu()
    assert_near(out[..., :32], paged_decode_reference(query, keys, keys.flip(0), table, lengths, 0.2))
    assert (out[..., 32:] == 7.0).all()
    turned = fused[:, 3:7].mT.contiguous().mT
    again = paged_decode(turned, pool[..., 0, :], pool[..., 1, :], table.to(device), lengths.to(device), 0.2)
    assert torch.equal(again, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 100])
def test_decode_with_a_split_size_is_batch_invariant(device, window):
    lengths = [300, 1, 129, 256]
    keys, table, sizes = pages_of(lengths, 16, 2, 32, dtype=torch.float32, seed=7)
    query = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(8))
    moved = [tensor.to(device) for tensor in (query, keys, keys.flip(1), table, sizes)]
    together = paged_decode(*moved, 0.3, window=window, split_size=128)
    for i in range(len(lengths)):
        pages = max(1, -(-lengths[i] // 16))
        alone = moved[0][i : i + 1], *moved[1:3], moved[3][i : i + 1, :pages], moved[4][i : i + 1]
        assert torch.equal(paged_decode(*alone, 0.3, window=window, split_size=128)[0], together[i])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_graph_serves_all_lengths(dtype):
    """The host never reads the lengths."""
    keys, table, _ = pages_of([2000, 2000, 2000], 16, 2, 128, dtype=dtype, seed=9)
    query = torch.randn(3, 8, 128).to(dtype)
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    moved = [tensor.cuda() for tensor in (query, keys, keys.flip(0), table)]
    paged_decode(*moved, lengths, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode(*moved, lengths, 0.1)
    for sizes in ([0, 1, 2000], [17, 0, 600], [2000, 1999, 16]):
        lengths.copy_(torch.tensor(sizes, dtype=torch.int32))
        graph.replay()
        assert_near(out, expected(query, keys, keys.flip(0), table, torch.tensor(sizes, dtype=torch.int32), 0.1))


def test_decode_refuses_invalid_arguments():
    keys, table, lengths = pages_of([5, 6], 16, 2, 16, dtype=torch.float32, seed=10)
    query = torch.randn(2, 4, 16)
    for wrong in (
        (query[:, :3], keys, keys, table, lengths),
        (query[..., :8], keys, keys, table, lengths),
        (query, keys, keys[:1], table, lengths),
        (query, keys, keys, table.long(), lengths),
        (query, keys, keys, table, lengths.long()),
        (query, keys, keys, table[:1], lengths),
        (query, keys, keys.mT, table, lengths),
        (query, keys, None, table, lengths),
        (query, keys.to("meta"), keys, table, lengths),
    ):
        with pytest.raises(UsageError):
            paged_decode(*wrong, 1.0)
    for wrong_settings in ({"sinks": torch.zeros(3)}, {"split_size": 100}, {"window": 5, "chunk": 5}):
        with pytest.raises(UsageError):
            paged_decode(query, keys, keys, table, lengths, 1.0, **wrong_settings)


@pytest.mark.parametrize(
    ("heads", "dim", "requests", "expected"),
    [
        ((32, 8), 128, 1, 64),  # the maximum
        ((32, 8), 128, 2, 32),  # four programs fit on each of 132 SMs: 33, rounded down to full merges
        ((32, 8), 128, 3, 22),
        ((32, 8), 128, 32, 2),
        ((32, 8), 128, 256, 1),
        ((16, 1), 576, 32, 8),  # two fit: 9 splits would take as long as 16
        ((128, 1), 576, 32, 2),  # one fits
        ((128, 1), 576, 4, 16),
        ((128, 1), 576, 512, 1),
    ],
)
def test_parts_of_a_sequence_fill_the_device_once(heads, dim, requests, expected):
    is_large = heads[0] // heads[1] > 16
    launch = paged_decode_module.LAUNCHES[1024 if dim > 256 else 128, 2, is_large]
    programs = requests * heads[1] * (2 if is_large else 1)
    assert paged_decode_module._splits(programs, 4096, 132, launch) == expected
