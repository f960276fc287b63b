"""Overhead of taps inside CUDA graphs: a decode step of the engine with and without taps, on one GPU.

    python benchmarks/cuda_graph_taps.py [--shape qwen3-0.6b] [--batch 32] [--new 96]

Random weights in bf16, prompts of 128 tokens. Each mode has its own engine: no observer, an observer that selects
nothing, statistics or sketches of every output, every layer's output in full, and statistics of every output without
graphs. The step time is the median interval between two steps that decode all requests; the ratio is to the engine
without an observer.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_cuda import _SHAPES

from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.sources import open_run

MODES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no observer": (None, {}),
    "nothing selected": ({"keep": "off"}, {}),
    "statistics, every output": ({"keep": "off", "rules": ("*:out=stats", "*:out[*]=stats")}, {}),
    "sketches, every output": ({"keep": "off", "rules": ("*:out=sketch", "*:out[*]=sketch")}, {}),
    "full, every layer's output": (
        {"keep": "off", "rules": ("model.layers.?:out=full", "model.layers.??:out=full")},
        {},
    ),
    "statistics, every output, no graphs": (
        {"keep": "off", "rules": ("*:out=stats", "*:out[*]=stats")},
        {"cuda_graphs": "off"},
    ),
}


def measure(llm: LLM, batch: int, new: int) -> float:
    """Return the median seconds between two steps that decode ``batch`` requests."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for i in range(batch):
        llm.submit([(7 * i + j) % 1000 + 5 for j in range(128)], params)
    times: list[float] = []
    last = None
    while llm.has_work:
        done = llm.step()
        now = time.perf_counter()
        if last is not None and not done:
            times.append(now - last)
        last = now
    return statistics.median(times[len(times) // 3 :])


def save_config(shape: str, folder: Path) -> Path:
    """Save the config of a shape in ``folder / "model"``, enough for ``load_format="dummy"``; return that path."""
    config = _SHAPES[shape]()
    config.dtype = torch.bfloat16
    config.architectures = [{"llama-8b": "LlamaForCausalLM"}.get(shape, "Qwen3ForCausalLM")]
    config.save_pretrained(folder / "model")
    return folder / "model"


class Step(NamedTuple):
    """Decode step of one mode."""

    seconds: float
    num_values: int = 0
    """Records per step."""
    state: str = ""
    """Data loss as reported by the run; ``complete`` if nothing was lost."""


def step_of(model: Path, mode: str, batch: int, new: int, out: Path) -> Step:
    """Measure the decode step of one mode in its own engine: the smaller of two medians."""
    settings, more = MODES[mode]
    observer = settings and functools.partial(make_observer, out=str(out), config=DumperConfig(**settings))
    with LLM(
        model,
        device="cuda",
        load_format="dummy",
        kv_cache_memory_bytes=4 << 30,
        max_num_seqs=batch,
        observer=observer,
        **more,
    ) as llm:
        measure(llm, batch, 8)
        seconds = min(measure(llm, batch, new) for _ in range(2))
    torch.cuda.empty_cache()
    if not (settings and settings.get("rules")):
        return Step(seconds)
    run = open_run(out)
    last = max(record.key.step for record in run.records)
    count = sum(record.key.step == last for record in run.records)
    return Step(seconds, count, "; ".join(run.ledger().sentences()) or "complete")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(_SHAPES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--only", choices=MODES, action="append", help="measure only these modes and the first one")
    args = parser.parse_args()
    print(f"{args.shape}, batch {args.batch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model, base = save_config(args.shape, path), 0.0
        for number, name in enumerate(MODES):
            if number and args.only and name not in args.only:
                continue
            step = step_of(model, name, args.batch, args.new, path / f"run{number}")
            base = base or step.seconds
            values = ""
            if step.num_values:
                extra = (step.seconds - base) / step.num_values * 1e6
                values = f"{step.num_values} values a step, {extra:.1f} us a value; {step.state}"
            print(f"{name:38} {step.seconds * 1e3:7.3f} ms  {step.seconds / base:5.2f}  {values}", flush=True)


if __name__ == "__main__":
    main()
