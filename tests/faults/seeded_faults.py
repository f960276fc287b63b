"""Faults seeded into the engine, and changes that are none: what `diff` says of each.

    PYTHONPATH=tests/support:tests/faults python tests/faults/seeded_faults.py [NAME ...]

Each case records a tiny random checkpoint twice in full, the second time with the fault or the change, and compares the
runs. A fault has to be named by its site; a benign change has to be silent. The table is Markdown.
"""

import re
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import seeded_patches as patches
import torch
from checkpoints import make_checkpoint
from compare_runs import diff
from lora_adapters import EVERY, make_adapter
from moe_checkpoints import FAMILIES, make_moe
from speculation import OracleProposer, speculate

from tapscope.comparator import Verdict
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution import input_buffers
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.state_cache import StateCache, StepStates
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.lora import LoraTarget
from tapscope.engine.layers.routers import Router
from tapscope.engine.scheduling.page_group import PageGroup
from tapscope.engine.scheduling.state_group import StateGroup

SHARED = [*range(40, 64)]
PROMPTS = [[*SHARED, 5, 6, 7], [300, 301, 302, 303, 304], [*SHARED, 5, 9, 11, 12, 13, 14, 15, 16, 17]]
NAMES = ["r0", "r1", "r2"]
COMMON: dict[str, Any] = {"logits": "all", "prefix_cache": False, "page_size": 4, "batch_invariant": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault or change."""

    name: str
    model: str
    site: str = ""
    """Regular expression of the first site that has to be named; empty: the change is benign."""
    patch: patches.Patch = nullcontext
    both: dict[str, Any] = field(default_factory=dict)
    """Engine settings of both runs."""
    target: dict[str, Any] = field(default_factory=dict)
    """Engine settings of the second run only."""
    alone: bool = False
    """Whether the second run computes one request after the other, which a prefix cache needs."""
    baseline_alone: bool = False
    speculates: bool = False
    adapters: bool = False


def run_case(case: Case, folder: Path) -> tuple[bool, str]:
    """(whether `diff` says what it should, what it says first)."""
    path = model_path(folder.parent, case.model)
    baseline, settings = folder / "baseline", COMMON | case.both
    outputs = _record(path, baseline, settings, alone=case.baseline_alone, adapters=case.adapters)
    with case.patch():
        _record(
            path,
            folder / "target",
            settings | case.target,
            alone=case.alone,
            adapters=case.adapters,
            oracle=outputs if case.speculates else None,
        )
    report = diff(baseline, folder / "target")
    first = report.first_divergence
    if not case.site:
        is_silent = first is None and all(each.verdict is Verdict.SAME for each in report.findings)
        num_cached = report.coverage.num_rows_unaligned[0]
        return is_silent and (report.exit_code == 0 or num_cached > 0), "agrees" + (
            f" ({num_cached} cached rows are not compared)" if num_cached else ""
        ) if is_silent else str(first)
    said = "agrees" if first is None else first.site
    return report.exit_code == 1 and first is not None and re.search(case.site, first.site) is not None, said


def model_path(folder: Path, family: str) -> Path:
    """The checkpoint of a family, made on first use."""
    path = folder / f"model-{family}"
    if not path.exists():
        windowed = {"sliding_window": 8} if family == "gemma3" else {}
        (make_moe if family in FAMILIES else make_checkpoint)(path, family, seed=3, **windowed)
    return path


def _record(
    path: Path,
    out: Path,
    settings: dict[str, Any],
    *,
    alone: bool,
    adapters: bool,
    oracle: dict[tuple[int, ...], tuple[int, ...]] | None = None,
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Generate from all prompts and record it in full; prompt -> generated tokens."""
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    params = SamplingParams(max_new_tokens=8, temperature=0.7, seed=3, ignore_eos=True)
    names: list[str] = ["", "", ""]
    if adapters:
        names = ["", "a", "b"]
        folders = {name: path.parent / f"adapter-{name}" for name in "ab"}
        for seed, folder in enumerate(folders.values()):
            if not folder.exists():
                make_adapter(folder, path, EVERY, seed=seed, lora_alpha=6 + 4 * seed)
        settings = settings | {"lora_paths": folders}
    if oracle is not None:
        settings = settings | {"speculative_algorithm": "NGRAM"}
    with LLM(path, observer=observer, **settings) as llm:
        if oracle is not None:
            speculate(llm, OracleProposer(oracle, 0.6, 512), 3)
        groups = [[0], [1], [2]] if alone else [[0, 1, 2]]
        found = [
            generation
            for group in groups
            for generation in llm.generate(
                [PROMPTS[i] for i in group],
                params,
                request_ids=[NAMES[i] for i in group],
                adapter=[names[i] for i in group] if adapters else None,
            )
        ]
    return {generation.prompt_ids: generation.token_ids for generation in found}


HYBRID, WINDOWED, DENSE, SPARSE = "qwen3_next", "gemma3", "llama", "qwen3_moe"
_HIT: dict[str, Any] = {"target": {"prefix_cache": True}, "alone": True, "baseline_alone": True}
_LINEAR = r"layers\.0\.linear_attn"
FAULTS = (
    Case(
        name="state of another request",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StepStates, "read", patches.state_of_another_request),
    ),
    Case(
        name="wrong head shard of state",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StepStates, "read", patches.heads_of_another_shard),
    ),
    Case(
        name="state not written in one layer",
        model=HYBRID,
        site=r"layers\.2\.linear_attn",
        patch=patches.wrap(StepStates, "write", patches.state_not_written),
    ),
    Case(
        name="convolution window not shifted",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StepStates, "write", patches.window_not_shifted),
    ),
    Case(
        name="state stored in bf16",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StepStates, "write", patches.state_in_bfloat16),
    ),
    Case(
        name="matrix of another layer's state",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StateCache, "of", patches.last_layers_state),
    ),
    Case(
        name="checkpoint one page late",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StateGroup, "allocate", patches.checkpoint_a_page_late),
        **_HIT,
    ),
    Case(
        name="state of a rejected draft kept",
        model=HYBRID,
        site=_LINEAR,
        patch=patches.wrap(StateGroup, "store", patches.rejected_state_kept),
        speculates=True,
    ),
    Case(
        name="window freed early",
        model=WINDOWED,
        site=r"layers\.\d\.self_attn",
        patch=patches.wrap(PageGroup, "_num_out_of_window", patches.freed_a_page_early),
        both={"num_pages": 40, "swa_full_tokens_ratio": 0.5, "max_num_batched_tokens": 16},
    ),
    Case(
        name="keys of two requests exchanged",
        model=DENSE,
        site=r"layers\.1\.self_attn",
        patch=patches.wrap(StepCache, "write", patches.keys_of_two_requests_exchanged),
    ),
    Case(
        name="value of a prompt's last row lost",
        model=DENSE,
        site=r"layers\.1\.self_attn",
        patch=patches.wrap(KVCache, "write", patches.value_not_written),
    ),
    Case(
        name="prefix hit reads a neighbouring page",
        model=DENSE,
        site=r"layers\.1\.self_attn",
        patch=patches.wrap(StepCache, "read", patches.prefix_page_of_its_neighbour),
        **_HIT,
    ),
    Case(
        name="rejected draft kept in the cache",
        model=DENSE,
        site=r"layers\.0\.self_attn",
        patch=patches.rejected_draft_kept,
        speculates=True,
    ),
    Case(
        name="drafts verified at one position",
        model=DENSE,
        site=r"rotary|position_ids|layers\.0\.self_attn",
        patch=patches.wrap(input_buffers, "_positions", patches.drafts_at_one_position),
        speculates=True,
    ),
    Case(
        name="decoding a position late",
        model=DENSE,
        site=r"rotary|position_ids|layers\.0\.self_attn",
        patch=patches.wrap(input_buffers, "_positions", patches.second_request_a_position_late),
    ),
    Case(
        name="adapter of a neighbour",
        model=DENSE,
        site=r"layers\.0\.self_attn\.[qkv]_proj",
        patch=patches.adapter_rows(patches.neighbours_adapter),
        adapters=True,
    ),
    Case(
        name="adapter on a base row",
        model=DENSE,
        site=r"layers\.0\.self_attn\.[qkv]_proj",
        patch=patches.adapter_rows(patches.adapter_of_a_base_row),
        adapters=True,
    ),
    Case(
        name="scaling of another adapter",
        model=DENSE,
        site=r"layers\.0\.self_attn\.[qkv]_proj",
        patch=patches.wrap(LoraTarget, "update", patches.scaling_of_the_other_slot),
        adapters=True,
    ),
    Case(
        name="one expert id of a row wrong",
        model=SPARSE,
        site=r"layers\.0\.mlp",
        patch=patches.wrap(Router, "top", patches.second_choice_lost),
    ),
    Case(
        name="a row computed by the next expert",
        model=SPARSE,
        site=r"layers\.0\.mlp\.experts",
        patch=patches.wrap(Experts, "gate_up", patches.pairs_of_two_experts_exchanged),
    ),
)
"""Each has to be named."""

BENIGN = (
    Case(name="chunked prefill", model=DENSE, target={"max_num_batched_tokens": 7}),
    Case(name="requests alone instead of together", model=DENSE, alone=True, both={"batch_invariant": False}),
    Case(name="prefix hit instead of recompute", model=DENSE, **_HIT),
    Case(name="prefix hit in a hybrid", model=HYBRID, **_HIT),
    Case(name="speculation", model=DENSE, speculates=True),
    Case(name="speculation in a hybrid", model=HYBRID, speculates=True),
    Case(name="preemption", model=DENSE, target={"num_pages": 20}),
    Case(name="two ranks", model=SPARSE, target={"tp": 2}, both={"batch_invariant": False}),
    Case(name="other pages in a windowed model", model=WINDOWED, target={"page_size": 16}),
    Case(
        name="adapters alone instead of mixed", model=DENSE, alone=True, adapters=True, both={"batch_invariant": False}
    ),
)
"""Each has to be silent."""


def main() -> int:
    """Run the cases and print the table; 1 if any goes wrong."""
    wanted, wrong = sys.argv[1:], 0
    print("| change | model | `diff` names first | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
        for number, case in enumerate((*FAULTS, *BENIGN)):
            if wanted and case.name not in wanted:
                continue
            torch.manual_seed(0)
            is_right, said = run_case(case, Path(folder) / str(number))
            wrong += not is_right
            print(f"| {case.name} | {case.model} | {said} | {'' if is_right else 'WRONG'} |", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
