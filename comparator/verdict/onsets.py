"""Onsets: find early steps in which an error may begin that was detected later, or not at all.

A floor covers all steps together, since rows match across steps. A loop (of a sampler, of denoising) that feeds a wrong
value back to the same modules in a later step would therefore explain that value. If a site's error in an early step
exceeds that of its inputs up to that step, the first steps are judged separately.
"""

from collections.abc import Sequence

import numpy as np

from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.judge import Judge
from tapscope.comparator.verdict.localise import Divergence, onset

MAX_REJUDGED_STEPS = 3
"""Maximum number of steps that are judged again."""
_MAX_ROW_GROWTH = 8.0
"""Factor by which a row's error may exceed that of its inputs. Modules have conditions up to 6, single rows larger
ones. The factor only decides whether to judge again."""
_MIN_EARLY_SHARE = 0.1
"""Minimum error of an earlier step, as a fraction of the culprit's largest error; with fewer rows, the largest error is
smaller."""
_MAX_OWN_GROWTH = 32.0
"""Factor by which a row's error may exceed the error that the module adds; the worst row has several times the typical
one."""


def early_steps(findings: Sequence[Finding], divergences: Sequence[Divergence], judge: Judge) -> list[int]:
    """Return the target steps to judge again, in ascending order, up to the first of ``divergences``."""
    matched_findings = [findings[i] for i in judge.matched]
    steps = sorted({result.step for finding in matched_findings for result in finding.steps})
    if len(steps) < 2:
        return []
    last = min((each.step for each in divergences), default=steps[-1] + 1)
    begun = np.array([onset(each) if each.verdict.is_bad else np.inf for each in matched_findings])
    column = {step: i for i, step in enumerate(steps)}
    errors = np.zeros((len(matched_findings), len(steps)))
    for node, finding in enumerate(matched_findings):
        if finding.floor > 0.0:
            for result in finding.steps:
                errors[node, column[result.step]] = result.error
        elif finding.verdict.is_bad:
            errors[node, column.get(int(begun[node]), 0) :] = np.inf
    so_far = np.maximum.accumulate(errors, axis=1)
    nothing = np.zeros(len(steps))
    given = np.array([so_far[list(each.nodes)].max(0) if each.nodes else nothing for each in judge.inputs])
    bases = np.array([judge.base(node) for node in range(len(matched_findings))])
    floors = np.array([each.floor for each in matched_findings])
    room = _MAX_ROW_GROWTH * np.hypot(given, (_MAX_OWN_GROWTH / _MAX_ROW_GROWTH * bases)[:, None])
    numbers = np.array(steps)
    is_off = (errors > room) & (floors > 0.0)[:, None] & (numbers < begun[:, None]) & (numbers <= last)
    early = {step for step, is_early in zip(steps, is_off.any(0).tolist(), strict=True) if is_early}
    early |= {int(each) for each in begun[begun < last].tolist()}
    if divergences and (own := divergences[0].finding.steps):
        least = _MIN_EARLY_SHARE * max(each.error for each in own)
        early |= {each.step for each in own if each.step < last and each.error >= least > 0.0}
    return sorted(early)
