"""Capture on CUDA: checks every captured tensor under memory pressure, and measures the overhead.

    python benchmarks/cuda_capture.py [--out DIR] [--hidden 8192] [--layers 4] [--tokens 2048]

The model is a bf16 Llama with random weights. First the proof: with ample memory, every freed block is immediately
reused and overwritten while copies of it are still in progress; with almost no free memory, clones must not starve the
model. In a second pass over the same input, independent hooks copy every tensor synchronously; every record must have
the same bytes. Then the cost: the forward's device time (events) and wall time, relative to plain forwards before and
after. The buffers hold everything that one forward produces, so that neither disk nor recorder is measured. Without
full values, back-to-back forwards are measured as well.

Ends with PASS or FAIL.
"""

import argparse
import importlib.util
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda_proof import PROOFS, GiB, prove
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.core import dtypes
from tapscope.dumper import Dumper
from tapscope.dumper.device.d2h_worker import D2HWorker
from tapscope.dumper.device.device import CudaDevice
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.sources import open_run

WARM_UP = 5
_BACK_TO_BACK = 40
MODES: dict[str, dict[str, Any]] = {
    "nothing selected": {"keep": "off"},
    "full, every layer's output": {"keep": "off"},
    "statistics, everything": {"keep": "stats"},
    "statistics, every output": {"keep": "off", "rules": ["*:out*=stats"]},
    "sketches, every output": {"keep": "off", "rules": ["*:out*=sketch"]},
    "full, everything": {"keep": "full"},
    "full, no clones": {"keep": "full", "device_staging_bytes": 0},
}


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 1024 or 1,
        vocab_size=16000,
        max_position_embeddings=args.tokens,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    return model


def pinned_rate() -> float:
    """Return the copy rate from the device into pinned memory in bytes per second, best of ten."""
    source = torch.ones(GiB // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty(GiB // 2, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return source.numel() / min(times)


class Cost(NamedTuple):
    """Medians of one mode, in seconds and bytes per forward."""

    device: float
    """Device time between events."""
    wall: float
    launched: float
    """Time until the CPU had launched all kernels."""
    copied: float = 0.0
    """Time until all bytes were on the host."""
    digested: float = 0.0
    """Time until the bytes were hashed and counted."""
    back_to_back: float = 0.0
    """Wall time of forwards that do not wait for earlier records: the 20th percentile."""
    peak: int = 0
    """Peak device memory."""
    nbytes: int = 0
    num_records: int = 0
    num_direct: float = 0.0
    is_pinned: bool = False


def forward(model: nn.Module, ids: torch.Tensor) -> tuple[float, float, float]:
    """Run one forward; return the seconds between device events, until completion, and until everything is launched."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    first.record()
    model(input_ids=ids, use_cache=False)
    last.record()
    launched = time.perf_counter() - began
    last.synchronize()
    wall = time.perf_counter() - began
    return first.elapsed_time(last) / 1e3, wall, launched


def back_to_back(model: nn.Module, ids: torch.Tensor) -> float:
    """Return the wall seconds of a back-to-back forward: the 20th percentile, because CPUs throttle at times."""
    return statistics.quantiles([forward(model, ids)[1] for _ in range(_BACK_TO_BACK)], n=5)[0]


def drain_of(dumper: Dumper) -> D2HWorker:
    recording = dumper._recording
    assert recording is not None
    return recording.collector.capturer.device.worker()


def is_pinned(drain: D2HWorker) -> bool:
    """Return whether copies go directly to the shared ring; waits up to 30 s for the ring to be pinned."""
    device, deadline = drain._device, time.monotonic() + 30
    assert isinstance(device, CudaDevice)
    while device._pinned is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return device._pinned is not None


def settle(drain: D2HWorker) -> float:
    """Wait until everything is written; return the time (perf_counter) at which every copy had arrived on the host."""
    while drain.staging.num_pending:
        time.sleep(0.0005)
    arrived = time.perf_counter()
    backlog = drain._sink
    assert isinstance(backlog, SendQueue)
    while backlog.in_flight_bytes:
        time.sleep(0.001)
    return arrived


def measure(model: nn.Module, ids: torch.Tensor, name: str, args: argparse.Namespace) -> Cost:
    settings = dict(MODES[name])
    if "layer" in name:
        settings["rules"] = [f"model.layers.{n}:out*=full" for n in range(args.layers)]
    room, out = args.host_gib * GiB, args.out / "price"
    memory = {"queue_bytes": 2 * room, "shm_bytes": room, "block_timeout_s": 60.0}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    samples = []
    with Dumper(model, out, force=True, **memory, **settings) as dumper:
        drain = drain_of(dumper)
        pinned = is_pinned(drain)
        for number in range(WARM_UP + args.rounds):
            began = time.perf_counter()
            sample = forward(model, ids)
            torch.cuda.synchronize()
            copied = time.perf_counter() - began
            digested = settle(drain) - began
            if number >= WARM_UP:
                samples.append((*sample, copied, digested))
        # Back-to-back forwards with full values would be limited by the PCIe bus.
        repeated = 0.0 if "full" in name else back_to_back(model, ids)
        settle(drain)
    peak = torch.cuda.max_memory_allocated()
    run = open_run(out)
    if not (account := run.ledger()).complete and name != "nothing selected":
        raise SystemExit(f"FAIL: {name}: {account.sentences()}")
    step = [record for record in run.records if record.key.step == WARM_UP and record.dtype]
    nbytes = sum(math.prod(record.shape) * dtypes.itemsize(record.dtype) for record in step)
    steps = range(WARM_UP, WARM_UP + args.rounds)
    direct = sum(m.value or 0 for m in run.metrics() if m.name == "num_direct_copies" and m.step in steps)
    device, wall, launched, copied, digested = (statistics.median(column) for column in zip(*samples, strict=True))
    shutil.rmtree(out)
    return Cost(
        device, wall, launched, copied, digested, repeated, peak, nbytes, len(step), direct / args.rounds, pinned
    )


def plain_cost(model: nn.Module, ids: torch.Tensor, rounds: int) -> Cost:
    samples = [forward(model, ids) for _ in range(WARM_UP + rounds)][WARM_UP:]
    device, wall, launched = (statistics.median(column) for column in zip(*samples, strict=True))
    return Cost(device, wall, launched, back_to_back=back_to_back(model, ids))


class Priced(NamedTuple):
    """The cost of one mode, and of plain forwards around it."""

    cost: Cost
    device: float
    """Device seconds of plain forwards, the mean of before and after."""
    wall: float
    back_to_back: float
    """Wall seconds of back-to-back plain forwards, the minimum of before and after."""


def prices(
    model: nn.Module, ids: torch.Tensor, names: Iterable[str], args: argparse.Namespace
) -> Iterator[tuple[str, Priced]]:
    """Measure each mode between plain forwards, whose times drift with the CPU clock."""
    before = plain_cost(model, ids, args.rounds)
    for name in names:
        cost = measure(model, ids, name, args)
        after = plain_cost(model, ids, args.rounds)
        plain = (before.device + after.device) / 2, (before.wall + after.wall) / 2
        yield name, Priced(cost, *plain, min(before.back_to_back, after.back_to_back))
        before = after


def price(model: nn.Module, ids: torch.Tensor, args: argparse.Namespace) -> None:
    rate = pinned_rate()
    torch.cuda.reset_peak_memory_stats()
    plain = plain_cost(model, ids, args.rounds)
    print(
        f"{ids.numel()} tokens: pinned copy {rate / 1e9:.1f} GB/s; plain forward {plain.device * 1e3:.1f} ms on the "
        f"device, {plain.wall * 1e3:.1f} ms wall, launched in {plain.launched * 1e3:.1f} ms; "
        f"peak {torch.cuda.max_memory_allocated() / GiB:.2f} GiB",
        flush=True,
    )
    for name, (cost, device, wall, base) in prices(model, ids, args.only or MODES, args):
        line = f"  {name:<27} device {cost.device / device:6.2f}   wall {cost.wall / wall:6.2f}"
        line += f" of {wall * 1e3:.1f} ms   "
        if cost.back_to_back:
            line += f"back to back {cost.back_to_back / base:5.2f} of {base * 1e3:.1f} ms   "
        line += f"launch {cost.launched * 1e3:6.1f} ms   peak {cost.peak / GiB:.2f} GiB"
        if cost.nbytes:
            speed = cost.nbytes / cost.copied
            line += f"   {cost.num_records} records, {cost.nbytes / 1e9:.3f} GB on the host at {speed / 1e9:.1f} GB/s"
            line += (
                f" = {speed / rate:.0%} of the pinned copy, digested at {cost.nbytes / cost.digested / 1e9:.1f} GB/s"
            )
            line += f", {cost.num_direct:.0f} without a clone" + ("" if cost.is_pinned else ", ring not page-locked")
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-gib", type=int, default=12, help="host memory for the records of one forward")
    parser.add_argument("--out", type=Path, default=Path("/tmp/tapscope-cuda"))
    parser.add_argument(
        "--only", choices=MODES, action="append", help="measure only the cost of these modes, without the proof"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("FAIL: no CUDA device here")
        return 1
    model = build(args)
    ids = torch.arange(args.tokens, device="cuda")[None] % 16000
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {args}", flush=True)
    wrong: list[str] = []
    with torch.inference_mode():
        for room, settings in () if args.only else PROOFS:
            wrong += prove(model, ids, args, room, **settings)
        price(model, ids, args)
        price(model, ids[:, :16], args)
    shutil.rmtree(args.out, ignore_errors=True)
    loaded = [name for name in ("polars", "fastapi", "textual") if name in sys.modules]
    there = {name: importlib.util.find_spec(name) is not None for name in ("polars", "fastapi", "textual")}
    print(f"loaded of polars, fastapi, textual: {loaded or 'none'}; installed: {json.dumps(there)}")
    wrong += [f"{name} was loaded" for name in loaded]
    print("FAIL" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
