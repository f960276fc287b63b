"""Copies of KV cache pages between pools, within a GPU and to and from pinned host memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.page_transfer import copy_pages, copy_pages_reference


@st.composite
def transfers(draw):
    """Draw two byte pools and a mapping of source to target pages."""
    layers = draw(st.integers(1, 3))
    pages = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = draw(st.sampled_from([(1, 1, 1), (4, 2, 8), (16, 1, 130), (2, 3, 5), (16, 8, 128)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pools = [torch.randint(0, 256, (layers, n, *shape), generator=generator).to(torch.uint8) for n in pages]
    count = draw(st.integers(0, pages[1]))
    source_pages = torch.randint(0, pages[0], (count,), generator=generator)
    return *pools, source_pages, torch.randperm(pages[1], generator=generator)[:count]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(transfer=transfers())
def test_copy_pages_matches_the_reference(device, transfer):
    source, target, source_pages, target_pages = transfer
    expected = target.clone()
    copy_pages_reference(source, expected, source_pages, target_pages)
    moved = target.to(device, copy=True)
    copy_pages(source.to(device), moved, source_pages.to(device), target_pages.to(device))
    assert torch.equal(moved.cpu(), expected)


@pytest.mark.gpu
def test_pages_reach_host_memory_and_come_back():
    pool = torch.randn(4, 50, 16, 8, 128).bfloat16().cuda()
    host = torch.zeros(4, 20, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    pages, places = torch.randperm(50)[:20].cuda(), torch.randperm(20).cuda()
    copy_pages(pool, host, pages, places)
    back = torch.zeros_like(pool)
    copy_pages(host, back, places, pages)
    torch.cuda.synchronize()
    expected = torch.zeros_like(pool)
    expected[:, pages] = pool[:, pages]
    assert torch.equal(back, expected)
    assert torch.equal(host[:, places.cpu()], pool[:, pages].cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_pools_that_do_not_fit_are_refused(device):
    pool, pages = torch.zeros(2, 4, 16, 8, device=device), torch.arange(3, device=device)
    for wrong in (
        (pool, pool[:, :, :8].contiguous(), pages, pages),
        (pool, pool.half(), pages, pages),
        (pool, pool[:1], pages, pages),
        (pool.mT, pool, pages, pages),
        (pool, pool, pages.int(), pages),
        (pool, pool, pages[:2], pages),
    ):
        with pytest.raises(UsageError, match="copy_pages"):
            copy_pages(*wrong)
    if device == "cuda":
        with pytest.raises(UsageError, match="pinned"):
            copy_pages(pool, pool.cpu(), pages, pages)
