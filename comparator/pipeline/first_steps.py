"""First steps: judge the first steps alone, because later steps may hide where an error began.

A floor covers all steps together. In training every step depends on those before it, and in a sampler's loop a wrong
value is given to the same modules again: in later steps, both explain their own errors. A tolerance or a measured
floor is the same in every step, so the first steps are not judged again then.
"""

from collections.abc import Callable

from msgspec import structs

from tapscope.comparator.detectors.optimizer_steps import beginning, merged, trained_steps, with_parameter_updates
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pipeline.detect_reroutes import ScreenedRuns, detect_reroutes
from tapscope.comparator.pipeline.judge_sites import JudgedRuns, judge_sites
from tapscope.comparator.pipeline.measure_pairs import MeasuredRuns
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.localise import Divergence
from tapscope.comparator.verdict.onsets import MAX_REJUDGED_STEPS
from tapscope.comparator.verdict.rules import Rule
from tapscope.core.errors import NothingInCommonError, RuleError

Measure = Callable[[CompareOptions], MeasuredRuns]
"""Runs the stages up to the measurement with other options."""


def correct_by_first_steps(judged: JudgedRuns, rules: tuple[Rule, ...], measure: Measure) -> JudgedRuns:
    """The verdicts of all steps, corrected by those of the first steps where these say more."""
    options = judged.screened.measured.matched.opened.options
    if options.noise_run is not None or options.tolerance is not None:
        return judged
    steps = trained_steps(judged.screened.judged)
    return _of_training(judged, rules, measure, steps) if steps else _of_loop(judged, rules)


def _of_loop(judged: JudgedRuns, rules: tuple[Rule, ...]) -> JudgedRuns:
    """By the first early step in which a site is off by more than its inputs were by then."""
    for step in judged.early[:MAX_REJUDGED_STEPS]:
        first = judge_sites(detect_reroutes(judged.screened.measured.up_to(step)), rules)
        if first.divergences:
            later = [each for each in judged.divergences if each.step > step]
            findings, divergences = merged(judged.findings, (first.findings, first.divergences), later)
            return structs.replace(judged, findings=findings, divergences=divergences)
    return judged


def _of_training(judged: JudgedRuns, rules: tuple[Rule, ...], measure: Measure, steps: list[int]) -> JudgedRuns:
    """By the fewest optimizer steps after which something is off."""
    if len(steps) < 2:
        return judged
    opened = judged.screened.measured.matched.opened
    options, (baseline, target) = opened.options, opened.runs
    both = {step for _, step in baseline.records.per_step()}
    both &= {step - options.shift_steps for _, step in target.records.per_step()}
    both &= options.steps if options.steps is not None else both

    def judge(last: int) -> tuple[list[Finding], list[Divergence]]:
        some = structs.replace(options, steps=frozenset(step for step in both if step <= last))
        try:
            screened: ScreenedRuns = detect_reroutes(measure(some))
            results = with_parameter_updates(screened.results, judged.screened.results, last)
            first = judge_sites(structs.replace(screened, results=results), rules)
        except (RuleError, NothingInCommonError):  # what was selected comes in later steps
            return [], []
        return first.findings, first.divergences

    early = beginning(steps, judge)
    if not early[1]:
        return judged
    findings, divergences = merged(judged.findings, early)
    return structs.replace(judged, findings=findings, divergences=divergences)
