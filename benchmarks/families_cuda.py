"""The engine on a GPU against transformers, by family: parity, rounding of bfloat16, and decoding at batch 1 and 8.

    python benchmarks/families_cuda.py [llama qwen3_next ...] [--new 32] [--rounds 2] [--device cpu]

Prints a row for each family. *fp32*: the largest difference of a logit of the tests' small model from transformers'
full forward on the CPU, prompts whole and in chunks (see `parity.py`). The other figures are of the models of
`families_cpu.py` in bfloat16 (hidden size 512, 8 layers, random weights). *bf16*: relative L2 error of the logits of
192 tokens to transformers in float32, divided by that of transformers in bfloat16: 1 is the same rounding. *batch 1*,
*batch 8*: tokens per second, and transformers' generate divided by the engine in time, each the median of rounds that
alternate; above 1 the engine is faster. The first round, which makes graphs and kernels, is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import torch
from engine_cpu import Case, by_engine, cases
from families_cpu import _VOCAB, FAMILIES, save

from tapscope.engine import LLM

DENSE = {"llama": "llama", "qwen3": "qwen3", "mixtral": "mixtral"}
"""Families that `families_cpu.py` does not have, with the settings of Granite."""
MODEL_TYPES = {family.removesuffix("_text"): family for family in FAMILIES} | DENSE
"""Name of a family in the tests -> its model_type."""
for _family in DENSE:
    FAMILIES.setdefault(_family, FAMILIES["granite"])


def rounding(model: Any, folder: Path, device: str) -> float:
    """Error of the engine's logits in bfloat16, relative to that of transformers'; ``model`` is in float32."""
    ids = torch.randint(2, _VOCAB, (1, 192), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact = model.float().to(device)(ids.to(device)).logits[0].cpu()
        theirs = model.bfloat16()(ids.to(device)).logits[0].float().cpu()
    seen: list[torch.Tensor] = []
    with LLM(folder, dtype="bfloat16", device=device, logits="all", max_num_seqs=1, cuda_graphs="off") as llm:
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.float().cpu()))
        llm.generate([ids[0].tolist()], max_new_tokens=1)
    ours = torch.cat(seen)[: len(exact)]
    return float((ours - exact).norm() / (theirs - exact).norm())


def by_generate(model: Any, case: Case, device: str) -> None:
    """One batch of prompts of one length."""
    ids = torch.tensor(case.prompts, device=device)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new[0], do_sample=False, pad_token_id=0
        )


def seconds(run: Callable[[], object], device: str) -> float:
    """How long ``run`` takes, with what it starts on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def speeds(model: Any, folder: Path, args: argparse.Namespace) -> list[str]:
    """A cell for each batch size."""
    every, cells = cases(_VOCAB, args.new), []
    with LLM(folder, dtype="bfloat16", device=args.device, max_num_seqs=8, prefix_cache=False) as llm:
        for batch in (1, 8):
            case = every[f"equal-{batch}"]
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(args.rounds + 1):  # the first warms up
                ours.append(seconds(lambda: by_engine(llm, case), args.device))  # noqa: B023
                theirs.append(seconds(lambda: by_generate(model, case, args.device), args.device))  # noqa: B023
            mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
            cells.append(f"{sum(case.new) / mine:.0f}, {other / mine:.2f}")
    return cells


def cells_or_error(cells: Callable[[], list[str]], count: int) -> list[str]:
    """The cells, or the error in the first of ``count``: the other families go on."""
    try:
        return cells()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this family's result
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:90]}", *[""] * (count - 1)]


def main() -> None:
    """Print a row for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(MODEL_TYPES))
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    torch.set_num_threads(4)
    print("| family | fp32, whole | in chunks | bf16 | batch 1 | batch 8 | seconds |\n|" + " --- |" * 7)
    for family in args.families or MODEL_TYPES:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            cells = cells_or_error(lambda: parity.measure(family, args.device)[3:5], 2)  # noqa: B023
            model = save(MODEL_TYPES[family], Path(name))
            folder = Path(name)
            cells += cells_or_error(lambda: [f"{rounding(model, folder, args.device):.2f}"], 1)  # noqa: B023
            model.bfloat16().to(args.device)
            cells += cells_or_error(lambda: speeds(model, folder, args), 2)  # noqa: B023
        print(f"| `{family}` | {' | '.join(cells)} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
