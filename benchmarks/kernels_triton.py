"""Speed of the Triton kernels on this GPU, relative to their torch references and torch's own attention.

    python benchmarks/kernels_triton.py [--only decode]

Each kernel is captured several times in one CUDA graph; the figure is the median of replays, without Python launch
overhead. Bytes count only what must be read and written once. The share is relative to a copy on this GPU (read and
write counted), or for prefill to a bf16 matrix product. References run eagerly, as the engine calls them. Inputs that
fit the L2 cache (norms of few rows) measure latency: use the microseconds there, not the share.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tapscope.kernels.triton import (
    activation,
    hadamard,
    norm,
    page_transfer,
    paged_decode,
    paged_prefill,
    rope,
    sampling,
    sketch,
    tap,
    why_not,
)
from tapscope.kernels.triton.sketch_table import Request, sketch_many

BF16 = torch.bfloat16
PAGE = 16
CUDA = torch.device("cuda")


class Case(NamedTuple):
    """One row of the table."""

    name: str
    call: Callable[[], object]
    reference: Callable[[], object] | None
    amount: float
    """Bytes, or floating-point operations, per call."""
    torch_own: Callable[[], object] | None = None
    is_flops: bool = False


def graph_us(call: Callable[[], object], calls: int = 10, replays: int = 9) -> float:
    """Return the median microseconds of one call in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return statistics.median(events_us(graph.replay) for _ in range(replays)) / calls


def eager_us(call: Callable[[], object], rounds: int = 5) -> float:
    """Return the median microseconds of one eager call, including host time."""
    call()
    return statistics.median(events_us(call) for _ in range(rounds))


def events_us(call: Callable[[], object]) -> float:
    """Return the device microseconds of one call, between events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_rate() -> float:
    """Return the rate, read and written, of an elementwise kernel over 1 GiB in bytes per second; cudaMemcpy is slower
    within a GPU."""
    source = torch.zeros(1 << 28, device=CUDA)
    target = torch.empty_like(source)
    return 8 * source.numel() / (graph_us(lambda: torch.neg(source, out=target), 3) * 1e-6)


def matmul_rate() -> float:
    """Return the floating-point operations per second of a bf16 product of 8192 x 8192."""
    a = torch.randn(8192, 8192, device=CUDA, dtype=BF16)
    return 2 * 8192**3 / (graph_us(lambda: a @ a, 3) * 1e-6)


def noise(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return normally distributed values on the GPU."""
    return torch.randn(shape, device=CUDA).to(dtype)


def paged(batch: int, length: int) -> tuple[Tensor, Tensor, int]:
    """Return a shuffled page table, lengths, and the number of pages."""
    count = -(-length // PAGE)
    table = torch.randperm(batch * count, device=CUDA).int().view(batch, count)
    return table, torch.full((batch,), length, dtype=torch.int32, device=CUDA), batch * count


def decode_cases() -> Iterator[Case]:
    """Decode attention: one query row per request."""
    for batch, length, heads, kv_heads, dim, stored in (
        (1, 1024, 32, 8, 128, BF16),
        (1, 32768, 32, 8, 128, BF16),
        (32, 1024, 32, 8, 128, BF16),
        (32, 4096, 16, 8, 128, BF16),
        (32, 4096, 32, 8, 128, BF16),
        (32, 4096, 64, 8, 128, BF16),
        (32, 4096, 32, 8, 128, torch.float8_e4m3fn),
        (256, 1024, 16, 8, 128, BF16),
        (32, 4096, 14, 2, 64, BF16),
        (32, 4096, 16, 8, 256, BF16),
    ):
        table, lengths, pages = paged(batch, length)
        keys, values = (noise(pages, PAGE, kv_heads, dim, dtype=stored) for _ in range(2))
        query = noise(batch, heads, dim)
        call = query, keys, values, table, lengths, dim**-0.5
        dense = None
        if stored == BF16:
            k, v = (noise(batch, kv_heads, length, dim) for _ in range(2))
            q = query.view(batch, kv_heads, -1, dim)
            dense = partial(scaled_dot_product_attention, q, k, v)
        name = f"decode {batch} x {length}, {heads}/{kv_heads} x {dim} {str(stored)[6:]}"
        yield Case(
            name,
            partial(paged_decode.paged_decode, *call),
            partial(paged_decode.paged_decode_reference, *call),
            2 * batch * length * kv_heads * dim * keys.element_size(),
            dense,
        )
    yield from latent_cases()


def latent_cases() -> Iterator[Case]:
    """Latent attention (MLA) decode: keys of 576 features, of which the first 512 are the values."""
    for batch, length, heads in ((1, 4096, 16), (32, 4096, 16), (32, 4096, 128)):
        table, lengths, pages = paged(batch, length)
        keys, query = noise(pages, PAGE, 1, 576), noise(batch, heads, 576)
        call = query, keys, None, table, lengths, 0.07
        yield Case(
            f"decode MLA {batch} x {length}, {heads} heads",
            partial(paged_decode.paged_decode, *call, value_dim=512),
            partial(paged_decode.paged_decode_reference, *call, value_dim=512),
            batch * length * 576 * 2,
        )


def prefill_cases() -> Iterator[Case]:
    """Prefill of full prompts, of chunks after a cached prefix, and of many short requests; operations count unmasked
    elements."""
    for batch, cached, rows, heads, kv_heads, dim in (
        (1, 0, 1024, 32, 8, 128),
        (1, 0, 8192, 32, 8, 128),
        (1, 28672, 4096, 32, 8, 128),
        (8, 0, 1024, 32, 8, 128),
        (64, 512, 64, 32, 8, 128),
        (1, 0, 8192, 14, 2, 64),
        (1, 0, 8192, 16, 8, 256),
    ):
        table, lengths, pages = paged(batch, cached + rows)
        keys, values = (noise(pages, PAGE, kv_heads, dim) for _ in range(2))
        query, starts = noise(batch * rows, heads, dim), torch.arange(batch + 1, device=CUDA, dtype=torch.int32) * rows
        call = query, keys, values, table, starts, lengths, dim**-0.5
        dense = None
        if not cached:
            q, k, v = (noise(batch, count, rows, dim) for count in (heads, kv_heads, kv_heads))
            own = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            dense = partial(own, q, k, v)
        yield Case(
            f"prefill {batch} x {cached} + {rows}, {heads}/{kv_heads} x {dim}",
            partial(paged_prefill.paged_prefill, *call),
            partial(paged_prefill.paged_prefill_reference, *call) if cached + rows <= 1024 else None,
            4 * batch * heads * dim * rows * (cached + (rows + 1) / 2),
            dense,
            is_flops=True,
        )


def layer_cases() -> Iterator[Case]:
    """Norms, rotary embedding with KV cache write, activations."""
    for rows in (1, 32, 256, 8192):
        states, residual, weight = noise(rows, 4096), noise(rows, 4096), noise(4096)
        yield Case(
            f"add + norm {rows} x 4096",
            partial(norm.add_rms_norm, states, residual, weight, 1e-6),
            partial(norm.add_rms_norm_reference, states, residual, weight, 1e-6),
            4 * states.numel() * 2,
        )
        fused = noise(rows, 48, 128)
        query, key, value = fused.split((32, 8, 8), dim=1)
        table = torch.randperm(max(rows, 1024), device=CUDA)[:rows]
        pool = rope.CachePool(*(noise(max(rows, 1024) // PAGE, PAGE, 8, 128) for _ in range(2)))
        rotation, headed = (noise(rows, 128), noise(rows, 128)), rope.HeadNorm(noise(128), noise(128), 1e-6)
        call = query, key, value, rotation, table, pool
        yield Case(
            f"q/k norm + rope + store {rows} x 32/8 x 128",
            partial(rope.rotate_and_store, *call, norm=headed),
            None,
            2 * fused.numel() * 2 + 2 * key.numel(),
        )
        gate_up = noise(rows, 2 * 14336)
        yield Case(
            f"silu * up {rows} x 14336",
            partial(activation.gated, gate_up, None, "silu"),
            partial(activation.gated_reference, *gate_up.chunk(2, dim=-1), "silu"),
            3 * gate_up.numel(),
        )


def tap_cases() -> Iterator[Case]:
    """Statistics, digests and sketches, of one tensor and of many module outputs in one launch."""
    for rows, columns, dtype in ((1, 4096, BF16), (32, 4096, BF16), (256, 4096, BF16), (65536, 4096, BF16)):
        tensor, row = noise(rows, columns, dtype=dtype), torch.zeros(tap.WIDTH, dtype=torch.int64, device=CUDA)
        name = f"tap {rows} x {columns} {str(dtype)[6:]}"
        yield Case(name, partial(tap.summarize, tensor, row), None, tensor.numel() * tensor.element_size())
    tensors = [noise(32, 4096) for _ in range(200)]
    rows = torch.zeros(len(tensors), tap.WIDTH, dtype=torch.int64, device=CUDA)
    plan = tap.plan_of(tensors, rows)
    call = partial(tap.summarize_many, plan, plan.table.to(CUDA), plan.places.to(CUDA))
    yield Case("tap 200 tensors of 32 x 4096", call, None, len(tensors) * 32 * 4096 * 2)
    keys, counters = torch.arange(32, device=CUDA), torch.zeros(len(tensors), sketch.COUNTERS, device=CUDA)
    part, sketches = sketch.Part(32, 4096, 0, 0, 4096), sketch.Sketches(CUDA, len(tensors))
    requests = [Request(tensor, keys, part, out.data_ptr()) for tensor, out in zip(tensors, counters, strict=True)]
    (table,) = sketch_many(sketches, requests, lambda table: table.to(CUDA))
    call = partial(sketch_many, sketches, requests, lambda _: table)
    yield Case("sketch 200 tensors of 32 x 4096", call, None, len(tensors) * 32 * 4096 * 2)


def sampling_cases() -> Iterator[Case]:
    """Sampling from 152k tokens; torch's own is argmax only."""
    for rows in (1, 32, 256):
        logits, ones = noise(rows, 151936, dtype=torch.float32), torch.ones(rows, device=CUDA)
        longs = torch.arange(rows, device=CUDA)
        filters = {"top_k": torch.full((rows,), 50, device=CUDA).int(), "top_p": ones * 0.9}
        own = partial(logits.argmax, -1)
        for name, more in (("draw", {}), ("draw, top-k and top-p", filters)):
            call = partial(sampling.draw, logits, ones, longs, longs, **more)
            plain = partial(sampling.draw_reference, logits, ones, longs, longs, **more)
            yield Case(f"{name}, {rows} x 151936", call, plain, 2 * logits.numel() * 4, own)


def transform_cases() -> Iterator[Case]:
    """Hadamard transforms of power-of-two sizes, and of 28 * 512."""
    for rows, size in ((8192, 128), (2048, 4096), (2048, 14336)):
        states = noise(rows, size)
        yield Case(
            f"hadamard {rows} x {size}",
            partial(hadamard.hadamard, states, size**-0.5),
            partial(hadamard.hadamard_reference, states, size**-0.5),
            2 * states.numel() * 2,
        )


def transfer_cases() -> Iterator[Case]:
    """Page transfers of 28 layers (32 KiB each) within the GPU, to host memory and back; torch's own is one copy of the
    same size."""
    shape = 28, 512, PAGE, 8, 128
    pool, other = noise(*shape), noise(*shape)
    host = torch.zeros(shape, dtype=BF16, pin_memory=True)
    pages, places = (torch.randperm(512, device=CUDA) for _ in range(2))
    for name, source, target in (("within", pool, other), ("to host", pool, host), ("from host", host, pool)):
        yield Case(
            f"512 pages of 28 layers, {name}",
            partial(page_transfer.copy_pages, source, target, pages, places),
            None,
            (2 if name == "within" else 1) * pool.numel() * 2,
            partial(target.copy_, source, non_blocking=True),
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "layers": layer_cases,
    "tap": tap_cases,
    "sampling": sampling_cases,
    "transform": transform_cases,
    "transfer": transfer_cases,
}


def line_of(case: Case, copy: float, product: float) -> str:
    """Return one row of the table."""
    us = graph_us(case.call)
    rate = case.amount / (us * 1e-6)
    share = rate / (product if case.is_flops else copy)
    others = [f"{fn(case_call):9.1f}" if case_call else f"{'-':>9}" for fn, case_call in (
        (eager_us, case.reference), (graph_us, case.torch_own))]  # fmt: skip
    unit = f"{rate / 1e12:8.1f} TFLOP/s" if case.is_flops else f"{rate / 1e9:8.0f} GB/s   "
    return f"{case.name:46}{us:9.1f} {unit} {share:6.2f}  {others[0]} {others[1]}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=GROUPS, help="measure one group of kernels")
    only = parser.parse_args().only
    reason = why_not(CUDA) if torch.cuda.is_available() else "there is no CUDA device"
    if reason is not None:
        raise SystemExit(f"nothing to measure: {reason}")
    copy, product = copy_rate(), matmul_rate()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':46}{'us':>9} {'':13}    share  ref. us   torch us")
    for name, cases in GROUPS.items():
        for case in cases() if only in (None, name) else ():
            print(line_of(case, copy, product), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
