"""Triton step inputs against the reference and the engine's torch code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, INTERPRETED

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.engine.execution import input_buffers
from tapscope.engine.execution.input_buffers import InputBuffers
from tapscope.engine.kv_cache.cache_layout import CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.requests.step_plan import PENDING, ScheduledRequest, StepPlan, pending_drafts
from tapscope.kernels.triton import step_inputs as kernels
from tapscope.kernels.triton.step_inputs import read_host, step_inputs, step_inputs_reference, store_tokens


def inputs(tokens, requests, num_rows, width, page, seed, device="cpu"):
    """Return the arguments of a step, with vectors that are views of a longer buffer."""
    made = torch.Generator().manual_seed(seed)
    ids, rows, places = (
        torch.randint(0, high, (tokens + 1,), generator=made)[1:] for high in (99, num_rows, width * page)
    )
    ids[::3] = PENDING
    ids[1::4] = PENDING - 2
    table_rows = torch.randint(0, num_rows, (requests + 1,), generator=made).int()[1:]
    table = torch.randint(0, 1 << 30, (num_rows, width), generator=made).int()
    last = torch.randint(0, 1 << 40, (3, num_rows), generator=made)
    moved = [tensor.to(device) for tensor in (ids, rows, places, table_rows, table, last)]
    return tuple(moved[:3]), *moved[3:5], page, moved[5]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12)
@given(
    tokens=st.sampled_from([0, 1, 7, 40]),
    requests=st.sampled_from([0, 1, 5, 40]),
    num_rows=st.sampled_from([1, 9]),
    width=st.sampled_from([1, 65, 1030, 2100]),
    page=st.sampled_from([1, 16, 24]),
    used=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_step_inputs_match_the_reference(device, tokens, requests, num_rows, width, page, used, seed):
    rows, table_rows, table, size, last = inputs(tokens, requests, num_rows, width, page, seed, device)
    call = rows, table_rows, table, size, int(used * width), last
    for found, expected in zip(step_inputs(*call), step_inputs_reference(*call), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def buffers_of(windowed):
    """Return the buffers for three requests and ``windowed`` cache groups in addition to the first."""
    layout = CacheLayout(kv_heads=1, key_dim=4, value_dim=4)
    groups = [CacheGroup({layer: layout}, 12) for layer in range(1 + windowed)]
    cache = KVCache(groups, 8, KVFormat(torch.float32, torch.float32))
    return InputBuffers(cache, 16, 3, 4, num_drafts=2)


def decoding(row):
    return ScheduledRequest(request=str(row), row=row, position=9, visits=((1, 0),), tokens=(5,), pages=(3, 7))


def loaded(windowed):
    """Return the host inputs of two decoding requests, one with a token still being computed, and of a prompt."""
    buffers = buffers_of(windowed)
    buffers.last_tokens.copy_(torch.tensor([[70, 71, 72, 0], [80, 81, 82, 0], [90, 91, 92, 0]]))
    scheduled = [
        ScheduledRequest(
            request=str(row), row=row, position=position, visits=((len(tokens), 0),), tokens=tokens, pages=pages,
            windowed_pages=((0, *reversed(pages)),) * windowed, num_logits=1, samples=True,
        )
        for row, position, tokens, pages in (
            (2, 9, (PENDING,), (3, 7)), (0, 16, (5,), (1, 8, 2)), (1, 0, (4, *pending_drafts(2)), (5,)),
        )
    ]  # fmt: skip
    return buffers.load(StepPlan(step=0, phase="mixed", scheduled=tuple(scheduled), kv_pages_used=0))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("windowed", [0, 1])
def test_step_inputs_of_the_engine_are_those_of_its_torch_code(windowed, monkeypatch):
    plain = loaded(windowed)
    monkeypatch.setattr(input_buffers, "_kernels", lambda _: kernels)
    monkeypatch.setattr(input_buffers, "_LEAST_ROWS", 1)
    fused = loaded(windowed)
    assert plain.input_ids.tolist() == [72, 5, 4, 81, 91]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(getattr(plain, name), getattr(fused, name))
    for layer in range(1 + windowed):
        assert torch.equal(plain.cache.slots_of(layer), fused.cache.slots_of(layer))
        assert torch.equal(plain.cache.page_table_of(layer), fused.cache.page_table_of(layer))
    assert fused.cache.slots.tolist() == [7 * 8 + 1, 2 * 8, 5 * 8, 5 * 8 + 1, 5 * 8 + 2]


@pytest.mark.parametrize("device", DEVICES)
def test_step_inputs_read_pinned_memory(device):
    for counts in ((0, 0), (1, 0), (0, 5), (1500, 3), (7, 2100)):
        hosts, outs = [], []
        for count, dtype in zip(counts, (torch.int64, torch.int32), strict=True):
            hosts.append(torch.arange(count + 8, dtype=dtype, pin_memory=device == "cuda")[:count])
            outs.append(torch.full((count + 2,), -1, dtype=dtype, device=device))
        for added in (0, 7):
            for host in hosts:
                host += added
            read_host(*((host, out[1:-1]) for host, out in zip(hosts, outs, strict=True)))
            if device == "cuda":
                torch.cuda.synchronize()
            for count, out in zip(counts, outs, strict=True):
                assert out.tolist() == [-1, *range(added, added + count), -1]


@pytest.mark.parametrize("device", DEVICES)
def test_step_inputs_read_ids_that_the_device_has_computed(device):
    """A negative id refers to its row's tokens on the device: -1 to the last token, lower ids to drafts."""
    last = torch.arange(12, device=device).reshape(2, 6) + 100
    numbers = [7, -1, -2, 9, -5, -6, -7, -8, 5, 4, 0, 1, -1]  # ids, other numbers, rows and more
    host = torch.tensor(numbers).pin_memory() if device == "cuda" else torch.tensor(numbers)
    ints = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32, device=device)
    host_ints = ints[0].pin_memory() if device == "cuda" else ints[0]
    out = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    read_host((host, out), (host_ints, ints[1]), 4, last)
    assert out.tolist() == [7, 104, 106, 9, *numbers[4:]]


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_go_to_their_rows_and_to_the_host(device):
    host, last = torch.full((5,), -1, pin_memory=device == "cuda"), torch.arange(6, device=device)
    tokens, rows = torch.tensor([70, 80, 90], device=device), torch.tensor([0, 5, 2, 0], device=device)
    store_tokens(tokens, rows[1:], last, host)
    if device == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == [70, 80, 90, -1, -1]
    assert last.tolist() == [90, 1, 80, 3, 4, 70]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_engine_keeps_sampled_tokens_on_the_host_for_a_few_steps(monkeypatch):
    for found in (None, kernels):
        monkeypatch.setattr(input_buffers, "_kernels", lambda _, found=found: found)
        monkeypatch.setattr(input_buffers, "_LEAST_ROWS", 1)
        buffers = buffers_of(0)
        buffers.load(StepPlan(step=0, phase="decode", scheduled=(decoding(2), decoding(0)), kv_pages_used=0))
        kept = [buffers.store_sampled_tokens(torch.tensor([step, step + 1])) for step in range(4)]
        assert [tokens.tolist() for tokens in kept] == [[0, 1], [1, 2], [2, 3], [3, 4]]
        assert buffers.last_tokens[0].tolist() == [4, 0, 3, 0]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_step_inputs_refuse_invalid_arguments():
    longs = torch.zeros(4, dtype=torch.int64)
    ints = longs.int()
    for pairs in (((longs, longs), (ints, longs)), ((longs, longs), (ints, ints[:3])), ((ints, longs), (ints, ints))):
        with pytest.raises(UsageError, match="do not fit"):
            read_host(*pairs)
    with pytest.raises(UsageError, match="2 ids in 4 numbers"):
        read_host((longs, longs), (ints, ints), 2, longs[None])
    with pytest.raises(UsageError, match="4 tokens, 4 rows and room for 3"):
        store_tokens(longs, longs, longs, longs[:3])
    rows, table_rows, table, size, last = inputs(4, 2, 3, 5, 16, 0)
    for wrong, message in (
        ((rows, table_rows.long(), table, size, 5, last), "table_rows is torch.int64"),
        ((rows, table_rows, table, size, 6, last), "6 or more pages"),
        ((rows, table_rows, table.t(), size, 3, last), "table"),
        (((rows[0][:3], *rows[1:]), table_rows, table, size, 5, last), "3 and 4 and 4"),
        ((rows, table_rows, table, size, 5, last[:, ::2]), "last_tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            step_inputs(*wrong)
