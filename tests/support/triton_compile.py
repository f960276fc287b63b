"""Program: compile every Triton kernel for the GPU targets on the command line, without a GPU, and print the results.

The wrappers are called with tensors on the CPU; each launch is replaced by a compilation with the same arguments. The
targets are preceded by a depth. `last`: each kernel at its first launch, for the last target; `first`: the same for
every target; `all`: for the last target at later launches as well; `small`: attention at every launch, as on GPUs with
little shared memory.

A line has the target, the kernel, its bytes of shared memory, and its copies to shared memory before the wait for the
previous kernel.
"""

import sys
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tapscope.kernels.triton import (
    activation,
    all_reduce,
    hadamard,
    indexer,
    int4,
    launch,
    linear,
    matmul,
    moe,
    norm,
    page_transfer,
    paged_decode,
    paged_prefill,
    quantize,
    rope,
    sampling,
    scaled_linear,
    scaled_linear_few_rows,
    sketch,
    sketch_table,
    split_linear,
    step_inputs,
    tap,
)

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("maxnreg", "launch_pdl", "num_warps", "num_stages", "enable_fp_fusion", "grid", "warmup")
BF16 = torch.bfloat16
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Maximum shared memory per program; CUDA C++ Programming Guide, compute capabilities."""
COMPILED: set[Any] = set()


def type_of(value: Any) -> str:
    """Return the type name that Triton's launcher gives to a non-constant argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def targets_of(kernel: Any) -> list[int]:
    """Return the targets of this launch."""
    if DEPTH == "small":
        return TARGETS
    if kernel in COMPILED:
        return TARGETS[-1:] if DEPTH == "all" else []
    return TARGETS[-1:] if DEPTH == "last" else TARGETS


def compile_as_launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Compile ``kernel`` as a launch with these arguments would."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    options.pop("grid"), options.pop("warmup")
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    is_constant = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    constants = {name: value for name, value in given.items() if is_constant[name] or value is None}
    constants |= {
        name: 1 for name, value in given.items() if type(value) is int and value == 1 and name not in constants
    }
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and (isinstance(given[name], torch.Tensor) or given[name] % 16 == 0)
    ]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    for target in targets_of(kernel):
        if target < 89 and any("fp8e4nv" in kind for kind in signature.values()):
            continue  # the wrappers refuse it
        if "IS_OVERLAPPED" in given:
            at = (kernel.arg_names.index("IS_OVERLAPPED"),)
            source.constants[at] = target >= 90
        made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        assert made.asm["cubin"], kernel
        assert made.metadata.shared <= SHARED_KIB[target] * 1024, (kernel, made.metadata.shared)
        COMPILED.add(kernel)
        before, waits, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        early = before.count("cp.async.c") if waits else 0
        print(f"sm_{target} {kernel.__name__} {made.metadata.shared} {early}", flush=True)


def decode() -> None:
    """Compile decode attention with one row or a few rows per request: grouped queries, long heads, latents, FP8."""
    table, lengths = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for heads, kv_heads, dim, stored, settings in (
        (32, 8, 128, BF16, {}),
        (32, 8, 128, BF16, {"most_rows": 4}),
        (32, 8, 128, BF16, {"quantized": quantize.Quantized.empty(4, 4096, torch.int8, table.device, False)}),
        (32, 8, 128, BF16, {"softcap": 50.0, "window": 4096, "sinks": torch.zeros(32)}),
        (16, 8, 256, BF16, {}),
        (128, 1, 576, BF16, {"value_dim": 512}),
        (128, 1, 576, torch.float8_e4m3fn, {"value_dim": 512}),
        (32, 8, 128, torch.float8_e4m3fn, {"stored_scales": (0.5, 0.5)}),
    ):
        pool = torch.zeros(8, 16, kv_heads, dim).to(stored)
        query = torch.zeros(4, heads, dim, dtype=torch.float32 if stored == torch.float32 else BF16)
        paged_decode.paged_decode(query, pool, pool, table, lengths, 0.1, **settings)


def choices() -> None:
    """Compile the key selection of an indexer, as in DeepSeek-V3.2."""
    table, lengths = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for dtype in (BF16, torch.float32):
        query, keys = torch.zeros(4, 64, 128, dtype=dtype), torch.zeros(8, 16, 1, 128, dtype=dtype)
        scores = indexer.index_scores(query, keys, torch.zeros(4, 64), table, lengths)
    indexer.choose_keys(scores, table, lengths, 16, 2048)


def prefill() -> None:
    """Compile prefill attention with many rows per request."""
    table, lengths = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    starts = torch.zeros(5, dtype=torch.int32)
    for heads, kv_heads, dim, stored, settings in (
        (32, 8, 128, BF16, {}),
        (32, 8, 256, BF16, {"softcap": 50.0, "window": 4096, "sinks": torch.zeros(32)}),
        (14, 2, 64, torch.float8_e4m3fn, {"stored_scales": (0.5, 0.5)}),
        (32, 8, 256, torch.float8_e4m3fn, {"stored_scales": (0.5, 0.5)}),
    ):
        pool = torch.zeros(8, 16, kv_heads, dim).to(stored)
        query = torch.zeros(40, heads, dim, dtype=BF16)
        paged_prefill.paged_prefill(query, pool, pool, table, starts, lengths, 0.1, **settings)


def layers() -> None:
    """Compile norms, rotary embedding with KV cache write, and activations."""
    states, weight = torch.zeros(4, 4096, dtype=BF16), torch.ones(4096, dtype=BF16)
    for is_gemma in (False, True):
        norm.add_rms_norm(states, states, weight, 1e-6, is_gemma=is_gemma, post_weight=weight if is_gemma else None)
        norm.rms_norm(states.view(4, 32, 128), weight[:128], 1e-6, is_gemma=is_gemma)
    query, key = torch.zeros(4, 32, 128, dtype=BF16), torch.zeros(4, 8, 128, dtype=BF16)
    headed = rope.HeadNorm(weight[:128], weight[:128], 1e-6)
    for stored, style, rotary, qk_norm in (
        (BF16, "neox", 128, headed),
        (torch.float8_e4m3fn, "neox", 64, None),
    ):
        pool = rope.CachePool(torch.zeros(8, 16, 8, 128).to(stored), torch.zeros(8, 16, 8, 128).to(stored))
        rotation, slots = (torch.ones(4, rotary, dtype=BF16),) * 2, torch.zeros(4, dtype=torch.int64)
        rope.rotate_and_store(query, key, key, rotation, slots, pool, norm=qk_norm, style=style)
    rope.angles(slots, torch.ones(64), 1.0, BF16)
    activation.gated(states, None, "gelu_pytorch_tanh")


def collectives() -> None:
    """Compile the all-reduce of two and of eight ranks."""
    for size, dtype in ((2, BF16), (8, BF16), (2, torch.float32)):
        windows, give_up = torch.zeros(size, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        all_reduce.all_reduce(
            torch.zeros(4, 4096, dtype=dtype), windows, 1, all_reduce.new_calls(give_up.device), give_up
        )


def transforms() -> None:
    """Compile Hadamard transforms of power-of-two sizes, and of one other size."""
    for size, dtype in ((4096, BF16), (14336, BF16), (128, torch.float32)):
        hadamard.hadamard(torch.zeros(4, size, dtype=dtype))


def transfers() -> None:
    """Compile page copies of 8-byte words and of bytes."""
    pages = torch.zeros(4, dtype=torch.int64)
    for features in (128, 3):
        pool = torch.zeros(2, 8, 16, features, dtype=torch.uint8)
        page_transfer.copy_pages(pool, pool, pages, pages)


def inputs() -> None:
    """Compile the preparation of ids, slots and page tables."""
    longs, table = torch.zeros(4, dtype=torch.int64), torch.zeros(5, 256, dtype=torch.int32)
    step_inputs.step_inputs((longs,) * 3, longs.int(), table, 16, 256, longs[None])
    step_inputs.read_host((longs, longs), (longs.int(), longs.int()), 1, longs[None])
    step_inputs.store_tokens(longs, longs, longs, longs)


def taps() -> None:
    """Compile statistics of all element types, of one tensor and of many."""
    for dtype in (
        BF16,
        torch.float32,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
    ):
        tap.summarize(torch.zeros(100).to(dtype))
    tap.summarize(torch.zeros(3_000_000, dtype=BF16))  # in groups of blocks
    tensor, rows = torch.zeros(100_000, dtype=BF16), torch.zeros(1, tap.WIDTH, dtype=torch.int64)
    for begun in (tensor, tensor[:100], torch.zeros(3_000_000, dtype=BF16)):
        tap.begin(begun, rows[0], tap.Parts(torch.device("cpu")))
    tap.begin(tensor, rows[0], tap.Parts(torch.device("cpu")), after_sketch=True)
    tap.merge(rows)
    plan = tap.plan_of([tensor], rows)
    tap.summarize_many(plan, plan.table, plan.places)


def sketches() -> None:
    """Compile sketches of rows of each type, of full blocks and of parts, of one tensor and of many."""
    keys = torch.zeros(9, dtype=torch.int64)
    for dtype in sketch.TYPES:
        sketch.sketch(torch.zeros(9, 700).to(dtype), keys)
    sketch.sketch(torch.zeros(9, 512, dtype=BF16), keys)
    parts = (torch.float32, sketch.Part(9, 700, 0, 0, 700)), (BF16, sketch.Part(9, 512, 0, 0, 512))
    requests = [
        sketch_table.Request(torch.zeros(part.rows, part.width, dtype=dtype), keys, part, 0) for dtype, part in parts
    ]
    sketch_table.sketch_many(sketch.Sketches(keys.device, 2), requests, lambda table: table)


def products() -> None:
    """Compile linear layers with few rows."""
    weight = torch.zeros(128, 1024, dtype=BF16)
    for rows in (1, 4):
        linear.few_rows_linear(torch.zeros(rows, 1024, dtype=BF16), weight, weight[:, 0].contiguous())
    wide = torch.zeros(1024, 3072, dtype=BF16)
    split_linear.split_linear(wide[:32], wide, wide[:, 0].contiguous(), "silu", is_constant=True)


def draws() -> None:
    """Compile sampling filters and draws."""
    ones, longs = torch.ones(4), torch.zeros(4, dtype=torch.int64)
    logits = torch.zeros(4, 5000, dtype=BF16)
    sampling.draw(logits, ones, longs, longs)
    sampling.greedy(logits)
    more = {"top_k": longs.int(), "top_p": ones, "min_p": ones, "mask": torch.zeros(4, 157, dtype=torch.int32)}
    sampling.draw(logits, ones, longs, longs, **more)


def quantized() -> None:
    """Compile batch-invariant and quantized matrix products, and the kernels before and after expert products."""
    _, places, _ = moe.route(torch.zeros(16, dtype=torch.int64), 0, 8)
    moe.combine(torch.zeros(16, 2048, dtype=BF16), places, torch.zeros(2, 8))
    matmul.invariant_linear(torch.zeros(5, 4096, dtype=BF16), torch.zeros(4096, 4096, dtype=BF16))
    for dtype in (BF16, torch.float32):
        stack = torch.zeros(4, 2048, 4096, dtype=dtype)
        matmul.grouped_invariant_linear(torch.zeros(5, 4096, dtype=dtype), stack, torch.zeros(4, dtype=torch.int32))
    codes, rows, ends = torch.zeros(4, 256, 64, dtype=torch.uint8), torch.zeros(256), torch.zeros(4)
    for scales, zeros, by in (
        (torch.zeros(4, 256, 4, dtype=BF16), torch.zeros(4, 256, 4, dtype=torch.uint8), rows.int()),
        (torch.zeros(4, 256, 4, dtype=torch.uint8), None, None),
    ):
        int4.grouped_int4_linear(torch.zeros(5, 128, dtype=BF16), codes, scales, zeros, by, ends.int(), 5)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weight, by = torch.zeros(256, 512).to(dtype), torch.zeros(256, dtype=torch.int32)
        for rows in (1, 5, 300):
            plain = torch.zeros(rows, 512, dtype=BF16)
            more = quantize.Quantized.empty(rows, 512, dtype, plain.device, True)
            norm.add_rms_norm(plain, plain, plain[0], 1e-6, quantized=more)
            activation.gated(plain, plain, "silu", quantized=more)
            codes, scales = quantize.quantize(plain, dtype)
            scaled_linear.scaled_linear(
                codes, scales, weight, torch.zeros(2, 4), by, BF16, tile=128, is_constant=rows == 1
            )
            codes, scales = quantize.quantize(plain, dtype, None)
            scaled_linear.scaled_linear(codes, scales, weight, torch.zeros(256, 1), by, BF16, group=None)
            for each in (plain, plain.float()):
                scaled_linear.scaled_linear(each, None, weight, torch.zeros(2, 4), by, BF16, tile=128)
            codes, scales = quantize.quantize(plain, dtype)
            stacks = weight.expand(4, -1, -1).contiguous(), torch.zeros(4, 2, 4)
            ends = torch.zeros(4, dtype=torch.int32)
            scaled_linear.grouped_scaled_linear(codes, scales, *stacks, by, ends, rows, BF16, tile=128)
            scaled_linear.grouped_scaled_linear(plain, None, *stacks, by, ends, rows, BF16, tile=128)
        for input_group in (128, None):
            scaled_linear.quantizing_linear(plain[:1], weight, torch.zeros(2, 4), by, input_group=input_group, tile=128)
            scaled_linear.quantizing_linear(
                plain[:1], weight, torch.zeros(256, 1), by, input_group=input_group, group=None
            )


if __name__ == "__main__":
    DEPTH, TARGETS = sys.argv[1], [int(word) for word in sys.argv[2:]]
    with (
        patch.object(launch, "check_device"),
        patch.object(step_inputs, "check_device"),
        patch.object(launch, "check_stored"),
        patch.object(paged_decode, "check_stored"),
        patch.object(paged_prefill, "check_stored"),
        patch.object(rope, "check_stored"),
        patch.object(launch, "shared_memory", lambda _: SHARED_KIB[TARGETS[-1]] << 10),
        patch.object(paged_decode, "num_sms", lambda _: 132),
        patch.object(indexer, "num_sms", lambda _: 132),
        patch.object(quantize, "check_stored"),
        patch.object(scaled_linear, "check_stored"),
        patch.object(scaled_linear_few_rows, "num_sms", lambda _: 132),
        patch.object(tap, "num_sms", lambda _: 132),
        patch.object(sketch, "num_sms", lambda _: 132),
        patch.object(JITFunction, "run", compile_as_launched),
    ):
        decode()
        choices()
        prefill()
        if DEPTH == "small":
            sys.exit()
        layers()
        collectives()
        transforms()
        transfers()
        inputs()
        taps()
        sketches()
        draws()
        quantized()
        products()
