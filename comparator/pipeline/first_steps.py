"""First steps: judge the first steps separately, because later steps may hide where an error began.

A floor covers all steps together. In training, every step depends on the steps before it. A sampler's loop feeds a
wrong value back to the same modules. In both cases, the errors of later steps explain themselves. A tolerance or a
measured floor is the same in every step, so the first steps are then not judged again.
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
"""Function that runs the stages up to the measurement with other options."""


def correct_by_first_steps(judged: JudgedRuns, rules: tuple[Rule, ...], measure: Measure) -> JudgedRuns:
    """Return the verdicts of all steps, corrected by verdicts of the first steps where those find more."""
    options = judged.screened.measured.matched.opened.options
    if options.noise_run is not None or options.tolerance is not None:
        return judged
    steps = trained_steps(judged.screened.judged)
    return _of_training(judged, rules, measure, steps) if steps else _of_loop(judged, rules)


def _of_loop(judged: JudgedRuns, rules: tuple[Rule, ...]) -> JudgedRuns:
    """Correct the verdicts by the first early step in which a site's error exceeds the error of its inputs up to that
    step."""
    for step in judged.early[:MAX_REJUDGED_STEPS]:
        first = judge_sites(detect_reroutes(judged.screened.measured.up_to(step)), rules)
        if first.divergences:
            later = [each for each in judged.divergences if each.step > step]
            findings, divergences = merged(judged.findings, (first.findings, first.divergences), later)
            return structs.replace(judged, findings=findings, divergences=divergences)
    return judged


def _of_training(judged: JudgedRuns, rules: tuple[Rule, ...], measure: Measure, steps: list[int]) -> JudgedRuns:
    """Correct the verdicts by the smallest number of optimizer steps after which a site differs."""
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
        except (RuleError, NothingInCommonError):  # the selected sites or rows occur in later steps only
            return [], []
        return first.findings, first.divergences

    early = beginning(steps, judge)
    if not early[1]:
        return judged
    findings, divergences = merged(judged.findings, early)
    return structs.replace(judged, findings=findings, divergences=divergences)
