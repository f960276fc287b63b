"""One-shot all-reduce: every rank adds up what all ranks have stored where their peers can read it.

    total = round(sum over ranks of states)     in float32, in the order of the ranks: the same on every rank

Each rank has a *window* that the others have mapped: two halves of MAX_BYTES, then a flag for each peer and program. A
program copies its part of ``states`` into its own window, sets its flag in every peer's window, waits for the flags of
the peers, and adds. Calls alternate between the halves: a rank overwrites one only after every peer has begun the call
after the one that reads it. Programs count their calls on the device, so that a CUDA graph can contain them. All ranks
must make the same calls in the same order, each in one stream. Programs are few and have four warps, and each flag has
a cache line of its own: with 32 programs of 16 warps that polled flags of one line, 32 rows of 4,096 took 352 µs on two
H200s, about the time until a program pauses to read ``give_up``; NCCL took 10.

Custom all-reduce kernels of this kind are in FasterTransformer, TensorRT-LLM and vLLM; the scheme with two halves is
NCCL's low-latency protocol.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.triton.launch import Launcher, next_power

MAX_BYTES = 4 << 20
"""Of one call's ``states``."""
NUM_PROGRAMS = 32
"""Of every call, whatever its size: the flags of all of them tell that a peer has ended the call before."""
_BLOCKS = 1024, 4096
"""The least and the most elements that a program takes at a time."""
_LINE = 32
"""int32 numbers between two flags: 128 bytes, a cache line."""
_POLLS = tl.constexpr(1024)
"""Polls of a flag after which a waiting program reads ``give_up``."""


def window_bytes(size: int) -> int:
    """Bytes of the window of one of ``size`` ranks. They must be zero before the first call of any rank."""
    return 2 * MAX_BYTES + 4 * size * NUM_PROGRAMS * _LINE


def new_calls(device: torch.device) -> Tensor:
    """Counters of the calls, to be passed to every call of this rank."""
    return torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device)


def all_reduce(states: Tensor, windows: Tensor, rank: int, calls: Tensor, give_up: Tensor) -> Tensor:
    """Sum of the ranks' ``states`` [...], a new contiguous tensor of the same shape and dtype.

    ``windows`` [ranks] int64 on the device holds the address of each rank's window in this process; ``calls`` comes
    from :func:`new_calls`. ``give_up`` [1] int32 may be in page-locked host memory: once it is not 0, programs stop
    waiting, and the result is undefined. ``states`` has at most MAX_BYTES.
    """
    states = states.contiguous()
    total = torch.empty_like(states)
    count = states.numel()
    if not count:
        return total
    block = min(max(next_power(-(-count // NUM_PROGRAMS)), _BLOCKS[0]), _BLOCKS[1])
    constants = {
        "RANK": rank,
        "SIZE": windows.numel(),
        "BLOCK": block,
        "HALF": MAX_BYTES,
        "PROGRAMS": NUM_PROGRAMS,
        "LINE": _LINE,
    }
    args = states, total, windows, calls, give_up, count
    _launch(states.device, (NUM_PROGRAMS, 1, 1), args, constants, num_warps=4)
    return total


@triton.jit
def _wait(flag, call, give_up):
    """Until the flag is ``call`` or more, or somebody gives up; what the peer stored before is visible then."""
    acquired = call - 1
    while acquired < call:
        seen = tl.load(flag, volatile=True)
        polls = 0
        while seen < call:  # without an atomic operation, which would delay the peer's
            seen = tl.load(flag, volatile=True)
            polls += 1
            if polls == _POLLS:
                polls = 0
                if tl.load(give_up, volatile=True) != 0:
                    seen = call
        acquired = tl.maximum(tl.atomic_add(flag, 0, sem="acquire", scope="sys"), seen)


@triton.jit(do_not_specialize=["count"])
def _all_reduce_kernel(
    states, total, windows, calls, give_up, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, PROGRAMS: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """Every rank's states -> total."""
    dtype: tl.constexpr = states.dtype.element_ty
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    half = (call % 2) * (HALF // (dtype.primitive_bitwidth // 8))
    window = tl.load(windows + RANK).to(tl.pointer_type(dtype)) + half
    for start in range(program * BLOCK, count, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(window + at, tl.load(states + at, mask=at < count, other=0.0), mask=at < count)
    tl.debug_barrier()  # one thread sets the flags, for what all threads have stored
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = (tl.load(windows + peer) + 2 * HALF).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + (RANK * PROGRAMS + program) * LINE, call, sem="release", scope="sys")
    mine = (tl.load(windows + RANK) + 2 * HALF).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _wait(mine + (peer * PROGRAMS + program) * LINE, call, give_up)
    for start in range(program * BLOCK, count, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        wide = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            theirs = states if peer == RANK else tl.load(windows + peer).to(tl.pointer_type(dtype)) + half
            wide += tl.load(theirs + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(total + at, wide.to(dtype), mask=at < count)
    tl.store(calls + program, call)


_launch = Launcher(_all_reduce_kernel)
