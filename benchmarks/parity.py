"""Largest difference of the engine's float32 logits from transformers', by model family; the tests' limit is 1e-4.

    python benchmarks/parity.py [llama gemma3 ...] [--device cuda]

Prints a Markdown table. The models are those of the tests: 2 to 5 layers, hidden size 64, random weights, including
norms and biases. Four prompts of 1 to 35 tokens run in one batch, which generates 12 tokens and crosses attention
windows of 7 to 11 positions. A figure is the largest logit difference, over all positions, prompts and ranks, from
transformers' full forward of the same tokens without a cache. Every token must be transformers' greedy choice,
otherwise the run stops.

Columns: `whole` full prompts in one step, `chunks` at most 5 rows per step, `TP 2` two ranks, `EP 2` two ranks that
shard experts instead of features; the last two run on the CPU only. `logit` is the largest logit of the longest prompt,
as the scale of a difference.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import checkpoints
import moe_checkpoints
from engine_helpers import compare_logits, reference_logits

from tapscope.engine.hf_config.model_config import ModelConfig

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
NUM_NEW = 12
FAMILIES = sorted((*checkpoints.FAMILIES, "qwen3_5", *moe_checkpoints.FAMILIES))


def save(folder: Path, family: str) -> Path:
    """Save the checkpoint that the tests of ``family`` use."""
    if family == "qwen3_5":
        return moe_checkpoints.make_qwen3_5(folder, seed=3)
    make = checkpoints.make_checkpoint if family in checkpoints.FAMILIES else moe_checkpoints.make_moe
    return make(folder, family, seed=3)


def measure(family: str, device: str = "cpu") -> list[str]:
    """Return the cells of a family's row."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "model", family)
        config = ModelConfig.read(path)
        cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (1, {"max_num_batched_tokens": 5})]
        if device == "cpu":
            cases += [(2, {}), (2, {"ep": 2})] if config.moe is not None else [(2, {})]
        found = [compare_logits(path, tp, PROMPTS, NUM_NEW, device=device, **more)[1] for tp, more in cases]
        largest = float(reference_logits(path, PROMPTS[1]).abs().max())
    figures = [f"{each:.1e}" for each in found] + [""] * (4 - len(found))
    return [f"`{family}`", f"`{config.architecture}`", str(config.num_layers), *figures, f"{largest:.1f}"]


def main() -> None:
    """Print one row per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the engine")
    args = parser.parse_args()
    head = ["family", "architecture", "layers", "whole", "chunks", "TP 2", "EP 2", "logit"]
    print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |")
    for family in args.families or FAMILIES:
        print(f"| {' | '.join(measure(family, args.device))} |", flush=True)


if __name__ == "__main__":
    main()
