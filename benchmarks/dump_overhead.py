"""Overhead of a Dumper: CPU time relative to the plain forward of the same round.

    python benchmarks/dump_overhead.py [--seq 128] [--dtype float32] [--rounds 9] [--out DIR ...]

One process, one torch thread, interleaved modes in an order rotated every round, medians. `producer` is the CPU time of
this process (forward, taps, pipeline thread); `total` adds the recorder process. `of copy` is the rate at which payload
bytes left the model, as a fraction of the machine's memory copy rate.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper

MODES: dict[str, dict[str, object] | None] = {
    "plain": None,
    "plain again": None,
    "attached, nothing selected": {"keep": "off"},
    "statistics, every output": {"keep": "off", "rules": ["*:out*=stats"]},
    "statistics, everything": {"keep": "stats"},
    "full, everything": {"keep": "full"},
}


def build(dtype: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def recorder_cpu_s(run: Path) -> float:
    try:
        pid = json.loads((run / "recorder.json").read_text())["pid"]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, KeyError, ValueError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100


def measure(
    model: torch.nn.Module, ids: torch.Tensor, mode: str, out: Path, repeats: int
) -> tuple[float, float, float]:
    """Return producer CPU, total CPU and wall seconds per forward, including draining the pipeline."""
    settings = MODES[mode]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if settings is not None:
            dumper = stack.enter_context(Dumper(model, out, force=True, **settings))
        model(ids)
        if settings is not None:
            dumper.flush()
        recorder, cpu, wall = recorder_cpu_s(out), time.process_time(), time.perf_counter()
        for _ in range(repeats):
            model(ids)
        elapsed = time.perf_counter() - wall
        if settings is not None:
            dumper.flush()
        cpu = time.process_time() - cpu
        recorder = recorder_cpu_s(out) - recorder if settings is not None else 0.0
    return cpu / repeats, (cpu + recorder) / repeats, elapsed / repeats


def copy_rate() -> float:
    source, target = torch.ones(1 << 26, dtype=torch.uint8), torch.ones(1 << 26, dtype=torch.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return source.numel() / min(times)


def captured_bytes(model: torch.nn.Module, ids: torch.Tensor, out: Path) -> int:
    with torch.inference_mode(), Dumper(model, out, force=True, keep="full"):
        model(ids)
    return sum(file.stat().st_size for file in out.rglob("seg-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=9)
    places = [Path("/dev/shm/tapscope-bench"), Path(tempfile.gettempdir()) / "tapscope-bench"]
    parser.add_argument("--out", type=Path, nargs="+", default=places, help="where runs go (default: memory, disk)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rate = copy_rate()
    print(f"12-layer hidden-512 Llama, 1 thread; plain copy {rate / 1e9:.1f} GB/s")
    for dtype in args.dtype:
        model = build(dtype)
        for out in args.out:
            print(f"{dtype}, runs on {out}")
            for seq in args.seq:
                bench(model, seq, out, args.rounds, rate)
            shutil.rmtree(out, ignore_errors=True)


def bench(model: torch.nn.Module, seq: int, out: Path, rounds: int, rate: float) -> None:
    ids = torch.arange(seq)[None] % 1000
    repeats = 2 if seq >= 128 else 6
    nbytes = captured_bytes(model, ids, out)
    taken: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    names = list(MODES)
    for number in range(rounds):
        for mode in names[number % len(names) :] + names[: number % len(names)]:
            taken[mode].append(measure(model, ids, mode, out, repeats))
    plain = [cpu for cpu, _, _ in taken["plain"]]
    print(f"seq {seq}: plain {statistics.median(plain) * 1e3:.1f} ms CPU a forward; {nbytes / 1e6:.1f} MB in full")
    for mode, samples in taken.items():
        ratios = [[s[i] / taken["plain"][n][0 if i < 2 else 2] for n, s in enumerate(samples)] for i in range(3)]
        producer, total, wall = map(statistics.median, ratios)
        line = f"  {mode:<28} producer {producer:5.2f}   total {total:5.2f}   wall {wall:5.2f}"
        if mode.startswith("full"):
            extra = statistics.median(s[0] for s in samples) - statistics.median(plain)
            speed = nbytes / max(extra, 1e-9)
            line += f"   {speed / 1e9:.1f} GB per CPU second, {speed / rate:.0%} of copy"
        print(line, flush=True)


if __name__ == "__main__":
    main()
