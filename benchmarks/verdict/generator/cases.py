"""Cases: runs groups of generated cases that share a model and a pairing.

The first case of a group is the target without a bug (a benign change); each of the others has one bug. The baseline
and the runs of the oracle are recorded once per group.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.verdict.bench import Bench, compared
from benchmarks.verdict.catalogue import Case
from benchmarks.verdict.families import family
from benchmarks.verdict.generator.bug import Bug, has_outputs_first
from benchmarks.verdict.generator.grammar import BugContext, draw_bug
from benchmarks.verdict.generator.oracle import Noise, is_finite, observe
from benchmarks.verdict.generator.outcome import GeneratedOutcome, judge_benign, judge_bug, not_run
from benchmarks.verdict.generator.pairing import Pairing, draw_pairing
from benchmarks.verdict.generator.patches import patch_of
from benchmarks.verdict.run_megatron import Teams
from tapscope.comparator import Report

GROUP = 4
"""Cases that share a pairing."""
_EPSILONS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SUMS = 4.0
"""Rounding error of a float32 sum of products, relative to one rounding of the result."""
_PATCH = """from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.damage import Damage
from benchmarks.verdict.generator.patches import patch_of

patch = patch_of({bug!r})
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share a pairing."""

    seed: int
    number: int
    cases: tuple[int, ...]
    pairing: Pairing

    @property
    def needs_megatron(self) -> bool:
        """Whether the target runs in Megatron."""
        return self.pairing.target.framework == "megatron"


def groups(seed: int, cases: Sequence[int]) -> list[Group]:
    """Return the groups of these cases."""
    numbers = sorted({case // GROUP for case in cases})
    chosen = {number: tuple(case for case in cases if case // GROUP == number) for number in numbers}
    return [Group(seed, number, chosen[number], draw_pairing(seed, number)) for number in numbers]


def name_of(seed: int, case: int) -> str:
    """Return the name of a case, for example ``gen-7-12``."""
    return f"gen-{seed}-{case}"


def run_group(group: Group, teams: Teams, keep: Path | None = None) -> list[GeneratedOutcome]:
    """Run the cases of a group; an error in one case does not stop the others."""
    with tempfile.TemporaryDirectory(prefix="verdict-gen-") as folder:
        root = keep / f"group-{group.seed}-{group.number}" if keep else Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        runs = _Runs(group, Bench(root, teams), root)
        return [_timed(runs, case) for case in group.cases]


def _timed(runs: "_Runs", number: int) -> GeneratedOutcome:
    start = time.perf_counter()
    try:
        judged = runs.benign(number) if number % GROUP == 0 else runs.bug(number)
    except Exception as error:  # noqa: BLE001 - any exception is the case's outcome
        judged = not_run(runs.case(number), runs.drawn.get(number), f"{type(error).__name__}: {error}")
    return replace(judged, seconds=time.perf_counter() - start, pairing=runs.pairing)


class _Runs:
    """The runs of one group, each recorded once."""

    def __init__(self, group: Group, bench: Bench, root: Path) -> None:
        self.group, self.pairing, self._bench, self._root = group, group.pairing, bench, root
        self.drawn: dict[int, Bug] = {}

    def case(self, number: int, bug: Bug | None = None) -> Case:
        """Return the bench's case."""
        pairing = self.pairing
        fields: dict[str, Any] = {"baseline": pairing.baseline, "target": pairing.target, "path": Path("generated")}
        if bug is not None:
            framework = pairing.target.framework
            fields |= {"patches": "checkpoint" if bug.kind == "weight" else framework, "patch": patch_of(bug)}
            fields |= {"expect": bug.expect, "visibility": "strong", "about": bug.description}
            if framework == "megatron" and bug.kind != "weight":
                fields["path"] = self._root / f"patch_{number}.py"
                fields["path"].write_text(_PATCH.format(bug=bug))
        return Case(name=name_of(self.group.seed, number), model=pairing.model, **fields)

    def benign(self, number: int) -> GeneratedOutcome:
        """Compare the bug-free target with the baseline."""
        is_sound = is_finite(self._baseline) and is_finite(self._clean)
        return judge_benign(self.case(number), self._clean_report, is_sound=is_sound)

    def bug(self, number: int) -> GeneratedOutcome:
        """Compare the buggy target with the baseline."""
        context = self._bug_context()
        bug = self.drawn[number] = self._with_change(draw_bug(self.group.seed, number, context), context)
        case = self.case(number, bug)
        target = self._bench.patched(case)
        seen = observe(self._clean, target, self._noise(), bug.expect)
        report = compared(self._baseline, target)
        clean_report = self._clean_report
        is_alarmed = isinstance(clean_report, Exception) or clean_report.exit_code != 0
        return judge_bug(case, bug, report, seen, is_alarmed=is_alarmed)

    @property
    def _baseline(self) -> Path:
        return self._bench.clean(self.pairing.model, self.pairing.baseline)

    @property
    def _clean(self) -> Path:
        return self._bench.clean(self.pairing.model, self.pairing.target)

    @cached_property
    def _clean_report(self) -> Report | Exception:
        """The report on the bug-free target."""
        return compared(self._baseline, self._clean)

    def _bug_context(self) -> BugContext:
        from safetensors import safe_open

        checkpoint = self._bench.checkpoint(self.pairing.model)
        with safe_open(checkpoint / "model.safetensors", "pt") as stored:
            shapes = {key: tuple(stored.get_slice(key).get_shape()) for key in sorted(stored.keys())}
        config = family(self.pairing.model.family).config(dict(self.pairing.model.sizes))
        return BugContext(self.pairing, shapes, config)

    def _with_change(self, bug: Bug, context: BugContext) -> Bug:
        """Return the bug with its `change` or `touched` filled in from the checkpoint."""
        from safetensors import safe_open

        if bug.kind == "epsilon":
            own = getattr(context.config, "rms_norm_eps", None)
            return bug if own is None else replace(bug, change=(float(own), bug.value))
        damage = bug.damage
        if "weight" not in bug.kind or damage is None:
            return bug
        key = bug.module if bug.kind == "weight" else f"{bug.module}.weight"
        with safe_open(self._bench.checkpoint(self.pairing.model) / "model.safetensors", "pt") as stored:
            weight = stored.get_tensor(key).float()
        if weight.ndim == 2 and bug.kind == "weight":
            differs, outputs_axis = damage(weight) != weight, 0 if has_outputs_first(bug) else 1
            inputs, outputs = (
                differs.any(axis).nonzero().flatten().tolist() for axis in (outputs_axis, 1 - outputs_axis)
            )
            return replace(bug, touched=tuple(inputs), touched_outputs=tuple(outputs))
        damaged = damage(weight)
        differs = damaged != weight
        if weight.ndim > 1 or not differs.any():
            return bug
        before, after = (side[differs].unique() for side in (weight, damaged))
        return replace(bug, change=(float(before), float(after))) if len(before) == len(after) == 1 else bug

    def _noise(self) -> Noise:
        """Record two bug-free runs in the target's layout, which differ by the rounding of the coarser side."""
        pairing = self.pairing
        coarse = max(pairing.baseline.dtype, pairing.target.dtype, key=_EPSILONS.__getitem__)
        is_exact = pairing.target.framework == "transformers"
        if coarse != "float32" or is_exact:
            return Noise(self._target_in(coarse), self._target_in("float64" if is_exact else "float32"))
        # Errors are proportional to the epsilon: a 16-bit run predicts those of a float32 run, except for its sums.
        scale = _SUMS * _EPSILONS["float32"] / _EPSILONS["bfloat16"]
        return Noise(self._target_in("bfloat16"), self._target_in("float32"), scale)

    def _target_in(self, dtype: str) -> Path:
        return self._bench.clean(self.pairing.model, self.pairing.target.but({"dtype": dtype}))


def described(seed: int, case: int) -> str:
    """Describe the model and pairing of a case, without running it."""
    pairing = draw_pairing(seed, case // GROUP)
    kind = "benign" if case % GROUP == 0 else "bug"
    return f"{name_of(seed, case):<16} {pairing.model.family:<11} {kind:<7} {pairing.name} {pairing.dtypes}"
