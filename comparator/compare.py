"""Compare: two runs in, a report out: load -> match -> assemble -> align -> measure -> judge -> localise."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.detectors.activation_mismatch import with_pointwise
from tapscope.comparator.detectors.exclude_rerouted_rows import sound_flips
from tapscope.comparator.detectors.gradient_identity import with_identities
from tapscope.comparator.detectors.low_precision_grid import with_coarse
from tapscope.comparator.detectors.missing_gradients import absent_gradients
from tapscope.comparator.detectors.optimizer_steps import beginning, merged, trained_steps, with_drifts
from tapscope.comparator.detectors.recomputed_activations import with_recomputed
from tapscope.comparator.detectors.time_embeddings import sinusoids
from tapscope.comparator.measured_runs import Progress, Seen, see
from tapscope.comparator.noise_floor.kv_cache_error import kv_cache_epsilon
from tapscope.comparator.noise_floor.measured_floor import MeasuredFloor, measure_floor
from tapscope.comparator.noise_floor.near_zero_rows import unmatched_norms
from tapscope.comparator.options.map_file import MapFile
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.options.overrides import SIDES, assume_meshes, of_baseline, of_side
from tapscope.comparator.pair_analysis.token_view import Closeup, closeup
from tapscope.comparator.report.outcome import Report, header_of
from tapscope.comparator.runs.pipeline_stages import numbered
from tapscope.comparator.verdict.corruption import Damage, look, with_damage
from tapscope.comparator.verdict.coverage import cover
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.judge import Judge, Standards
from tapscope.comparator.verdict.localise import Divergence, localise
from tapscope.comparator.verdict.model_mismatch import check_models
from tapscope.comparator.verdict.onsets import MOST, early_steps
from tapscope.comparator.verdict.rules import Rule, compile_rules
from tapscope.comparator.verdict.token_rows import tokens_of
from tapscope.comparator.verdict.uncompared_upstream import doubted
from tapscope.core.errors import ConfigError, NothingInCommonError, RuleError
from tapscope.core.gc_control import gc_paused
from tapscope.core.site import Glob
from tapscope.run_format.run import Run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail


class Comparison(Struct, frozen=True):
    """A report, and what it takes to look closer while both runs are open."""

    report: Report
    _seen: Seen

    def closeup(self, finding: Finding) -> Closeup | None:
        """A finding of the report row by row; None where there are no values to look at.

        Raises DataError when they can no longer be read.
        """
        one = self._seen.examined[finding.order]
        if one.basis != "values":
            return None
        examiner = self._seen.examiner
        return closeup(examiner.preparer.prepare(one.pair), self._seen.rows, examiner.tolerance or (0.0, 0.0))

    @np.errstate(all="ignore")
    def detail(self, finding: Finding) -> "Detail | None":
        """ULPs, percentiles, channels, … of a finding; None where there are no values or all are equal.

        Raises DataError when they can no longer be read.
        """
        one = self._seen.examined[finding.order]
        if one.more.detail is not None or one.basis != "values" or not one.num_unequal:
            return one.more.detail
        return self._seen.examiner.measure_detail(one.site, self._seen.examiner.preparer.prepare(one.pair))


def compare(
    baseline: Run | str | Path,
    target: Run | str | Path,
    options: CompareOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare two runs, open or by their paths; ``progress`` is called with (sites done, sites in all).

    Raises as :func:`compare_closely`, and for a path as :func:`tapscope.sources.open_run`.
    """
    with ExitStack() as opened, gc_paused():
        runs = [run if isinstance(run, Run) else opened.enter_context(open_run(run)) for run in (baseline, target)]
        return compare_closely(runs[0], runs[1], options, progress).report


def compare_closely(
    baseline: Run, target: Run, options: CompareOptions | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare two open runs, to look closer afterwards.

    Raises RuleError for a selection that matches nothing and NothingInCommonError when the runs have no site, row or
    value in common. Where they have, but none can be compared, that is a report, whose exit code is 3.
    """
    damage = Damage(baseline), Damage(target)
    with gc_paused():
        return _compare(baseline, target, options or CompareOptions(), damage, progress)


@np.errstate(all="ignore")  # values may be anything, bytes of a damaged file too: verdicts say so, not warnings
def _compare(
    baseline: Run, target: Run, options: CompareOptions, damage: tuple[Damage, Damage], progress: Progress | None
) -> Comparison:
    assume_meshes((baseline, target), options.mesh)
    rules = compile_rules((*options.rules, *options.mapping.rules))
    seen = see(baseline, target, options, damage, rules, progress)
    check_models((baseline, target), seen.examined)
    judged = _judge(seen, rules, _twin(baseline, target, options), options)
    seen = judged.seen
    if trained_steps(seen.examined):
        findings, divergences = _from_the_beginning(judged, damage, rules)
    else:
        findings, divergences = _from_early_steps(judged, rules)
    if look(damage, divergences, seen.examined):  # once more, without what only looked like a culprit
        return _compare(baseline, target, options, damage, progress)
    if all(f.basis == "none" and not f.verdict.is_bad for f in findings):
        reasons = [(f.site, f.notes[0]) for f in findings if f.notes]
        reasons += [(one.site, one.apart) for one in seen.everything if one.apart]
        reason = "".join(f"; {site}: {why}" for site, why in reasons[:1])
        raise NothingInCommonError(f"no site of {baseline.path} can be compared with {target.path}{reason}")
    coverage = cover(
        (baseline, target),
        seen.rows,
        seen.everything,
        findings,
        sum(seen.num_objects),
        seen.notes,
        options=options,
    )
    coverage = with_damage(coverage, damage)
    headers = header_of(baseline, seen.num_records[0]), header_of(target, seen.num_records[1])
    return Comparison(Report(*headers, tuple(findings), tuple(divergences), coverage, options), seen)


class _Judgement(Struct, frozen=True):
    """What was judged in the end, and what came of it."""

    seen: Seen
    findings: list[Finding]
    divergences: list[Divergence]
    early: list[int]
    """Steps to look at again, see :mod:`.onsets`."""


def _judge(seen: Seen, rules: tuple[Rule, ...], twin: MeasuredFloor | None, options: CompareOptions) -> _Judgement:
    runs = seen.examiner.preparer.baseline, seen.examiner.preparer.target
    absent = absent_gradients(seen.examined, runs)
    around = unmatched_norms(seen.everything, seen.examiner.norms)
    standards = Standards(
        tolerance=options.tolerance,
        rules=rules,
        twin=twin,
        flips=seen.flips,
        unmet=around,
        cache=kv_cache_epsilon([run.manifest for run in runs]),
        sinusoids=sinusoids(seen.examined, seen.examiner.preparer),
        allowed=tuple(map(Glob, options.allow_differ)),
        explained=tuple(map(Glob, options.explain_floor)),
        disabled=options.disabled,
        absent=absent,
    )
    raw, seen = seen, seen.without_moved_rows()
    judge = Judge(seen.examined, seen.sites, standards)
    found = judge.findings()
    sound = sound_flips(seen.flips, found, seen.rows.target)
    if sound != seen.flips:
        seen = structs.replace(raw, flips=sound).without_moved_rows()
        judge = Judge(seen.examined, seen.sites, standards)
        found = judge.findings()
    found = with_identities(found, seen.examined, seen.examiner.preparer)
    found = with_coarse(found, seen.examined, seen.examiner.preparer)
    pointwise = {node.path for node in judge.graph.nodes if node.is_pointwise}
    found = with_pointwise(found, seen.examined, seen.examiner.preparer, pointwise)
    chosen = [run.records.of(options.steps_of(side), options.ranks) for side, run in enumerate(runs)]
    found = with_recomputed(found, runs, (chosen[0], chosen[1]))
    findings, divergences = localise(found, judge.matched, judge.graph, judge.inputs)
    divergences = doubted(divergences, seen.everything, _stand_ins(judge, divergences, seen), runs[1])
    early = early_steps(findings, divergences, judge)
    placed = [_placed(each, seen) for each in divergences]
    if not placed:
        return _Judgement(seen, findings, [], early)
    from tapscope.comparator.explain.explain import Context, explain

    context = Context(seen.examined, judge.matched, judge.inputs, seen.examiner.preparer)
    return _Judgement(seen, findings, explain(placed, context), early)


def _stand_ins(judge: Judge, divergences: Sequence[Divergence], seen: Seen) -> dict[int, list[str]]:
    """Order of a divergence's finding -> the names of the sites that went into it, or stand in for these."""
    wanted = {each.finding.order for each in divergences}
    nodes = [n for n, order in enumerate(judge.matched) if order in wanted]
    given = {n: [seen.examined[judge.matched[i]] for i in judge.inputs[n].nodes] for n in nodes}
    return {judge.matched[n]: [name for one in given[n] for name in one.names] for n in nodes}


def _from_early_steps(judged: _Judgement, rules: tuple[Rule, ...]) -> tuple[list[Finding], list[Divergence]]:
    """The same in the light of an early step, where what came of it hides what began there; see :mod:`.onsets`."""
    findings, divergences, options = judged.findings, judged.divergences, judged.seen.options
    if options.floor is not None or options.tolerance is not None:
        return findings, divergences
    for step in judged.early[:MOST]:
        first = _judge(judged.seen.up_to(step), rules, None, options)
        if first.divergences:
            later = [each for each in divergences if each.step > step]
            return merged(findings, (first.findings, first.divergences), later)
    return findings, divergences


def _from_the_beginning(
    judged: _Judgement, damage: tuple[Damage, Damage], rules: tuple[Rule, ...]
) -> tuple[list[Finding], list[Divergence]]:
    """The same in the light of the first steps of a training, where those alone say more; see :mod:`.training`."""
    seen, findings, divergences = judged.seen, judged.findings, judged.divergences
    options, baseline, target = seen.options, seen.examiner.preparer.baseline, seen.examiner.preparer.target
    steps = trained_steps(seen.examined)
    if len(steps) < 2 or options.floor is not None or options.tolerance is not None:
        return findings, divergences
    both = {step for _, step in baseline.records.per_step()}
    both &= {step - options.shift_steps for _, step in target.records.per_step()}
    both &= options.steps if options.steps is not None else both

    def judge(last: int) -> tuple[list[Finding], list[Divergence]]:
        some = structs.replace(options, steps=frozenset(step for step in both if step <= last))
        try:
            first = see(baseline, target, some, damage)
            first = structs.replace(first, everything=with_drifts(first.everything, seen.everything, last))
            early = _judge(first, rules, None, some)
            return early.findings, early.divergences
        except (RuleError, NothingInCommonError):  # what was asked for comes later
            return [], []

    early = beginning(steps, judge)
    return merged(findings, early) if early[1] else (findings, divergences)


def _placed(divergence: Divergence, seen: Seen) -> Divergence:
    """With the rows that are off in the step in which it shows first."""
    one = seen.examined[divergence.finding.order]
    tokens, count, place = tokens_of(seen.examiner, one, divergence.finding, divergence.step)
    return structs.replace(divergence, place=place, tokens=tokens, num_tokens=count)


def _twin(baseline: Run, target: Run, options: CompareOptions) -> MeasuredFloor | None:
    """What ``options.floor`` says; raises ConfigError where it is one of the two runs."""
    if options.floor is None:
        return None
    with open_run(options.floor) as run:
        for other, what in ((baseline, "the baseline"), (target, "the target")):
            if Path(run.path).resolve() == Path(other.path).resolve():
                raise ConfigError(f"--floor {options.floor} is {what} itself; give a second run of the baseline")
        # The twin has the baseline's own names and numbers.
        every = (*options.dims, *options.mapping.dims)
        dims = of_baseline(every, numbered(baseline, of_side(every, SIDES[0])))
        if baseline.mesh and not run.mesh and run.world_size == baseline.world_size:
            run.assume_mesh(baseline.mesh)
        own = structs.replace(options, mapping=MapFile(), dims=dims, shift_steps=0)
        seen = see(baseline, run, own, (Damage(baseline), Damage(run))).without_moved_rows()
        return measure_floor(str(options.floor), seen.examined, options.margin)
