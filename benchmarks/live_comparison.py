"""Cost of `--against`: CPU time of the forward's thread with a live comparison, relative to full capture without.

    python benchmarks/live_comparison.py [--layers 4] [--hidden 256] [--tokens 256] [--rounds 15] [--profile]

A Llama with random weights, the same 256 tokens in every step. The reference is the fp32 run. Each round captures four
plain and four compared steps, interleaved in one process; medians of the rounds. In the first step of a run, all sites
are new; in later steps, a plain capture takes its fast path.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper

_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--layers", 4), ("--hidden", 256), ("--tokens", 256), ("--rounds", 15)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument(
        "--profile", action="store_true", help="print the functions of the bf16 comparison by self time"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4096,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 4096, (1, args.tokens))
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        reference = str(folder / "reference")
        with Dumper(model, reference, keep="full") as dumper:
            for _ in range(_STEPS):
                with dumper.step():
                    model(ids)
        for dtype in (torch.float32, torch.bfloat16):
            model = model.to(dtype)
            label = f"{str(dtype).removeprefix('torch.')} against float32"
            print(f"{label:26} {_measure(model, ids, folder, reference, args.rounds)}")
        if args.profile:
            _profile(model, ids, folder, reference, args.rounds)


def _measure(model: LlamaForCausalLM, ids: torch.Tensor, folder: Path, reference: str, rounds: int) -> str:
    first: list[list[float]] = [[], []]  # ms, plain and compared
    later: list[list[float]] = [[], []]
    verdict = ""
    for i in range(rounds + 2):
        for j, against in enumerate((None, reference)):
            out = folder / f"run-{i}-{j}"
            with Dumper(model, out, keep="full", force=True, against=against) as dumper:
                spent = []
                for _ in range(_STEPS):
                    begin = time.thread_time()
                    with dumper.step():
                        model(ids)
                    spent.append((time.thread_time() - begin) * 1e3)
            if dumper.comparison is not None:
                verdict = str(dumper.comparison).replace(str(folder), "")
            if i >= 2:
                first[j].append(spent[0])
                later[j].append(statistics.median(spent[1:]))
    return f"first step {_ratio(*first)}; later {_ratio(*later)}; {verdict}"


def _ratio(plain: list[float], compared: list[float]) -> str:
    ratio = statistics.median(b / a for a, b in zip(plain, compared, strict=True))
    return f"{ratio:.2f}x {statistics.median(plain):.1f} -> {statistics.median(compared):.1f} ms"


def _profile(model: LlamaForCausalLM, ids: torch.Tensor, folder: Path, reference: str, rounds: int) -> None:
    profile = cProfile.Profile()
    for _ in range(rounds):
        with Dumper(model, folder / "profiled", keep="full", force=True, against=reference) as dumper:
            profile.enable()
            with dumper.step():
                model(ids)
            profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
