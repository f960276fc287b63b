"""The engine on a CPU against transformers' generate and generate_batch: same weights, interleaved.

    python benchmarks/engine_cpu.py [--shape 29m] [--dtype float32] [--case equal-8 ragged] [--new 64] [--rounds 3]

One process, one torch thread, random weights. Cases: `equal-N` N prompts of one length (transformers' best case),
`ragged` prompts and outputs of very different lengths (transformers pads, and continues to the longest), `shared` 16
prompts with a common prefix of 448 tokens. A ratio is transformers' time over the engine's, for CPU and wall time:
above 1, the engine is faster. Median of rounds; the number of equal outputs is printed (bf16 rounds differently).

`generate_batch` creates its manager and cache in each call, which is included in its time; the cache is sized to hold
exactly the case (by default it takes most of the memory). Then the same engine is measured at batch 8 with the dumper
attached, capture off and statistics of everything, over the engine without it: above 1, the dumper costs time; "again"
is the noise.
"""

import argparse
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config

from tapscope.dumper import DumperConfig, make_observer
from tapscope.engine import LLM
from tapscope.kernels.native import backend

_SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 512},
    "29m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 4096},
}


@dataclass(frozen=True)
class Case:
    """The requests that both engines complete."""

    prompts: list[list[int]]
    new: list[int]


def cases(vocab: int, new: int) -> dict[str, Case]:
    dice = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [dice.randrange(2, vocab) for _ in range(length)]

    found = {f"equal-{count}": Case([prompt(64) for _ in range(count)], [new] * count) for count in (1, 8, 32)}
    lengths = [(dice.randint(8, 128), dice.randint(new // 8, new)) for _ in range(16)]
    found["ragged"] = Case([prompt(length) for length, _ in lengths], [count for _, count in lengths])
    start = prompt(448)
    found["shared"] = Case([start + prompt(16) for _ in range(16)], [new // 8] * 16)
    return found


def save(shape: str, dtype: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        **_SHAPES[shape], num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def by_engine(llm: LLM, case: Case) -> list[list[int]]:
    llm.engine.scheduler.flush()
    names = [
        llm.submit(prompt, max_new_tokens=count, ignore_eos=True)
        for prompt, count in zip(case.prompts, case.new, strict=True)
    ]
    done = {}
    while llm.has_work:
        done |= {generation.request: list(generation.token_ids) for generation in llm.step()}
    return [done[name] for name in names]


@torch.no_grad()
def by_generate(model: Any, case: Case) -> list[list[int]]:
    """Generate with one padded batch, up to the longest output."""
    longest = max(map(len, case.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in case.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in case.prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max(case.new), do_sample=False, pad_token_id=0)
    return [row[longest : longest + count].tolist() for row, count in zip(out, case.new, strict=True)]


@torch.no_grad()
def by_generate_batch(model: Any, case: Case) -> list[list[int]]:
    """Generate with transformers' continuous batching; all outputs are as long as the longest, and the cache just holds
    them."""
    config = GenerationConfig(max_new_tokens=max(case.new), do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = sum(-(-(len(prompt) + max(case.new)) // 256) for prompt in case.prompts) + 8
    room = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)
    out = model.generate_batch(
        inputs=case.prompts, generation_config=config, continuous_batching_config=room, progress_bar=False
    )
    answers = [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]
    return [answer[:count] for answer, count in zip(answers, case.new, strict=True)]


Way = Callable[[], list[list[int]]]


def timed(run: Way) -> tuple[float, float, list[list[int]]]:
    cpu, wall = time.process_time(), time.perf_counter()
    ids = run()
    return time.process_time() - cpu, time.perf_counter() - wall, ids


def in_turn(ways: dict[str, Way], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Return the median CPU and wall seconds of each implementation, and its outputs; the order rotates each round."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    ids: dict[str, list[list[int]]] = {}
    names = list(ways)
    for turn in range(rounds):
        for way in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall, ids[way] = timed(ways[way])
            taken[way].append((cpu, wall))
    middle = {way: [statistics.median(column) for column in zip(*times, strict=True)] for way, times in taken.items()}
    return middle, ids


def compare(name: str, case: Case, ways: dict[str, Way], rounds: int) -> None:
    middle, ids = in_turn(ways, rounds)
    cpu, wall = middle["engine"]
    said = [f"{name:<9} engine {sum(case.new) / cpu:7.0f} tok/s"]
    for way in list(ways)[1:]:
        same = sum(a == b for a, b in zip(ids["engine"], ids[way], strict=True))
        ratios = f"{middle[way][0] / cpu:5.2f} cpu {middle[way][1] / wall:5.2f} wall"
        said.append(f"{way} / engine {ratios}, {same}/{len(case.prompts)} answers equal")
    print("; ".join(said), flush=True)


def compare_observed(folder: Path, dtype: str, llm: LLM, case: Case, rounds: int) -> None:
    """Print the overhead of the dumper at batch 8, in CPU time of this process, without its recorder."""
    with ExitStack() as stack:
        ways: dict[str, Way] = {"without the dumper": partial(by_engine, llm, case)}
        ways["without it, again"] = ways["without the dumper"]
        for way, keep in (("attached, capture off", "off"), ("statistics everywhere", "stats")):
            observer = partial(make_observer, out=str(folder / keep), config=DumperConfig(keep=keep))
            watched = stack.enter_context(LLM(folder, dtype=dtype, device="cpu", observer=observer))
            ways[way] = partial(by_engine, watched, case)
            ways[way]()  # warm-up: taps and the recorder start slowly
        middle, _ = in_turn(ways, rounds)
    cpu, wall = middle["without the dumper"]
    for way in list(middle)[1:]:
        print(f"{way:<21} {middle[way][0] / cpu:5.3f} cpu {middle[way][1] / wall:5.3f} wall of the time without it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="29m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--case", nargs="*", choices=("equal-1", "equal-8", "equal-32", "ragged", "shared"))
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generate-batch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--observed", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # requests psutil, which is not needed
    folder = Path(tempfile.mkdtemp(prefix="engine-cpu-"))
    model = save(args.shape, args.dtype, folder)
    print(f"{args.shape} {args.dtype}, one thread, torch {torch.__version__}, kernels: {backend()[0]}")
    with LLM(folder, dtype=args.dtype, device="cpu") as llm:
        every = cases(_SHAPES[args.shape]["vocab_size"], args.new)
        for name in args.case or every:
            case = every[name]
            ways: dict[str, Way] = {
                "engine": partial(by_engine, llm, case),
                "generate": partial(by_generate, model, case),
            }
            if args.generate_batch:
                ways["generate_batch"] = partial(by_generate_batch, model, case)
            compare(name, case, ways, args.rounds)
        if args.observed:
            compare_observed(folder, args.dtype, llm, every["equal-8"], args.rounds)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
