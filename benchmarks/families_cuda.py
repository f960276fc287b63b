"""The engine on a GPU against transformers, by family: parity, rounding of bfloat16, and decoding at batch 1 and 8.

    python benchmarks/families_cuda.py [llama qwen3_next ...] [--new 32] [--rounds 1] [--workers 8] [--timings]

Prints a row for each family. *fp32*: the largest difference of a logit of the tests' small model from transformers'
full forward on the CPU, prompts whole and in chunks (see `parity.py`). *graphs*: answers of the same model that are the
same with CUDA graphs, or `none` if it has no graphs. The other figures are of the models of `families_cpu.py` in
bfloat16 (hidden size 512, 8 layers, random weights). *bf16*: relative L2 error of the logits of 192 tokens to
transformers in float32, divided by that of transformers in bfloat16: 1 is the same rounding. *batch 1*, *batch 8*:
tokens per second, and transformers' generate divided by the engine in time, each a median: in a round there are three
runs of the engine and one of generate, after a run of both that is not counted. Above 1 the engine is faster.

Families that the installed transformers computes otherwise than 5.23 are compared with the engine on the CPU, marked *.
Parity and rounding of all families come first, in `--workers` processes; nothing else runs during timings.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import parity
import torch
import transformers
from engine_cpu import Case, by_engine, cases
from engine_helpers import ThreadRanks, compare_logits
from families_cpu import _VOCAB, FAMILIES, save
from packaging.version import Version
from transformers import AutoModelForCausalLM

from tapscope.engine import LLM

DENSE = {"llama": "llama", "qwen3": "qwen3", "mixtral": "mixtral"}
"""Families that `families_cpu.py` does not have, with the settings of Granite."""
MODEL_TYPES = {family.removesuffix("_text"): family for family in FAMILIES} | DENSE
"""Name of a family in the tests -> its model_type."""
for _family in DENSE:
    FAMILIES.setdefault(_family, FAMILIES["granite"])
OTHERWISE = (
    ("bamba", "gemma3n", "gpt_oss", "mamba2", "minimax_m2")
    if Version(transformers.__version__) < Version("5.23")
    else ()
)
"""Families that this transformers computes otherwise than 5.23."""


def logits_of(folder: Path, dtype: str, device: str, prompt: list[int]) -> torch.Tensor:
    """The engine's logits [tokens, vocab] of a prompt, without a graph."""
    seen: list[torch.Tensor] = []
    with LLM(folder, dtype=dtype, device=device, logits="all", max_num_seqs=1, cuda_graphs="off") as llm:
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.float().cpu()))
        llm.generate([prompt], max_new_tokens=1)
    return torch.cat(seen)[: len(prompt)]


def differences(family: str, device: str, folder: Path) -> list[str]:
    """The cells of float32: whole, in chunks, and with graphs."""
    path = parity.save(folder / "model", family)
    settings = ({}, {"max_num_batched_tokens": 5})
    if family in OTHERWISE:
        found, answers = against_cpu(path, device, settings)
        figures = [f"{each:.1e}*" for each in found]
    else:
        more = {"device": device, "cuda_graphs": "off"}
        pairs = [compare_logits(path, 1, parity.PROMPTS, parity.NUM_NEW, **more, **each) for each in settings]
        figures = [f"{difference:.1e}" for _, difference in pairs]
        answers = [list(request.generated) for request in pairs[0][0]]
    with LLM(path, device=device, max_num_seqs=4, page_size=4) as llm:
        made = llm.generate(parity.PROMPTS, max_new_tokens=parity.NUM_NEW, ignore_eos=True)
        has_graphs = llm.engine.runner.has_graphs
    same = sum(list(one.token_ids) == answer for one, answer in zip(made, answers, strict=True))
    return [*figures, f"{same}/{len(answers)}" if has_graphs else f"none, {same}/{len(answers)}"]


def against_cpu(path: Path, device: str, settings: Any) -> tuple[list[float], list[list[int]]]:
    """Largest differences of logits from the engine's on the CPU, and the answers."""
    requests, logits = [], []
    runs = [{"device": "cpu"}, *({"device": device, "cuda_graphs": "off"} | each for each in settings)]
    for number, each in enumerate(runs):
        ranks = ThreadRanks(path, path.parent / f"store{number}", 1, page_size=4, **each)
        requests.append(ranks.generate(parity.PROMPTS, parity.NUM_NEW))
        logits.append([ranks.runners[0].observer.logits_of(request.id) for request in requests[-1]])
        ranks.close()
    answers = [list(request.generated) for request in requests[0]]
    for other in requests[1:]:
        assert [list(request.generated) for request in other] == answers, "other tokens than on the CPU"
    found = [max(float((a - b).abs().max()) for a, b in zip(logits[0], other, strict=True)) for other in logits[1:]]
    return found, answers


def rounding(family: str, model: Any, folder: Path, device: str) -> str:
    """Error of the engine's logits in bfloat16, relative to that of transformers'; ``model`` is in float32."""
    ids = torch.randint(2, _VOCAB, (1, 192), generator=torch.Generator().manual_seed(1))
    prompt = ids[0].tolist()
    if family in OTHERWISE:
        exact, theirs = (logits_of(folder, dtype, "cpu", prompt) for dtype in ("float32", "bfloat16"))
    else:
        with torch.inference_mode():
            exact = model.float().to(device)(ids.to(device)).logits[0].cpu()
            theirs = model.bfloat16()(ids.to(device)).logits[0].float().cpu()
    ours = logits_of(folder, "bfloat16", device, prompt)
    return f"{float((ours - exact).norm() / (theirs - exact).norm()):.2f}{'*' * (family in OTHERWISE)}"


def check(family: str, device: str, root: str, *, compares: bool = True) -> list[str]:
    """The cells of what is compared, not timed; saves the model of the timings in its folder of ``root``.

    On a GPU it also runs once what will be timed, so that its kernels are compiled.
    """
    torch.set_num_threads(2)
    folder = Path(root) / family
    model = save(MODEL_TYPES[family], folder)
    cells = [""] * 4
    if compares:
        with tempfile.TemporaryDirectory() as small:
            cells = cells_or_error(lambda: differences(family, device, Path(small)), 3)
        cells += cells_or_error(lambda: [rounding(family, model, folder, device)], 1)
    if device == "cuda":
        every = cases(_VOCAB, 2)
        with suppress(Exception), engine(folder, device) as llm:  # the timings report an error
            for batch in (1, 8):
                by_engine(llm, every[f"equal-{batch}"])
    return cells


def engine(folder: Path, device: str) -> LLM:
    """The engine as it is timed."""
    return LLM(folder, dtype="bfloat16", device=device, max_num_seqs=8, prefix_cache=False)


def by_generate(model: Any, case: Case, device: str, new: int) -> None:
    """One batch of prompts of one length."""
    ids = torch.tensor(case.prompts, device=device)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)


def seconds(run: Callable[[], object], device: str) -> float:
    """How long ``run`` takes, with what it starts on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def speeds(folder: Path, args: argparse.Namespace) -> list[str]:
    """A cell for each batch size."""
    every, cells = cases(_VOCAB, args.new), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(args.device)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with engine(folder, args.device) as llm:
        for batch in (1, 8):
            case = every[f"equal-{batch}"]
            by_engine(llm, case)
            by_generate(model, case, args.device, 4)
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(args.rounds):
                ours += [seconds(lambda: by_engine(llm, case), args.device) for _ in range(3)]  # noqa: B023
                theirs.append(seconds(lambda: by_generate(model, case, args.device, args.new), args.device))  # noqa: B023
            mine, other = statistics.median(ours), statistics.median(theirs)
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8, help="processes of what is not timed")
    parser.add_argument("--timings", action="store_true", help="leave out what is compared")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    torch.set_num_threads(4)
    families, began = args.families or list(MODEL_TYPES), time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        checked: list[list[str]] = []
        with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
            for family, cells in zip(
                families,
                pool.map(partial(check, device=args.device, root=root, compares=not args.timings), families),
                strict=True,
            ):
                print(f"{family}: {', '.join(cells)}", file=sys.stderr, flush=True)
                checked.append(cells)
        print(f"compared in {time.perf_counter() - began:.0f} s\n", flush=True)
        print("| family | fp32, whole | in chunks | graphs | bf16 | batch 1 | batch 8 | seconds |\n|" + " --- |" * 8)
        for family, cells in zip(families, checked, strict=True):
            began = time.perf_counter()
            timed = cells_or_error(lambda: speeds(Path(root) / family, args), 2)  # noqa: B023
            print(f"| `{family}` | {' | '.join(cells + timed)} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
