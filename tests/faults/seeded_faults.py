"""Faults seeded into the engine, and changes that are none: what `diff` says of each.

    PYTHONPATH=tests/support:tests/faults python tests/faults/seeded_faults.py [NAME ...]

Each case records a tiny random checkpoint twice in full, the second time with the fault or the change, and compares the
runs. A fault has to be named by its site; a benign change has to be silent. The table is Markdown.
"""

import re
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
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

SHARED = [*range(40, 64)]
PROMPTS = [[*SHARED, 5, 6, 7], [300, 301, 302, 303, 304], [*SHARED, 5, 9, 11, 12, 13, 14, 15, 16, 17]]
NAMES = ["r0", "r1", "r2"]
COMMON: dict[str, Any] = {"logits": "all", "prefix_cache": False, "page_size": 4, "batch_invariant": True}


@dataclass(frozen=True)
class Case:
    """One fault or change."""

    name: str
    model: str
    site: str = ""
    """Regular expression of the first site that has to be named; empty: the change is benign."""
    patch: patches.Patch = nullcontext
    _: KW_ONLY
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
        agreeing = {Verdict.SAME} if settings["batch_invariant"] else {Verdict.SAME, Verdict.CLOSE}
        is_silent = first is None and all(each.verdict in agreeing for each in report.findings)
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
_POSITIONS, _PROJECTIONS = r"rotary|position_ids|layers\.0\.self_attn", r"layers\.0\.self_attn\.[qkv]_proj"
FAULTS = (
    Case("state of another request", HYBRID, _LINEAR, patches.state_of_another_request),
    Case("wrong head shard of state", HYBRID, _LINEAR, patches.heads_of_another_shard),
    Case("state not written in one layer", HYBRID, r"layers\.2\.linear_attn", patches.state_not_written),
    Case("convolution window not shifted", HYBRID, _LINEAR, patches.window_not_shifted),
    Case("state stored in bf16", HYBRID, _LINEAR, patches.state_in_bfloat16),
    Case("matrix of another layer's state", HYBRID, _LINEAR, patches.last_layers_state),
    Case("checkpoint one page late", HYBRID, _LINEAR, patches.checkpoint_a_page_late, **_HIT),
    Case("state of a rejected draft kept", HYBRID, _LINEAR, patches.rejected_state_kept, speculates=True),
    Case(
        "window freed early",
        WINDOWED,
        r"layers\.\d\.self_attn",
        patches.freed_a_page_early,
        both={"num_pages": 40, "swa_full_tokens_ratio": 0.5, "max_num_batched_tokens": 16},
    ),
    Case("keys of two requests exchanged", DENSE, r"layers\.1\.self_attn", patches.keys_of_two_requests_exchanged),
    Case("value of a prompt's last row lost", DENSE, r"layers\.1\.self_attn", patches.value_not_written),
    Case(
        "prefix hit reads a neighbouring page",
        DENSE,
        r"layers\.1\.self_attn",
        patches.prefix_page_of_its_neighbour,
        **_HIT,
    ),
    Case(
        "rejected draft kept in the cache", DENSE, r"layers\.0\.self_attn", patches.rejected_draft_kept, speculates=True
    ),
    Case("drafts verified at one position", DENSE, _POSITIONS, patches.drafts_at_one_position, speculates=True),
    Case("decoding a position late", DENSE, _POSITIONS, patches.second_request_a_position_late),
    Case("adapter of a neighbour", DENSE, _PROJECTIONS, patches.neighbours_adapter, adapters=True),
    Case("adapter on a base row", DENSE, _PROJECTIONS, patches.adapter_of_a_base_row, adapters=True),
    Case("scaling of another adapter", DENSE, _PROJECTIONS, patches.scaling_of_the_other_slot, adapters=True),
    Case("one expert id of a row wrong", SPARSE, r"layers\.0\.mlp", patches.second_choice_lost),
    Case(
        "a row computed by the next expert", SPARSE, r"layers\.0\.mlp\.experts", patches.pairs_of_two_experts_exchanged
    ),
)
"""Each has to be named."""

BENIGN = (
    Case("chunked prefill", DENSE, target={"max_num_batched_tokens": 7}),
    Case("requests alone instead of together", DENSE, alone=True),
    Case("prefix hit instead of recompute", DENSE, **_HIT),
    Case("prefix hit in a hybrid", HYBRID, **_HIT),
    Case("speculation", DENSE, speculates=True),
    Case("speculation in a hybrid", HYBRID, speculates=True),
    Case("preemption", DENSE, target={"num_pages": 20}),
    Case("two ranks", SPARSE, target={"tp": 2}, both={"batch_invariant": False}),
    Case("other pages in a windowed model", WINDOWED, target={"page_size": 16}),
    Case("adapters alone instead of mixed", DENSE, alone=True, adapters=True),
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
