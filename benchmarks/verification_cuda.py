"""A step that verifies drafts against a plain step, on one GPU: 1 and 4 rows per request in CUDA graphs.

    python benchmarks/verification_cuda.py [--shape llama-8b] [--layers N] [--batch 1 8] [--context 1024] [--rounds 5]

Random weights in a real model's shape in bf16. No request progresses: the same step is computed repeatedly, from the
host's plan to the tokens on the host (*step*), and its graph alone is replayed (*graph*, device time). Rounds of all
variants are interleaved; medians. *apart* is the same step where each row reads the keys and values separately.
`--kernels` prints the device time of the kernels in both steps.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_cuda import _SHAPES, setting
from torch.profiler import ProfilerActivity, profile

from tapscope.engine import LLM
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan


def step_of(batch: int, rows: int, context: int, page_size: int) -> StepPlan:
    """Return a step with ``rows`` rows per request at position ``context``, all but the first being drafts."""
    pages = -(-(context + rows) // page_size)
    scheduled = tuple(
        ScheduledRequest(
            request=str(number), row=number, position=context, visits=((rows, 0),),
            tokens=tuple(range(5, 5 + rows)), pages=tuple(range(number * pages, (number + 1) * pages)),
            num_drafts=rows - 1, num_logits=rows, prompt_length=context,
        )
        for number in range(batch)
    )  # fmt: skip
    return StepPlan(step=0, phase="decode", scheduled=scheduled, kv_pages_used=batch * pages)


def wall_ms(run: Callable[[], object], calls: int = 10) -> float:
    """Return the median wall milliseconds of a call."""
    taken = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def device_ms(run: Callable[[], object], calls: int = 10) -> float:
    """Return the device milliseconds per call, averaged over consecutive calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def kernels_of(run: Callable[[], object]) -> Counter[str]:
    """Return the device microseconds per call, by kernel."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in seen.key_averages():
        found[event.key[:60]] += event.self_device_time_total / 5
    return found


def main() -> None:
    """Print one row per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, default=4, help="rows per request in a verification step")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    args = parser.parse_args()
    config = _SHAPES[args.shape]()
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": max(args.batch)}
    settings |= {"load_format": "dummy", "num_pages": max(args.batch) * (-(-(args.context + args.rows) // 16) + 1)}
    settings |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": args.rows} | dict(args.set)
    torch.set_num_threads(max(torch.get_num_threads(), 8))  # speeds up weight initialization
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        began = time.perf_counter()
        with LLM(folder, **settings) as llm, torch.inference_mode():
            started = time.perf_counter() - began
            print(f"{args.shape} on {torch.cuda.get_device_name()}, context {args.context}, start {started:.0f} s")
            runner = llm.engine.runner
            assert runner.graphs is not None
            graphs = runner.graphs.decode

            def run(plan: StepPlan) -> None:
                runner.execute(plan)
                runner.finish(plan)

            size = llm.engine.config.page_size
            plans = {b: [step_of(b, r, args.context, size) for r in (1, args.rows)] for b in args.batch}
            found: dict[tuple[int, str], list[float]] = {}
            for number in range(args.rounds):
                for way in ("apart", "together"):
                    graphs.max_request_rows = args.rows if way == "together" else 1
                    graphs.capture()
                    graphs.max_request_rows = args.rows
                    for batch, (plain, verification) in plans.items():
                        for name, plan in (("plain", plain), (way, verification)):
                            step = wall_ms(lambda: run(plan))  # noqa: B023
                            graph = device_ms(lambda: graphs.run(plan))  # noqa: B023
                            found.setdefault((batch, f"{name} step"), []).append(step)
                            found.setdefault((batch, f"{name} graph"), []).append(graph)
                            if args.kernels and not number:
                                most = kernels_of(lambda: run(plan)).most_common(9)  # noqa: B023
                                told = "; ".join(f"{kernel} {micros:.0f}" for kernel, micros in most)
                                print(f"batch {batch} {name}: {told}", flush=True)
            for batch in args.batch:
                ms = {name: statistics.median(taken) for (b, name), taken in found.items() if b == batch}
                told = ", ".join(f"{name} {value:.3f}" for name, value in ms.items())
                ratios = ", ".join(
                    f"{way} {kind} {ms[f'{way} {kind}'] / ms[f'plain {kind}']:.3f}"
                    for way in ("apart", "together")
                    for kind in ("step", "graph")
                )
                print(f"batch {batch}: ms {told}; relative to plain: {ratios}", flush=True)


if __name__ == "__main__":
    main()
