"""The CPU linear kernel against torch's linear, its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import needs_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tapscope.kernels.cpu import grouped_linear, linear
from tapscope.kernels.native import library, use_backend

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def draw(seed: int, rows: int, ins: int, outs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(seed)
    shapes = (rows, ins), (outs, ins), (outs,)
    return tuple(torch.randn(shape, generator=noise).to(dtype) for shape in shapes)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 66),
    ins=st.integers(1, 100),
    outs=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_linear_is_within_rounding_of_the_exact_product(seed, rows, ins, outs, dtype, biased, threads):
    x, w, b = draw(seed, rows, ins, outs, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = linear(x, w, b if biased else None)
    finally:
        torch.set_num_threads(before)
    exact = functional.linear(x.double(), w.double(), b.double() if biased else None)
    size = functional.linear(x.double().abs(), w.double().abs(), b.double().abs())
    bound = (ins + 2) * 2.0**-24 * size + UNIT.get(dtype, 2.0**-11) * exact.abs() + 1e-30
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= bound).all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rows_are_batch_and_thread_invariant(dtype):
    x, w, b = draw(0, 19, 1100, 130, dtype)
    code = library.CODES[str(dtype).removeprefix("torch.")]

    def product(rows: torch.Tensor, threads: int) -> torch.Tensor:
        y = torch.full((len(rows), 130), torch.nan, dtype=dtype)
        addresses = (tensor.data_ptr() for tensor in (rows, w, b, y))
        if not library.functions().linear(*addresses, len(rows), rows.stride(0), 130, 1100, code, threads):
            pytest.skip("this processor has no kernel for it")
        return y

    together = product(x, 1)
    assert torch.equal(product(x, 4), together)
    assert torch.equal(torch.cat([product(row.unsqueeze(0), 1) for row in x]), together)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(product(wide[:, 1100:], 2), together)


class Seen(TorchFunctionMode):
    """Records the functions called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_linear_uses_torch_under_autograd_and_tracing():
    x, w, b = draw(1, 3, 16, 8, torch.float32)
    with Seen() as seen:
        linear(x, w, b)
    assert functional.linear in seen.functions
    leaf = w.clone().requires_grad_()
    linear(x, leaf, b).sum().backward()
    assert torch.allclose(leaf.grad, x.sum(0).expand(8, 16))
    assert linear(x.to("meta"), w.to("meta")).shape == (3, 8)
    with FlopCounterMode(display=False) as counted:
        linear(x, w)
    assert counted.get_total_flops() == 2 * 3 * 16 * 8
    with FakeTensorMode() as fakes:
        assert linear(fakes.from_tensor(x), fakes.from_tensor(w)).shape == (3, 8)


LAID_OTHERWISE = [
    lambda x, w: (x.mT.contiguous().mT, w),
    lambda x, w: (x, w.mT.contiguous().mT),
    lambda x, w: (x.view(1, 3, 16), w),
]


@pytest.mark.parametrize("change", LAID_OTHERWISE)
def test_linear_uses_torch_for_noncontiguous_rows(change):
    x, w = change(*draw(2, 3, 16, 8, torch.float32)[:2])
    assert torch.equal(linear(x, w), functional.linear(x, w))


def test_linear_uses_torch_without_the_native_library():
    x, w, b = draw(3, 3, 16, 8, torch.float32)
    with use_backend("numpy"):
        assert torch.equal(linear(x, w, b), functional.linear(x, w, b))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(x, w[:, :4])
    with pytest.raises(RuntimeError, match=r"size|expand|shape"):
        linear(x, w, b[:3])
    assert linear(x[:0], w, b).shape == (0, 8)


@needs_library
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 7, 19]), min_size=1, max_size=6),
    left=st.sampled_from([0, 3]),
    ins=st.integers(1, 100),
    outs=st.integers(4, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 3]),
)
def test_grouped_linear_has_the_bits_of_linear_in_each_group(seed, counts, left, ins, outs, dtype, threads):
    x = draw(seed, sum(counts) + left, ins, outs, dtype)[0]
    w = torch.stack([draw(seed + 1 + group, 1, ins, outs, dtype)[1] for group in range(len(counts))])
    ends = torch.tensor(counts).cumsum(0).int()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = grouped_linear(x, w, ends)
    finally:
        torch.set_num_threads(before)
    if found is None:
        pytest.skip("this processor has no kernel for it")
    for rows, result, matrix in zip(x.split([*counts, left]), found.split([*counts, left]), w, strict=False):
        assert torch.equal(result, linear(rows, matrix))


@needs_library
def test_grouped_linear_takes_ends_that_are_not_contiguous():
    x, w, _ = draw(5, 12, 16, 8, torch.float32)
    w = torch.stack([w, -w, 2 * w])
    ends = torch.tensor([[3, 70], [4, -1], [12, 5]], dtype=torch.int32)[:, 0]
    found = grouped_linear(x, w, ends)
    if found is None:
        pytest.skip("this processor has no kernel for it")
    assert torch.equal(found, grouped_linear(x, w, ends.contiguous()))


@needs_library
def test_profiles_show_products_by_their_own_names():
    x, w, _ = draw(6, 4, 16, 8, torch.float32)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = grouped_linear(x, w[None], torch.tensor([4], dtype=torch.int32))
        linear(x, w)
    if found is None:
        pytest.skip("this processor has no kernel for it")
    assert {"tapscope::grouped_linear", "tapscope::linear"} <= {event.name for event in seen.events()}


@needs_library
def test_grouped_linear_leaves_what_it_does_not_compute_to_the_caller():
    x, w, _ = draw(4, 70, 16, 8, torch.float32)
    w = w.expand(2, 8, 16).contiguous()
    if grouped_linear(x, w, torch.tensor([35, 70], dtype=torch.int32)) is None:
        pytest.skip("this processor has no kernel for it")
    assert grouped_linear(x, w, torch.tensor([69, 70], dtype=torch.int32)) is None, "many rows"
    assert grouped_linear(x, w, torch.tensor([9, 8], dtype=torch.int32)) is None, "not in order"
    assert grouped_linear(x, w, torch.tensor([9, 71], dtype=torch.int32)) is None, "rows that are not there"
    assert grouped_linear(x, w[:, :3].contiguous(), torch.tensor([35, 70], dtype=torch.int32)) is None, "few outputs"
    assert grouped_linear(x.double(), w.double(), torch.tensor([35, 70], dtype=torch.int32)) is None
    with use_backend("numpy"):
        assert grouped_linear(x, w, torch.tensor([35, 70], dtype=torch.int32)) is None
