"""Triton statistics and digests against the host's, which define the values."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak_cases import mostly_soak
from triton_helpers import DEVICES

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.native.summary import _unpack, summarize
from tapscope.kernels.triton import tap

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # values overflow in the interpreter's numpy
DTYPES = list(tap.FORMATS)


def random_bits(count, dtype, seed):
    """Return elements with random bit patterns, including NaNs, infinities and subnormals."""
    noise = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=noise).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=noise, dtype=torch.uint8).view(dtype)


def host(tensor):
    """Return the summary computed on the host."""
    flat = tensor.cpu().contiguous()
    return summarize(flat.data_ptr(), flat.numel(), str(tensor.dtype).removeprefix("torch."))


def check(row, tensor, by=1e-6):
    found, expected = _unpack(row.cpu().numpy().tobytes()), host(tensor)
    assert (found.hash, found.bag) == (expected.hash, expected.bag)
    exact = {name: getattr(found.stats, name) for name in found.stats.__struct_fields__ if "sum" not in name}
    assert exact == {name: getattr(expected.stats, name) for name in exact}
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = values.double().cpu()
    reach = float(wide[wide.isfinite()].abs().sum())
    if not math.isfinite(expected.stats.sum):  # beyond float64; inf or nan depends on the order of summation
        assert not math.isfinite(found.stats.sum)
        return
    assert found.stats.sum == pytest.approx(expected.stats.sum, rel=by, abs=by * reach if reach < 1e300 else None)
    assert found.stats.sumsq == pytest.approx(expected.stats.sumsq, rel=by)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(4000, 4200), st.sampled_from([8192, 20001])),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["bits", "normal", "zeros"]),
    seed=st.integers(0, 2**31),
)
def test_tap_row_matches_host_statistics(device, count, dtype, kind, seed):
    if kind == "bits":
        tensor = random_bits(count, dtype, seed)
    else:
        noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
        tensor = (noise * (0 if kind == "zeros" else 9)).to(dtype)
    check(tap.summarize(tensor.to(device)), tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-12, 1e15, 3e20, 1e37])
def test_tap_squares_do_not_overflow(device, dtype, scale):
    tensor = (torch.randn(9000, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    check(tap.summarize(tensor.to(device)), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_tap_accepts_views_complex_and_misaligned_tensors(device):
    whole = torch.randn(64, 130, generator=torch.Generator().manual_seed(1)).to(device)
    for tensor in (whole.mT, whole[:, 3:77], whole.flatten()[1:50], whole[:0], whole[3, 5]):
        check(tap.summarize(tensor), tensor)
    number = torch.complex(whole, whole * 2)
    check(tap.summarize(number), number)
    check(tap.summarize(number.conj()), number.conj().resolve_conj())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", mostly_soak([20_001, 70_001, 200_001], default=[20_001]))
def test_tap_row_does_not_depend_on_the_number_of_programs(device, count, monkeypatch):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(2)).to(device)
    rows = []
    for sms in (1, 3):
        monkeypatch.setattr(tap, "num_sms", lambda _, sms=sms: sms)
        rows.append(tap.summarize(tensor))
        assert torch.equal(tap.summarize(tensor), rows[-1])
        check(rows[-1], tensor)
    assert torch.equal(rows[0][12:], rows[1][12:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("value", "place"), [(torch.nan, 4096 * 9 + 5), (-torch.inf, -1), (0.0, 4096 * 13), (1e-39, 9), (1e30, 50_000)]
)
def test_tap_finds_one_unusual_value_among_ordinary_blocks(device, value, place, monkeypatch):
    """Each program has several groups of blocks, and the last block is partial."""
    monkeypatch.setattr(tap, "num_sms", lambda _: 1)
    tensor = torch.randn(4096 * 18 + 101, generator=torch.Generator().manual_seed(3)).bfloat16()
    tensor[place] = value
    check(tap.summarize(tensor.to(device)), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_tap_rows_that_are_merged_together_are_those_of_single_launches(device):
    """Small tensors need no merge; the buffer is reused for the next tensors without being cleared."""
    parts, rows = tap.Parts(torch.device(device)), torch.full((4, tap.WIDTH), 7, device=device)
    for scale in (1, -3):
        values = [torch.randn(20_001), torch.arange(9), torch.zeros(3000).half(), torch.randn(5000).half()]
        tensors = [(value * scale).to(device) for value in values]
        for tensor, row in zip(tensors, rows, strict=True):
            assert parts.has_room
            tap.begin(tensor, row, parts)
        tap.merge(rows)
        parts.used = 0
        for tensor, row in zip(tensors, rows, strict=True):
            found, wanted = row.cpu(), tap.summarize(tensor).cpu()
            assert torch.equal(found[[*range(10), 12, 13, 14, 15]], wanted[[*range(10), 12, 13, 14, 15]])
            sums, single = found[10:12].view(torch.float64), wanted[10:12].view(torch.float64)
            torch.testing.assert_close(sums, single, rtol=1e-12, atol=1e-12)


def summarize_many(tensors, rows):
    """Summarize the tensors in one launch and return its plan."""
    plan = tap.plan_of(tensors, rows)
    tap.summarize_many(plan, plan.table.to(rows.device), plan.places.to(rows.device))
    return plan


def check_many(rows, tensors):
    """Check the summaries, and that the counter of arrived programs is reset."""
    for row, tensor in zip(rows, tensors, strict=True):
        check(row, tensor)
        assert row[15] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.complex64])
@pytest.mark.parametrize("sizes", [[0, 1, 500, 4096], [20_000, 3, 8192], [70_000, 5, 30_000, 9000, 0]])
def test_tap_summarizes_many_tensors_in_one_launch(device, dtype, sizes):
    noise = torch.Generator().manual_seed(3)
    tensors = [torch.randn(size, generator=noise).mul_(9).to(dtype).to(device) for size in sizes]
    rows = torch.zeros(len(sizes), tap.WIDTH, dtype=torch.int64, device=device)
    summarize_many(tensors, rows)
    check_many(rows, tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_tap_programs_of_many_tensors_are_in_proportion_to_their_size(device, monkeypatch):
    monkeypatch.setattr(tap, "_PROGRAMS_OF_TABLE", 4)
    monkeypatch.setattr(tap, "num_sms", lambda _: 2)
    tensors = [torch.ones(count * 2048 - 5, device=device) for count in (36, 9, 8, 4, 1)]  # in blocks of 8 KiB
    rows = torch.zeros(len(tensors), tap.WIDTH, dtype=torch.int64, device=device)
    plan = summarize_many(tensors, rows)
    assert plan.group == 4
    assert plan.table[:, 1].tolist() == [5, 2, 1, 1, 1]  # two groups of four blocks per program
    assert plan.table[:, 0].tolist() == [0, 5, 7, 8, 9]
    assert plan.places.tolist() == [0] * 5 + [1] * 2 + [2, 3, 4]
    check_many(rows, tensors)
    small = tap.plan_of(tensors[3:], rows[3:])
    assert (small.group, small.table[:, 1].tolist()) == (1, [4, 1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("valid", [0, 1, 2, 5, 9])
def test_tap_of_many_tensors_counts_the_elements_in_the_table(device, valid, monkeypatch):
    """The table holds the actual element counts, which may be smaller than planned.

    Programs without elements do nothing, and the last arriving program does not wait for them. A tensor that shrinks to
    one group writes its row immediately.
    """
    monkeypatch.setattr(tap, "_PROGRAMS_OF_TABLE", 16)
    monkeypatch.setattr(tap, "num_sms", lambda _: 2)
    wide = torch.randn(9, 7168, generator=torch.Generator().manual_seed(6)).to(device)
    tensors = [wide[:, :5120], wide[:, 512:], wide[:, 64:80], wide.contiguous(), wide[:1]]
    rows = torch.zeros(len(tensors), tap.WIDTH, dtype=torch.int64, device=device)
    plan = tap.plan_of(tensors, rows)
    assert plan.table[:, 1].tolist() == [6, 8, 1, 8, 1]
    table, places = plan.table.to(device), plan.places.to(device)
    packed = [tensor[:valid] for tensor in tensors[:4]]
    table[:4, tap.COUNT] = torch.tensor([tensor.numel() for tensor in packed], device=device)
    for _ in range(2):
        tap.summarize_many(plan, table, places)
        check_many(rows, [*packed, tensors[4]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tap_summarizes_rows_that_lie_apart_without_a_copy(device, dtype):
    noise = torch.randn(9, 3072, generator=torch.Generator().manual_seed(5)).mul_(9).to(dtype).to(device)
    wide = noise[:, 64:2112]
    tensors = [wide, wide.unflatten(1, (16, 128)), noise[::2, :1024], noise[:5], wide[:1], noise[:, 16:32]]
    rows = torch.zeros(len(tensors), tap.WIDTH, dtype=torch.int64, device=device)
    summarize_many(tensors, rows)
    check_many(rows, tensors)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    width=st.sampled_from([1, 7, 8, 24, 40, 128, 344, 1000, 1023, 1024]),
    left=st.sampled_from([0, 8, 16, 1]),
    right=st.sampled_from([0, 8, 16, 4096, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int32]),
    kind=st.sampled_from(["bits", "normal", "few"]),
)
def test_tap_of_rows_that_lie_apart_is_that_of_their_copy(device, rows, width, left, right, dtype, kind):
    """All bits are equal, including sums; rows that are not aligned to 16 bytes are refused."""
    shape = rows, left + width + right
    if kind == "bits":
        whole = random_bits(rows * shape[1], dtype, rows).view(shape)
    else:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(width)).mul_(9)
        if kind == "few":
            whole[rows // 2, left], whole[0, left + width - 1], whole[-1, left] = math.nan, math.inf, -math.inf
        whole = whole.nan_to_num(0, 0, 0).to(dtype) if dtype == torch.int32 else whole.to(dtype)
    apart = whole.to(device)[:, left : left + width]
    tensors, found = [apart, apart.contiguous()], torch.zeros(2, tap.WIDTH, dtype=torch.int64, device=device)
    is_one_run, size = apart.is_contiguous(), dtype.itemsize
    is_aligned = left * size % 16 == 0 and (is_one_run or width * size % 16 == right * size % 16 == 0)
    if not is_aligned:
        with pytest.raises(UsageError, match="aligned to 16 bytes"):
            tap.plan_of(tensors, found)
        return
    summarize_many(tensors, found)
    assert torch.equal(found[0], found[1])
    check(found[0], apart, by=1e-5)


@given(words=st.integers(1, (1 << 29) - 1), rows=st.integers(2, 1 << 20), gap=st.integers(1, 1 << 27), index=st.data())
def test_tap_finds_the_row_of_every_word(words, rows, gap, index):
    """The 64-bit word ``i`` is in row ``i // width``; longer tensors and larger gaps are copied."""
    width = 2 * words
    apart = torch.empty_strided((rows, 8 * width), (8 * width + 16 * gap, 1), dtype=torch.uint8, device="meta")
    found = tap.row_gap(apart)
    if rows * width >= 1 << 31:
        assert found is None
        return
    assert found is not None
    skipped, multiplier, shift = found
    assert (skipped, multiplier < 1 << 32) == (16 * gap, True)
    near = index.draw(st.integers(0, rows - 1)) * width
    for i in (near, near - 1, near + width - 1, index.draw(st.integers(0, rows * width - 1))):
        if i >= 0:
            assert (i * multiplier >> 32) >> shift == i // width
    assert tap.row_gap(torch.empty_strided((2, 16), ((1 << 32) + 16, 1), dtype=torch.uint8, device="meta")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64])
def test_tap_of_large_tensors_takes_blocks_in_groups(dtype):
    tensor = torch.randn(5_000_001, generator=torch.Generator().manual_seed(4)).mul_(9).to(dtype).cuda()
    check(tap.summarize(tensor), tensor)
    if dtype.is_floating_point:
        tensor[::700_001], tensor[77], tensor[4_000_000] = 0, math.inf, math.nan
        check(tap.summarize(tensor), tensor)
    parts = [tensor[at : at + 400_000] for at in range(0, 4_800_000, 400_000)]
    rows = torch.zeros(len(parts), tap.WIDTH, dtype=torch.int64, device="cuda")
    assert summarize_many(parts, rows).group == 4
    check_many(rows, parts)


@pytest.mark.gpu
def test_tap_graph_may_be_captured_before_its_table_is_filled():
    tensors = [torch.randn(size, device="cuda").bfloat16() for size in (10, 5000, 100_000)]
    rows = torch.zeros(3, tap.WIDTH, dtype=torch.int64, device="cuda")
    single = torch.zeros(tap.WIDTH, dtype=torch.int64, device="cuda")
    plan = tap.plan_of(tensors, rows)
    table, places = plan.table.cuda(), plan.places.cuda()

    def call():
        tap.summarize_many(plan, table, places)
        tap.summarize(tensors[1], single)

    call()
    rows.zero_()
    table[:, tap.COUNT] = 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    table.copy_(plan.table)
    for _ in range(2):
        graph.replay()
        for row, tensor in zip(rows, tensors, strict=True):
            check(row, tensor)
        check(single, tensors[1])
        for tensor in tensors:
            tensor.mul_(3)


def test_tap_torch_reference_matches_the_host():
    for dtype in DTYPES:
        tensor = random_bits(3000, dtype, 4)
        values = tap.summarize_reference(tensor).tolist()
        stats = host(tensor).stats
        counts = [stats.count, stats.nan, stats.posinf, stats.neginf, stats.zeros, stats.subnormals, stats.finite]
        assert values[:10] == [*counts, stats.min, stats.max, stats.absmax]
        assert values[10:] == pytest.approx([stats.sum, stats.sumsq], rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_tap_row_layout_matches_the_host(device):
    row = tap.summarize(torch.tensor([2.0, -1.0], device=device)).cpu().numpy().tobytes()
    assert struct.unpack("=7q5d3Q", row[:120])[:12] == (2, 0, 0, 0, 0, 0, 2, -1.0, 2.0, 2.0, 1.0, 5.0)


@pytest.mark.parametrize("device", DEVICES)
def test_tap_refuses_invalid_arguments(device):
    one, rows = torch.ones(4, device=device), torch.zeros(1, tap.WIDTH, dtype=torch.int64, device=device)
    plan = tap.plan_of([one], rows)
    table, places = plan.table.to(device), plan.places.to(device)
    for call in (
        lambda: tap.summarize(one.to(torch.float8_e4m3fnuz)),
        lambda: tap.summarize(one, rows[0, :5]),
        lambda: tap.summarize(one, rows[0].double()),
        lambda: tap.summarize_many(plan, table[:, :1], places),
        lambda: tap.summarize_many(plan, table.double(), places),
        lambda: tap.summarize_many(plan, table, places[:0]),
        lambda: tap.plan_of([one.to(torch.float8_e4m3fnuz)], rows),
        lambda: tap.plan_of([one, one.half()], rows.expand(2, tap.WIDTH)),
        lambda: tap.plan_of([], rows[:0]),
        lambda: tap.plan_of([one[1:]], rows),
        lambda: tap.plan_of([torch.ones(4, 4, device=device).mT], rows),
    ):
        with pytest.raises(UsageError):
            call()
