"""The engine on a GPU against transformers, by model family: parity, bfloat16 rounding, and decoding at batch 1 and 8.

    python benchmarks/families_cuda.py [llama qwen3_next ...] [--new 32] [--rounds 1] [--seeds 3] [--workers 8]
                                       [--only-timings] [--limit 60] [--json FILE]

Prints a row per family. *fp32*: the largest logit difference of the tests' small model from transformers' full forward
on the CPU, with full prompts and in chunks (see `parity.py`). *graphs*: outputs of the same model that are equal with
CUDA graphs, or `none` if the family has no graphs. The other figures use the models of `families_cpu.py` in bfloat16
(hidden size 512, 8 layers, random weights).

*bf16*: relative L2 error of the logits of 192 tokens to transformers in float32, divided by that of transformers in
bfloat16: 1 is the same rounding. Median over several weights and prompts, minimum and maximum. Rounding may change the
experts of a token; that changes the logits ten times as much as all other rounding and happens by chance, so models in
*bf16* have exactly as many experts as a token selects. *choosing* is the same with all experts.

*batch 1*, *batch 8*: tokens per second, and transformers' generate time over the engine's, each a median: a round has
three runs of the engine and one of generate, after a warm-up of both. Above 1, the engine is faster.

Families whose computation in the installed transformers differs from version 5.23 are compared with the engine on the
CPU, marked *.

Each family has its own process. Up to `--workers` processes compare and prepare concurrently; then the families are
timed one after the other while the other processes wait. A process that takes longer than `--limit` seconds in either
phase is killed. `--json` appends a line per result as soon as it is available. The last line reports how many threads
ran: on a shared machine, generate loses more than the engine, because it waits for the host.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import parity
import torch
import transformers
from engine_cpu import Case, by_engine, cases
from engine_helpers import ThreadRanks, compare_logits
from families_cpu import _COMMON, _VOCAB, FAMILIES, save
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from tapscope.engine import LLM

DENSE = {"llama": "llama", "qwen3": "qwen3", "mixtral": "mixtral"}
"""Families that `families_cpu.py` lacks, with the config of Granite."""
MODEL_TYPES = {family.removesuffix("_text"): family for family in FAMILIES} | DENSE
"""Family name in the tests -> model_type."""
for _family in DENSE:
    FAMILIES.setdefault(_family, FAMILIES["granite"])
OTHERWISE = (
    ("bamba", "gemma3n", "gpt_oss", "mamba2", "minimax_m2")
    if Version(transformers.__version__) < Version("5.23")
    else ()
)
"""Families whose computation in the installed transformers differs from version 5.23."""


_PROMPTS, _LENGTH = 4, 192


def logits_of(folder: Path, dtype: str, device: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the engine's logits [tokens, vocab] of each prompt, without CUDA graphs."""
    found = []
    with LLM(folder, dtype=dtype, device=device, logits="all", max_num_seqs=1, cuda_graphs="off") as llm:
        seen: list[torch.Tensor] = []
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.float().cpu()))
        for prompt in prompts:
            seen.clear()
            llm.generate([prompt], max_new_tokens=1)
            found.append(torch.cat(seen)[: len(prompt)])
    return found


def differences(family: str, device: str, folder: Path) -> list[str]:
    """Return the float32 cells: full prompts, chunks, and CUDA graphs."""
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
    """Return the largest logit differences from the engine on the CPU, and the outputs."""
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


def all_experts(family: str) -> dict[str, int]:
    """Return config changes with which each token selects all experts; empty for a family without experts."""
    settings = FAMILIES[MODEL_TYPES[family]]
    config = AutoConfig.for_model(MODEL_TYPES[family], **_COMMON | settings)
    names = "num_experts", "num_local_experts", "n_routed_experts"
    given = [name for name in names if name in settings] or [name for name in names if getattr(config, name, None)]
    return {given[0]: config.num_experts_per_tok} if given else {}


def rounding(family: str, device: str, seed: int, changes: dict[str, int]) -> list[float]:
    """Return the engine's bfloat16 logit error relative to that of transformers, for several prompts."""
    noise = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(2, _VOCAB, (_PROMPTS, _LENGTH), generator=noise)
    with tempfile.TemporaryDirectory() as place:
        folder, prompts = Path(place), ids.tolist()
        model = save(MODEL_TYPES[family], folder, seed, **changes)
        if family in OTHERWISE:
            exact, theirs = (logits_of(folder, dtype, "cpu", prompts) for dtype in ("float32", "bfloat16"))
        else:
            with torch.inference_mode():
                wide = model.float().to(device)
                exact = [wide(one[None].to(device)).logits[0].cpu() for one in ids]
                narrow = wide.bfloat16()
                theirs = [narrow(one[None].to(device)).logits[0].float().cpu() for one in ids]
        ours = logits_of(folder, "bfloat16", device, prompts)
    each = zip(ours, exact, theirs, strict=True)
    return [float((mine - true).norm() / (other - true).norm()) for mine, true, other in each]


def roundings(family: str, device: str, seeds: int) -> list[str]:
    """Return the bfloat16 cells: every token selects all experts, and only some."""
    cells, changes = [], all_experts(family)
    for each in [changes, {}] if changes else [{}]:
        found = [ratio for seed in range(seeds) for ratio in rounding(family, device, seed, each)]
        spread = f"{min(found):.2f}–{max(found):.2f}"
        cells.append(f"{statistics.median(found):.2f}{'*' * (family in OTHERWISE)} ({spread})")
    return cells + [""] * (2 - len(cells))


def compared(family: str, args: argparse.Namespace) -> list[str]:
    """Return the cells that are compared rather than timed."""
    with tempfile.TemporaryDirectory() as folder:
        cells = cells_or_error(lambda: differences(family, args.device, Path(folder)), 3)
    return cells + cells_or_error(lambda: roundings(family, args.device, args.seeds), 2)


def engine(folder: Path, device: str) -> LLM:
    """Create the engine with the settings that are timed."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": device, "max_num_seqs": 8, "prefix_cache": False}
    return LLM(folder, kv_cache_memory_bytes=256 << 20, **settings)


def by_generate(model: Any, case: Case, device: str, new: int) -> None:
    """Generate one batch of prompts of equal length."""
    ids = torch.tensor(case.prompts, device=device)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds that ``run`` takes, including its work on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Timing:
    """Both engines of a family, for timing after warm-up."""

    def __init__(self, family: str, args: argparse.Namespace) -> None:
        self._args, self._cases = args, cases(_VOCAB, args.new)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            save(MODEL_TYPES[family], folder)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(args.device)
            self._llm = engine(folder, args.device)
        self._model.generation_config.eos_token_id = self._model.config.eos_token_id = None
        for batch in (1, 8):
            self._warm_up(self._cases[f"equal-{batch}"])

    def _warm_up(self, case: Case) -> None:
        by_engine(self._llm, case)
        by_generate(self._model, case, self._args.device, 4)

    def cells(self) -> list[str]:
        """Return one cell per batch size."""
        args, found = self._args, []
        for batch in (1, 8):
            case, ours, theirs = self._cases[f"equal-{batch}"], list[float](), list[float]()
            self._warm_up(case)
            for _ in range(args.rounds):
                ours += [seconds(lambda: by_engine(self._llm, case), args.device) for _ in range(3)]  # noqa: B023
                theirs.append(seconds(lambda: by_generate(self._model, case, args.device, args.new), args.device))  # noqa: B023
            mine, other = statistics.median(ours), statistics.median(theirs)
            found.append(f"{sum(case.new) / mine:.0f}, {other / mine:.2f}")
        return found


def serve(family: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Run in the family's process: compare, prepare, and time on request; sends three messages, each a list of
    cells."""
    torch.set_num_threads(2)
    pipe.send([""] * 5 if args.only_timings else compared(family, args))
    made: list[Timing] = []

    def make() -> list[str]:
        made.append(Timing(family, args))
        return []

    pipe.send(cells_or_error(make, 2))
    pipe.recv()
    torch.set_num_threads(4)
    pipe.send(cells_or_error(lambda: made[0].cells(), 2))
    pipe.recv()  # until killed


def cells_or_error(cells: Callable[[], list[str]], count: int) -> list[str]:
    """Return the cells, or the error in the first of ``count`` cells, so that the other families continue."""
    try:
        return cells()
    except Exception as error:  # noqa: BLE001  # the error is the result of this family
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:90]}", *[""] * (count - 1)]


class Family:
    """A process that measures a family, and the results received from it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.compared, self.timed = name, list[str](), list[str]()
        self._limit, self._since, self._is_ended = args.limit, time.monotonic(), False
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "tapscope.engine"])
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(name, args, other), daemon=True)
        self._process.start()
        other.close()

    @property
    def left(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self._since + self._limit - time.monotonic())

    def receive(self, count: int) -> list[str]:
        """Return the next message, or the error in the first of ``count`` cells; an error kills the process."""
        if self._is_ended:
            return [""] * count
        told = f"more than {self._limit:.0f} s"
        try:
            if self.pipe.poll(self.left):
                found: list[str] = self.pipe.recv()
                return found
        except (EOFError, OSError):
            self._process.join(1)
            told = f"ended with {self._process.exitcode}"
        self.end()
        return [told, *[""] * (count - 1)]

    def time(self) -> list[str]:
        """Make the process time its family; return the cells."""
        self._since = time.monotonic()
        if not self.timed:
            self.pipe.send(None)
            self.timed = self.receive(2)
        self.end()
        return self.timed

    def end(self) -> None:
        """Kill the process."""
        self._is_ended = True
        self._process.kill()
        self._process.join()


def num_running() -> int:
    """Return the number of threads on the machine that run or wait for a core."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def prepare(names: list[str], args: argparse.Namespace, tell: Callable[..., None]) -> list[Family]:
    """Compare and prepare all families, ``args.workers`` at a time."""
    waiting, running, done = list(names), list[Family](), list[Family]()
    while waiting or running:
        while waiting and len(running) < args.workers:
            running.append(Family(waiting.pop(0), args))
        ready = wait([each.pipe for each in running], min(each.left for each in running))
        for each in [one for one in running if one.pipe in ready or not one.left]:
            if not each.compared:
                each.compared = each.receive(5)
                tell(family=each.name, compared=each.compared)
            else:
                each.timed = each.receive(2)  # empty unless preparing failed
                running.remove(each)
                done.append(each)
    return sorted(done, key=lambda each: names.index(each.name))


def main() -> None:
    """Print one row per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(MODEL_TYPES))
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, help="number of bf16 models, each with 4 prompts")
    parser.add_argument("--workers", type=int, default=8, help="processes that compare concurrently")
    parser.add_argument("--only-timings", action="store_true", help="skip the comparisons")
    parser.add_argument("--limit", type=float, default=60.0, help="time limit per family in seconds")
    parser.add_argument("--json", type=Path, help="append results to this file as they arrive")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    began = time.perf_counter()

    def tell(**result: Any) -> None:
        line = json.dumps(result | {"second": round(time.perf_counter() - began, 1)}, ensure_ascii=False)
        print(line, file=sys.stderr, flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(line + "\n")

    families = prepare(args.families or list(MODEL_TYPES), args, tell)
    print(f"compared in {time.perf_counter() - began:.0f} s\n", flush=True)
    head = "family", "fp32, whole", "in chunks", "graphs", "bf16", "choosing", "batch 1", "batch 8", "seconds"
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    loads = []
    for each in families:
        start = time.perf_counter()
        tell(family=each.name, timed=each.time())
        loads.append(num_running())
        row = " | ".join([*each.compared, *each.timed])
        print(f"| `{each.name}` | {row} | {time.perf_counter() - start:.0f} |", flush=True)
    print(f"\nthreads that ran at the end of a timing: median {statistics.median(loads):.0f}, most {max(loads)}")


if __name__ == "__main__":
    main()
