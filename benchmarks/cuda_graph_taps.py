"""Overhead of taps inside CUDA graphs: a decode step of the engine with and without them, on one GPU.

    python benchmarks/cuda_graph_taps.py [--shape qwen3-0.6b] [--batch 32] [--new 96]

Random weights in bf16, prompts of 128 tokens. Each mode is an engine of its own: no observer, an observer that selects
nothing, statistics or sketches of every output, every layer's output in full, statistics of every output without
graphs. A step is the median time between two steps that decode all requests; the ratio is to the engine without an
observer.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

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
    """Seconds between two steps that decode ``batch`` requests, the median."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(_SHAPES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--only", choices=MODES, action="append", help="these, and the first")
    args = parser.parse_args()
    print(f"{args.shape}, batch {args.batch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = _SHAPES[args.shape]()
        config.dtype = torch.bfloat16
        config.architectures = [{"llama-8b": "LlamaForCausalLM"}.get(args.shape, "Qwen3ForCausalLM")]
        config.save_pretrained(path / "model")
        base = None
        for number, (name, (settings, more)) in enumerate(MODES.items()):
            if number and args.only and name not in args.only:
                continue
            out = path / f"run{number}"
            observer = settings and functools.partial(make_observer, out=str(out), config=DumperConfig(**settings))
            with LLM(
                path / "model",
                device="cuda",
                load_format="dummy",
                kv_cache_memory_bytes=4 << 30,
                max_num_seqs=args.batch,
                observer=observer,
                **more,
            ) as llm:
                measure(llm, args.batch, 8)
                step = min(measure(llm, args.batch, args.new) for _ in range(2))
            base = base or step
            values = ""
            if settings and settings["keep"] == "off" and settings.get("rules"):
                run = open_run(out)
                last = max(record.key.step for record in run.records)
                count = sum(record.key.step == last for record in run.records)
                extra = (step - base) / max(count, 1) * 1e6
                state = "; ".join(run.ledger().sentences()) or "complete"
                values = f"{count} values a step, {extra:.1f} us a value; {state}"
            print(f"{name:38} {step * 1e3:7.3f} ms  {step / base:5.2f}  {values}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
