"""Steps with prompts on one GPU, eagerly and as CUDA graphs (`cuda_graphs="all"`): what a step costs and what it waits for.

    python benchmarks/prefill_graphs_cuda.py [--shape qwen3-0.6b] [--tokens 16 64 128 256 512 1024] [--mixed 31]

Random weights of a real model's shape, bf16. Each line is one step, run again and again by the model runner without a
scheduler: wall time from the launch to its token on the host, the part of it until everything was launched, and the time
in which the device was busy; medians. ``n`` is a prompt of n tokens; ``31x1024+128`` are 31 decoding requests with a
context of 1,024 and a chunk of 128 tokens after a cached prefix of 512.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_cuda import _SHAPES
from tapscope.engine import LLM
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan

PAGE = 16


def request(row: int, position: int, count: int, num_pages: int) -> ScheduledRequest:
    """``count`` rows from ``position`` on, in pages of its own."""
    needed = -(-(position + count) // PAGE)
    pages = tuple((row * 65 + i) % num_pages for i in range(needed))
    tokens = tuple((7 * i + row) % 250 for i in range(count))
    return ScheduledRequest(
        request=str(row),
        row=row,
        position=position,
        visits=((count, 0),),
        tokens=tokens,
        pages=pages,
        prompt_length=position + count,
    )


def write_config(shape: str, folder: Path) -> None:
    """The config.json of a checkpoint without weights."""
    config = _SHAPES[shape]()
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.eos_token_id = None
    config.max_position_embeddings = 32768
    config.save_pretrained(folder)


def plan_of(scheduled: list[ScheduledRequest]) -> StepPlan:
    return StepPlan(step=0, phase="prefill", scheduled=tuple(scheduled), kv_pages_used=0)


def once(runner: Any, plan: StepPlan) -> tuple[float, float]:
    """Milliseconds until launched, and until the token is on the host."""
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
        found: torch.Tensor = runner._logits(plan)
    return found.float()


def busy(runner: Any, plan: StepPlan, count: int = 3) -> tuple[float, int]:
    """Milliseconds in which the device computed or copied, and its operations, of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            once(runner, plan)
    events = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((each.time_range.start, each.time_range.end) for each in events)
    total, last = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total / count / 1e3, len(spans) // count


def measure(runner: Any, plan: StepPlan, rounds: int) -> str:
    for _ in range(3):
        once(runner, plan)
    times = [once(runner, plan) for _ in range(rounds)]
    launch, wall = (statistics.median(each) for each in zip(*times, strict=True))
    device, count = busy(runner, plan)
    return f"wall {wall:6.2f}  launched {launch:6.2f}  device {device:6.2f} ({count:4} ops)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 64, 128, 200, 256, 512, 1024, 2048])
    parser.add_argument("--mixed", nargs="*", default=["31x1024", "1x8192", "1x16384", "31x4096"], metavar="NxCONTEXT")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-graph", type=int, default=2048, help="tokens of the largest graph")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    from tapscope.engine.execution import model_runner

    model_runner.MAX_PREFILL_TOKENS = args.max_graph
    steps = {str(count): lambda pages, count=count: plan_of([request(0, 0, count, pages)]) for count in args.tokens}
    for each in args.mixed:
        count, context = map(int, each.split("x"))
        steps[f"{each}+128"] = lambda pages, count=count, context=context: plan_of(
            [*(request(row, context - 1, 1, pages) for row in range(count)), request(count, 512, 128, pages)]
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / args.shape
        write_config(args.shape, folder)
        began = time.perf_counter()
        more: Any = {"dtype": "bfloat16", "device": args.device, "max_num_seqs": 64, "num_pages": 4500}
        more |= {"cuda_graphs": "all"} | dict(each.split("=", 1) for each in args.settings)
        with LLM(folder, load_format="dummy", **more) as llm:
            runner: Any = llm.engine.runner
            graphs = runner._prefill_graphs
            megabytes = [0 if each is None else each.num_bytes / 2**20 for each in (graphs, runner._graphs)]
            print(
                f"{args.shape}: start {time.perf_counter() - began:.1f} s; graphs with prompts {megabytes[0]:.0f} MiB at "
                f"start, of decoding {megabytes[1]:.0f} MiB"
            )
            for name, build in steps.items():
                plan = build(4500)
                runner._prefill_graphs = None
                eager = logits(runner, plan)
                print(f"{name:>14} eager {measure(runner, plan, args.rounds)}", flush=True)
                if graphs is None:
                    continue
                free, _ = torch.cuda.mem_get_info()
                runner._prefill_graphs = graphs
                first = once(runner, plan)[1]
                size = (free - torch.cuda.mem_get_info()[0]) / 2**20
                error = float((logits(runner, plan) - eager).norm() / eager.norm())
                tail = f"  first {first:6.1f}, {size:.0f} MiB; logits differ by {error:.1e}"
                print(f"{name:>14} graph {measure(runner, plan, args.rounds)}{tail}", flush=True)


if __name__ == "__main__":
    main()
