"""Speculative decoding on one GPU against the same engine without: tokens per second, and the duration of a step.

    python benchmarks/speculation_cuda.py [--shape qwen3-0.6b] [--layers N] [--batch 1 8] [--new 256] [--case ngram …]

Weights in a real model's shape in bf16, constructed so that the acceptance rate is known (as in speculation_cpu.py):
the target's next token is a function of the last one. A draft checkpoint has two of the target's layers and knows nine
of ten successors; an EAGLE head has one layer and knows about four of five, a `weak` one about three. `ngram` prompts
contain the continuation; `hopeless` drafts know nothing. Every step verifies 4 rows per request (3 drafts). `eager`
runs the same without CUDA graphs.

Printed: tokens per second, median of rounds, relative to plain decoding in graphs with asynchronous scheduling; the
median duration of a step with drafts, including drafting, and of its verification alone; tokens per verification, and
the share of steps without drafts because drafting was unprofitable. `same` counts outputs equal to those of plain
decoding.
"""

import argparse
import copy
import statistics
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from engine_cuda import _SHAPES, setting
from safetensors.torch import save_file
from speculation_cpu import reading, successor, teach
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tapscope.engine import LLM, SamplingParams

_CASES = ("ngram", "draft", "eagle", "weak-eagle", "hopeless-draft", "hopeless-eagle")
_DRAFTS = 3
_WEAK = {"weak-eagle": {"margin": -0.1}}
"""Changes of a case's head, see :func:`.reading`."""


@torch.no_grad()
def save(folder: Path, config: Any, known: float, device: str) -> None:
    """Save a checkpoint that predicts the successor for a share ``known`` of the tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        teach(model, known)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)


@torch.no_grad()
def save_eagle(folder: Path, target: Any, device: str, *, case: str) -> None:
    """Save the EAGLE head of ``target`` for ``case``: a Llama layer after a projection."""
    torch.manual_seed(1)
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"
    shape = {name: getattr(target, name) for name in names} | {"head_dim": getattr(target, "head_dim", None)}
    config = LlamaConfig(
        **shape, num_hidden_layers=1, vocab_size=target.vocab_size, architectures=["LlamaForCausalLM"]
    )  # fmt: skip
    with torch.device(device):
        small = copy.deepcopy(config)
        small.vocab_size = 8
        layer = LlamaForCausalLM(small).model.layers[0]
        weights = {f"layers.0.{name}": w for name, w in layer.state_dict().items() if "input_layernorm" not in name}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"layers.0.{name}.weight"].mul_(0.01)
        weights["fc.weight"] = reading(
            target.hidden_size, target.vocab_size, is_hopeless=case == "hopeless-eagle", **_WEAK.get(case, {})
        )
    config.save_pretrained(folder)
    save_file({name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()}, folder / "model.safetensors")


def prompts(batch: int, length: int) -> list[list[int]]:
    """Return prompts from a different cycle per request."""
    found = []
    for number in range(1, batch + 1):
        ids = [number * 64]
        while len(ids) < length:
            ids.append(int(successor(torch.tensor(ids[-1]))))
        found.append(ids)
    return found


def measure(llm: LLM, given: list[list[int]], params: SamplingParams, rounds: int) -> tuple[float, Any, dict[str, Any]]:
    """Return tokens per second, the outputs, and the durations of steps in ms."""
    with_drafts, verifying, alone = [], [], []
    engine = llm.engine
    step = engine.step

    def timed_step() -> Any:
        drafts = None if engine.speculator is None else engine.speculator.stats.num_verifications
        began = time.perf_counter()
        outputs = step()
        seconds = time.perf_counter() - began
        if drafts is not None and engine.speculator.stats.num_verifications > drafts:
            with_drafts.append(seconds)
            verifying.append(seconds - engine.speculator.last_draft_s)
        elif len(outputs) == len(given):
            alone.append(seconds)
        return outputs

    engine.step = timed_step  # type: ignore[method-assign]
    paces, found = [], None
    for number in range(rounds + 1):  # the first round is warm-up
        engine.scheduler.flush()
        if number == 1:
            for each in (with_drafts, verifying, alone):
                each.clear()
        began = time.perf_counter()
        found = llm.generate(given, params)
        paces.append(len(given) * params.max_new_tokens / (time.perf_counter() - began))
    del engine.step
    told = {"step": with_drafts, "verification": verifying, "plain step": alone}
    medians = {name: 1e3 * statistics.median(values) for name, values in told.items() if values}
    return statistics.median(paces[1:]), [generation.token_ids for generation in found or ()], medians


def options_of(case: str, folder: Path) -> dict[str, Any]:
    """Return the engine settings of a case."""
    rows = {"speculative_num_draft_tokens": _DRAFTS + 1}
    if case == "ngram":
        return {"speculative_algorithm": "NGRAM"} | rows
    name = "hopeless" if case == "hopeless-draft" else case
    algorithm = "EAGLE" if "eagle" in case else "STANDALONE"
    return {"speculative_algorithm": algorithm, "speculative_draft_model_path": folder / name} | rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="layers of the target; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", nargs="*", default=list(_CASES), choices=_CASES)
    parser.add_argument("--eager", nargs="*", default=[], choices=_CASES, help="cases that also run without graphs")
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    config = _SHAPES[args.shape]()
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.tie_word_embeddings = False
    print(f"{args.shape}, {config.num_hidden_layers} layers, bf16 on {name}, {_DRAFTS} drafts", flush=True)
    draft = copy.deepcopy(config)
    draft.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(draft, "layer_types", None):
        draft.layer_types = draft.layer_types[: draft.num_hidden_layers]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(folder / "target", config, 1.0, args.device)
        if "draft" in args.case:
            save(folder / "draft", draft, 0.9, args.device)
        if "hopeless-draft" in args.case:
            save(folder / "hopeless", draft, 0.0, args.device)
        for each in (case for case in args.case if "eagle" in case):
            save_eagle(folder / each, config, args.device, case=each)
        pages = {batch: batch * (-(-(args.prompt + args.new + 8) // 16) + 1) for batch in args.batch}
        runs = [("plain", {})] + [(case, options_of(case, folder)) for case in args.case]
        runs += [(f"{case} eager", options_of(case, folder) | {"cuda_graphs": "off"}) for case in args.eager]
        plain: dict[int, tuple[float, Any]] = {}
        for case, options in runs:
            settings = {"device": args.device, "max_num_seqs": max(args.batch), "num_pages": max(pages.values())}
            began = time.perf_counter()
            with LLM(folder / "target", dtype="bfloat16", **settings, **options, **dict(args.set)) as llm:
                started = time.perf_counter() - began
                for batch in args.batch:
                    params = SamplingParams(max_new_tokens=args.new, ignore_eos=True)
                    before = counts(llm)
                    pace, found, medians = measure(llm, prompts(batch, args.prompt), params, args.rounds)
                    plain.setdefault(batch, (pace, found))
                    durations = ", ".join(f"{name} {value:.2f} ms" for name, value in medians.items())
                    print(
                        f"batch {batch} {case:17} {pace:7.0f} tok/s {pace / plain[batch][0]:5.2f}x  {durations}"
                        f"{told(before, counts(llm))}  same {found == plain[batch][1]}  start {started:.0f} s",
                        flush=True,
                    )


def counts(llm: LLM) -> dict[str, Any]:
    """Return the counters of speculative decoding."""
    found: dict[str, Any] = llm.engine.state().get("speculation", {})
    return found


def told(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Format tokens per verification, and steps without drafts, between two :func:`counts`."""
    if not after:
        return ""
    names = "num_verifications", "num_accepted_tokens", "num_unprofitable_steps"
    verified, accepted, without = (after[name] - before[name] for name in names)
    costs = {count: round(cost, 2) for count, cost in after["draft_costs"].items()}
    right, drafted = (
        [last - first for last, first in zip_longest(after[name], before[name], fillvalue=0)]
        for name in ("accepted_by_position", "drafted_by_position")
    )
    shares = [round(each / max(1, count), 2) for each, count in zip(right, drafted, strict=True)]
    return (
        f", {1 + accepted / max(1, verified):.2f} tokens per verification (accepted by position {shares}), "
        f"{without} steps without, costs {costs}"
    )


if __name__ == "__main__":
    main()
