"""Bench: records the runs of cases in one directory, each baseline once, and compares them."""

import time
from pathlib import Path
from typing import Any

from benchmarks.verdict.catalogue import Case
from benchmarks.verdict.models import Model
from benchmarks.verdict.outcome import Outcome, Score, failed, judged
from benchmarks.verdict.patching import Patch, applied
from benchmarks.verdict.run_megatron import Teams
from benchmarks.verdict.setup import Setup
from tapscope import open_run
from tapscope.comparator import CompareOptions, Report, compare
from tapscope.core.errors import NothingInCommonError


class Bench:
    """Runs cases one after the other; call :meth:`close` at the end."""

    def __init__(self, root: Path, teams: Teams | None = None) -> None:
        """Create a bench; shared ``teams`` of Megatron ranks are closed by the caller."""
        self._root = root
        self._checkpoints: dict[Model, Path] = {}
        self._runs: dict[tuple[Model, Setup], Path] = {}
        self._teams = teams or Teams()
        self._owned = teams is None
        self._count = 0

    def close(self) -> None:
        """Stop the processes that this bench has started."""
        if self._owned:
            self._teams.close()

    def run(self, case: Case) -> Outcome:
        """Run a case and return its outcome; an error in one case does not stop the bench."""
        start = time.perf_counter()
        try:
            outcome = self._bug(case) if case.is_bug else self._benign(case)
        except Exception as error:  # noqa: BLE001 - a user's patch may raise anything; the outcome reports it
            outcome = failed(case, error)
        return outcome.timed(time.perf_counter() - start)

    def _bug(self, case: Case) -> Outcome:
        baseline = self.clean(case.model, case.baseline)
        clean = self.clean(case.model, case.target)
        target = self.patched(case)
        effect = _effect(clean, target)
        if effect == 0.0:
            return Outcome(case, Score.FAULTY, detail="the patch changed no recorded value")
        return judged(case, compared(baseline, target), effect)

    def _benign(self, case: Case) -> Outcome:
        baseline = self.clean(case.model, case.baseline)
        target = self.clean(case.model, case.target) if case.patch is None else self.patched(case)
        return judged(case, compared(baseline, target), 0.0)

    def clean(self, model: Model, setup: Setup) -> Path:
        """Return the run of the unpatched model, recorded once."""
        if (model, setup) not in self._runs:
            out = self._new(f"{model.family}-clean")
            self._capture(self.checkpoint(model), setup, out)
            self._runs[model, setup] = out
        return self._runs[model, setup]

    def patched(self, case: Case) -> Path:
        """Record the run of the case's patched target."""
        checkpoint, out = self.checkpoint(case.model), self._new(case.family)
        if case.patches == "checkpoint":
            self._capture(self._damaged(checkpoint, case.patch), case.target, out)
        else:
            self._capture(checkpoint, case.target, out, case)
        return out

    def _capture(self, checkpoint: Path, setup: Setup, out: Path, case: Case | None = None) -> None:
        """Record one run, with the patch of the case if there is one."""
        patch = None if case is None else case.patch
        if setup.framework == "megatron":
            self._teams.run(checkpoint, setup, out, case.path if case is not None else None)
        elif setup.framework == "engine":
            from benchmarks.verdict.run_engine import run_engine

            run_engine(checkpoint, setup, out, patch)
        else:
            from benchmarks.verdict.run_transformers import run_transformers

            run_transformers(checkpoint, setup, out, patch)

    def checkpoint(self, model: Model) -> Path:
        """Return the checkpoint of the unpatched model, written once."""
        if model not in self._checkpoints:
            self._checkpoints[model] = model.save(self._new(f"checkpoint-{model.family}"))
        return self._checkpoints[model]

    def _damaged(self, checkpoint: Path, patch: Patch | None) -> Path:
        """Write a copy of a checkpoint whose weights, a dict of tensors, are changed by ``patch``."""
        from safetensors.torch import load_file, save_file

        copy = self._new("checkpoint")
        copy.mkdir()
        weights = load_file(checkpoint / "model.safetensors")
        with applied(patch, weights):
            stored = {key: value.contiguous().clone() for key, value in weights.items()}
        save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
        (copy / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        return copy

    def _new(self, name: str) -> Path:
        self._count += 1
        return self._root / f"{self._count:04d}-{name}"


def compared(baseline: Path, target: Path, options: CompareOptions | None = None) -> Report | Exception:
    """Return the report, or the exception that the comparison raised."""
    with open_run(baseline) as one, open_run(target) as two:
        try:
            return compare(one, two, options)
        except Exception as error:  # noqa: BLE001 - a crash of the code under test is scored, it does not end the bench
            return error


def _effect(clean: Path, target: Path) -> float:
    """Return the largest relative L2 change of any site due to a patch, between runs of equal settings; 0 for none."""
    report: Any = compared(clean, target, CompareOptions(atol=0.0, rtol=0.0, allow_partial=True))
    if isinstance(report, NothingInCommonError):
        return float("inf")
    if isinstance(report, Exception):
        raise report
    changed = [f for f in report.findings if f.verdict.is_bad]
    known = [f.metrics.rel_l2 for f in changed if f.metrics is not None]
    return max((value if value > 0 else float("inf") for value in known), default=float("inf") if changed else 0.0)
