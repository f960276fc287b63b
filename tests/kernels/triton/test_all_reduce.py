"""One-shot all-reduce of ranks in separate processes, which share memory like GPUs."""

import threading

import pytest
import torch
from all_reduce_ranks import rank_main, reduce_all
from forkserver_pool import RANKS

pytest.importorskip("triton")

import triton.language as tl

from tapscope.kernels.triton import all_reduce as module
from tapscope.kernels.triton import is_interpreted
from tapscope.kernels.triton.all_reduce import all_reduce, new_calls, window_bytes

needs_interpreter = pytest.mark.skipif(not is_interpreted(), reason="processes without a GPU share memory")
SHAPES = [(3, 700), (5,), (2, 3000), (0, 4), (3, 700), (7, 512)]


@needs_interpreter
def test_sum_over_ranks() -> None:
    """Sums are in float32 and in rank order. Calls of several sizes and dtypes share the halves of the windows."""
    size = 3
    generator = torch.Generator().manual_seed(size)
    dtypes = torch.float32, torch.float16
    states = [
        [torch.randn(shape, generator=generator).to(dtypes[call % 2]) for call, shape in enumerate(SHAPES)]
        for _ in range(size)
    ]
    for rank in range(size):
        states[rank][2] = states[rank][2].t()  # not contiguous
    windows = [torch.zeros(window_bytes(size), dtype=torch.uint8).share_memory_() for _ in range(size)]
    answers = RANKS.Queue()
    others = [RANKS.Process(target=rank_main, args=(r, windows, states[r], answers)) for r in range(1, size)]
    for process in others:
        process.start()
    totals = {0: reduce_all(0, windows, states[0])}
    for _ in others:
        rank, arrays = answers.get(timeout=60)
        totals[rank] = [torch.from_numpy(array) for array in arrays]
    for process in others:
        process.join(60)
    for call in range(len(SHAPES)):
        wide = states[0][call].float()
        for rank in range(1, size):
            wide = wide + states[rank][call].float()
        expected = wide.to(states[0][call].dtype)
        for rank in range(size):
            assert totals[rank][call].dtype == expected.dtype
            assert torch.equal(totals[rank][call], expected), (call, rank)


@needs_interpreter
def test_give_up_ends_the_wait_for_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLLS", tl.constexpr(8))  # each of 32 programs polls this often, one after the other
    windows = [torch.zeros(window_bytes(2), dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([window.data_ptr() for window in windows])
    give_up = torch.zeros(1, dtype=torch.int32)
    done = threading.Event()

    def call() -> None:
        all_reduce(torch.ones(4), addresses, 0, new_calls(give_up.device), give_up)
        done.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert not done.wait(0.3)
    give_up.fill_(1)
    assert done.wait(60)


@pytest.mark.gpu
@pytest.mark.skipif(is_interpreted() or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_streams_of_one_gpu_are_ranks(rows: int) -> None:
    """One graph is captured per rank and all are replayed concurrently: calls are counted on the device."""
    device = torch.device("cuda")
    windows = [torch.zeros(window_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
    addresses = torch.tensor([window.data_ptr() for window in windows], device=device)
    calls, give_up = [new_calls(device) for _ in range(2)], torch.ones(1, dtype=torch.int32, pin_memory=True)
    states = [torch.randn(rows, 4096, device=device, dtype=torch.bfloat16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for rank in range(2):  # compiles without a concurrent peer
        all_reduce(states[rank], addresses, rank, calls[rank], give_up)
    torch.cuda.synchronize()
    give_up.fill_(0)
    graphs, totals = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for rank in range(2):
        with torch.cuda.graph(graphs[rank], stream=streams[rank]):
            totals.append([all_reduce(states[rank], addresses, rank, calls[rank], give_up) for _ in range(5)])
    for _ in range(3):
        for rank in range(2):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
        torch.cuda.synchronize()
        expected = (states[0].float() + states[1].float()).bfloat16()
        assert all(torch.equal(total, expected) for rank in range(2) for total in totals[rank])
