"""Steps with prompts on one GPU: kernel by kernel, and as CUDA graphs (`cuda_graphs="all"`).

    python benchmarks/prefill_graphs_cuda.py [--shape qwen3-0.6b] [--tokens 16 128 512] [--mixed 31x1024] [--serve 96]

Random weights in a real model's shape, bf16. A row is one step, repeated by the model runner without a scheduler: wall
time from launch until the token is on the host, the part until everything is launched, and the device's busy time;
medians in milliseconds. ``n`` is a prompt of n tokens; ``31x1024+128`` are 31 decoding requests with a context of 1,024
and a chunk of 128 tokens after a cached prefix of 512.

``--serve n``: n requests of 64 to 256 tokens, 32 of them at a time, generate 16 to 48 tokens each.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_cuda import _SHAPES
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan

PAGE, PAGES = 16, 4500


def write_config(shape: str, folder: Path) -> None:
    """Write the config.json of a checkpoint without weights."""
    config = _SHAPES[shape]()
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.eos_token_id = None
    config.max_position_embeddings = 32768
    config.save_pretrained(folder)


def request(row: int, position: int, count: int) -> ScheduledRequest:
    """Return a scheduled request with ``count`` rows from ``position`` on, in its own pages."""
    end = position + count
    return ScheduledRequest(
        request=str(row),
        row=row,
        position=position,
        visits=((count, 0),),
        tokens=tuple((7 * i + row) % 250 for i in range(count)),
        pages=tuple((row * 65 + i) % PAGES for i in range(-(-end // PAGE))),
        prompt_length=end,
    )


def steps(tokens: list[int], mixed: list[str]) -> Iterator[tuple[str, StepPlan]]:
    for count in tokens:
        yield str(count), plan_of([request(0, 0, count)])
    for each in mixed:
        count, context = map(int, each.split("x"))
        decoding = [request(row, context - 1, 1) for row in range(count)]
        yield f"{each}+128", plan_of([*decoding, request(count, 512, 128)])


def plan_of(scheduled: list[ScheduledRequest]) -> StepPlan:
    return StepPlan(step=0, phase="mixed", scheduled=tuple(scheduled), kv_pages_used=0)


def once(runner: Any, plan: StepPlan) -> tuple[float, float]:
    """Run one step; return the milliseconds until launched, and until the token is on the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launched = runner.launch(plan)
    middle = time.perf_counter()
    runner.collect(launched)
    end = time.perf_counter()
    runner.finish(plan)
    return 1e3 * (middle - began), 1e3 * (end - began)


def logits(runner: Any, plan: StepPlan) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = runner.forward(plan)
    return found.float()


def busy(runner: Any, plan: StepPlan, count: int = 2, pause: float = 0.0) -> tuple[float, int]:
    """Return the device's busy milliseconds (compute and copies) and its number of operations per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            once(runner, plan)
            time.sleep(pause)
    events = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    total, last = 0.0, 0.0
    for start, end in sorted((each.time_range.start, each.time_range.end) for each in events):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total / count / 1e3, len(events) // count


def measure(runner: Any, plan: StepPlan, rounds: int) -> str:
    for _ in range(2):
        once(runner, plan)
    times = [once(runner, plan) for _ in range(rounds)]
    launch, wall = (statistics.median(each) for each in zip(*times, strict=True))
    least = min(wall for _, wall in times)
    device, count = busy(runner, plan)
    return f"wall {wall:6.2f} (least {least:6.2f})  launched {launch:6.2f}  device {device:6.2f} ({count:4} ops)"


def use(runner: Any, graphs: Any) -> None:
    """Compute steps with prompts through ``graphs``, or eagerly if None."""
    if runner.graphs is not None:
        runner.graphs.prefill = graphs


def compare_steps(runner: Any, graphs: Any, args: argparse.Namespace) -> None:
    for name, plan in steps(args.tokens, args.mixed):
        use(runner, None)
        eager = logits(runner, plan)
        print(f"{name:>14} eager {measure(runner, plan, args.rounds)}", flush=True)
        if graphs is None:
            continue
        free, _ = torch.cuda.mem_get_info()
        use(runner, graphs)
        first = once(runner, plan)[1]
        size = (free - torch.cuda.mem_get_info()[0]) / 2**20
        error = float((logits(runner, plan) - eager).norm() / eager.norm())
        tail = f"  first {first:6.1f}, {size:.0f} MiB; logits differ by {error:.1e}"
        if args.pause:
            tail += f"; device after pauses {busy(runner, plan, 4, args.pause)[0]:.2f}"
        print(f"{name:>14} graph {measure(runner, plan, args.rounds)}{tail}", flush=True)


def serve(llm: LLM, count: int) -> str:
    draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(1))
    prompts = [draw(0, 250, (int(draw(64, 257, ())),)).tolist() for _ in range(count)]
    asked = [SamplingParams(max_new_tokens=int(draw(16, 49, ())), ignore_eos=True) for _ in range(count)]
    began = time.perf_counter()
    found = llm.generate(prompts, asked)
    seconds = time.perf_counter() - began
    tokens = sum(len(each.token_ids) for each in found)
    return f"{seconds:.2f} s, {tokens / seconds:.0f} tok/s generated, {count / seconds:.1f} requests/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 64, 128, 200, 256, 512, 1024, 2048])
    parser.add_argument("--mixed", nargs="*", default=["31x1024", "1x8192", "31x4096"], metavar="NxCONTEXT")
    parser.add_argument("--serve", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0, help="also time graphs with pauses of N seconds")
    parser.add_argument("--limit", type=int, help="tokens of the largest graph; default: the engine's")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    args = parser.parse_args()
    from tapscope.engine.execution import cuda_graph_manager

    if args.limit:
        cuda_graph_manager.max_prefill_tokens = lambda model: args.limit  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / args.shape
        write_config(args.shape, folder)
        began = time.perf_counter()
        more: Any = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 32, "num_pages": PAGES}
        more |= {"cuda_graphs": "all", "prefix_cache": False} | dict(each.split("=", 1) for each in args.settings)
        with LLM(folder, load_format="dummy", **more) as llm:
            runner: Any = llm.engine.runner
            graphs, decode = (None, None) if runner.graphs is None else (runner.graphs.prefill, runner.graphs.decode)
            sizes = [0.0 if each is None else each.num_bytes / 2**20 for each in (graphs, decode)]
            print(
                f"{args.shape}: start {time.perf_counter() - began:.1f} s; graphs with prompts up to "
                f"{graphs and graphs.sizes[-1]} tokens, {sizes[0]:.0f} MiB at start; of decoding {sizes[1]:.0f} MiB",
                flush=True,
            )
            compare_steps(runner, graphs, args)
            for name in ("first", "eager", "graph", "eager", "graph") if args.serve else ():
                use(runner, None if name == "eager" else graphs)
                print(f"{name:>14} serving {serve(llm, args.serve)}", flush=True)


if __name__ == "__main__":
    main()
