"""Compare: two runs in, a report out: load -> match -> assemble -> align -> measure -> judge -> localise."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.calls import by_argument
from tapscope.comparator.closeup import Closeup, closeup
from tapscope.comparator.common import check_common
from tapscope.comparator.coverage import cover
from tapscope.comparator.damage import Damage, look, with_damage
from tapscope.comparator.examine import Examiner
from tapscope.comparator.examined import Examined
from tapscope.comparator.finding import Finding
from tapscope.comparator.flips import Flip, explain_flips
from tapscope.comparator.hints import hints_of
from tapscope.comparator.judge import Judge, Standards
from tapscope.comparator.localise import Divergence, localise
from tapscope.comparator.mapfile import MapFile
from tapscope.comparator.match import Pair, match
from tapscope.comparator.models import check_models
from tapscope.comparator.options import CompareOptions
from tapscope.comparator.outcome import Report, header_of
from tapscope.comparator.overrides import assume_meshes, of_baseline, override_dims
from tapscope.comparator.pool import examine_all
from tapscope.comparator.prepare import Preparer
from tapscope.comparator.rows import RowMap, map_rows
from tapscope.comparator.rules import Rule, check_rules, compile_rules
from tapscope.comparator.selection import is_object, num_objects, num_selected, select, select_pairs
from tapscope.comparator.series import series_of
from tapscope.comparator.set_aside import set_aside, sound_flips
from tapscope.comparator.stages import numbered
from tapscope.comparator.tokens import tokens_of
from tapscope.comparator.training import beginning, merged, trained_steps, with_drifts
from tapscope.comparator.twin import Twin, twin_of
from tapscope.errors import ConfigError, NothingInCommonError, RuleError
from tapscope.index import SiteInfo, uncollected
from tapscope.kernels.native import filled
from tapscope.run import Run, open_run

if TYPE_CHECKING:
    from tapscope.comparator.detail import Detail

Progress = Callable[[int, int], None]
"""Called with (sites done, sites in all)."""


class Comparison(Struct, frozen=True):
    """A report, and what it takes to look closer while both runs are open."""

    report: Report
    _seen: "_Seen"

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
        if one.detail is not None or one.basis != "values" or not one.num_unequal:
            return one.detail
        return self._seen.examiner.measure_detail(one.site, self._seen.examiner.preparer.prepare(one.pair))


def compare(
    baseline: Run, target: Run, options: CompareOptions | None = None, progress: Progress | None = None
) -> Report:
    """Compare two open runs; raises as :func:`compare_closely`."""
    return compare_closely(baseline, target, options, progress).report


def compare_closely(
    baseline: Run, target: Run, options: CompareOptions | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare two open runs, to look closer afterwards.

    Raises RuleError for a selection that matches nothing and NothingInCommonError when not one row or value of the
    runs can be compared.
    """
    damage = Damage(baseline), Damage(target)
    with uncollected():
        return _compare(baseline, target, options or CompareOptions(), damage, progress)


@np.errstate(all="ignore")  # values may be anything, bytes of a damaged file too: verdicts say so, not warnings
def _compare(
    baseline: Run, target: Run, options: CompareOptions, damage: tuple[Damage, Damage], progress: Progress | None
) -> Comparison:
    assume_meshes((baseline, target), options.mesh)
    rules = compile_rules((*options.rules, *options.mapping.rules))
    seen = _see(baseline, target, options, damage, rules, progress)
    check_models((baseline, target), seen.examined)
    seen, findings, divergences = _judge(seen, rules, _twin(baseline, target, options), options)
    findings, divergences = _from_the_beginning(seen, findings, divergences, damage, rules)
    if look(damage, divergences, seen.examined):  # once more, without what only looked like a culprit
        return _compare(baseline, target, options, damage, progress)
    if all(f.basis == "none" for f in findings):
        reason = next((f"; {f.site}: {f.notes[0]}" for f in findings if f.notes), "")
        raise NothingInCommonError(f"no site of {baseline.path} can be compared with {target.path}{reason}")
    coverage = cover((baseline, target), seen.rows, seen.everything, findings, sum(seen.num_objects), seen.notes)
    coverage = with_damage(coverage, damage)
    headers = header_of(baseline, seen.num_records[0]), header_of(target, seen.num_records[1])
    return Comparison(Report(*headers, tuple(findings), tuple(divergences), coverage, options), seen)


def _judge(
    seen: "_Seen", rules: tuple[Rule, ...], twin: Twin | None, options: CompareOptions
) -> tuple["_Seen", list[Finding], list[Divergence]]:
    """What was judged in the end, and what came of it."""
    standards = Standards(tolerance=options.tolerance, rules=rules, twin=twin, flips=seen.flips)
    raw, seen = seen, seen.without_moved_rows()
    judge = Judge(seen.examined, seen.sites, standards)
    found = judge.findings()
    sound = sound_flips(seen.flips, found)
    if len(sound) < len(seen.flips):
        seen = structs.replace(raw, flips=sound).without_moved_rows()
        judge = Judge(seen.examined, seen.sites, standards)
        found = judge.findings()
    findings, divergences = localise(found, judge.matched, judge.graph, judge.inputs)
    placed = [_placed(each, seen) for each in divergences]
    if not placed:
        return seen, findings, []
    from tapscope.comparator.explain.explain import Context, explain

    return seen, findings, explain(placed, Context(seen.examined, judge.matched, judge.inputs, seen.examiner.preparer))


def _from_the_beginning(
    seen: "_Seen",
    findings: list[Finding],
    divergences: list[Divergence],
    damage: tuple[Damage, Damage],
    rules: tuple[Rule, ...],
) -> tuple[list[Finding], list[Divergence]]:
    """The same in the light of the first steps of a training, where those alone say more; see :mod:`.training`."""
    options, baseline, target = seen.options, seen.examiner.preparer.baseline, seen.examiner.preparer.target
    steps = trained_steps(seen.examined)
    if len(steps) < 2 or options.floor is not None or options.tolerance is not None:
        return findings, divergences
    both = {r.key.step for r in baseline.records} & {r.key.step - options.shift_steps for r in target.records}
    both &= options.steps if options.steps is not None else both

    def judge(last: int) -> tuple[list[Finding], list[Divergence]]:
        some = structs.replace(options, steps=frozenset(step for step in both if step <= last))
        try:
            first = _see(baseline, target, some, damage)
            first = structs.replace(first, everything=with_drifts(first.everything, seen.everything, last))
            return _judge(first, rules, None, some)[1:]
        except (RuleError, NothingInCommonError):  # what was asked for comes later
            return [], []

    early = beginning(steps, judge)
    return merged(findings, early) if early[1] else (findings, divergences)


class _Seen(Struct, frozen=True):
    """Two runs, matched and measured, before anything is judged."""

    everything: list[Examined]
    examiner: Examiner
    rows: RowMap
    sites: Mapping[str, SiteInfo]
    num_records: tuple[int, int]
    num_objects: tuple[int, int]
    flips: Mapping[str, Flip]
    notes: tuple[str, ...]
    options: CompareOptions

    def without_moved_rows(self) -> "_Seen":
        """Without the token rows that went to other experts at a near tie, where these matter."""
        return structs.replace(self, everything=set_aside(self.everything, self.flips, self.examiner))

    @property
    def examined(self) -> list[Examined]:
        """What is judged."""
        return [one for one in self.everything if not one.apart]


def _see(
    baseline: Run,
    target: Run,
    options: CompareOptions,
    damage: tuple[Damage, Damage],
    rules: Sequence[Rule] = (),
    progress: Progress | None = None,
) -> _Seen:
    given = by_argument((numbered(baseline), numbered(target)))
    given = override_dims((baseline, target), given, (*options.dims, *options.mapping.dims))
    chosen = select((baseline, target), given, options)
    runs = (baseline, target)
    kept = [filled(run, damage[i].sound([r for r in chosen[i] if not is_object(r)])) for i, run in enumerate(runs)]
    rows = map_rows(baseline, target, options)
    series = series_of(baseline, kept[0]), series_of(target, kept[1])
    hints = hints_of(baseline, given[0].sites), hints_of(target, given[1].sites)
    pairs = select_pairs(match(*series, options.mapping, hints), options)
    check_common(baseline, target, pairs, rows)
    check_rules(rules, [(p.baseline.site, p.target.site) for p in pairs if p.baseline and p.target])
    examiner = Examiner(Preparer(baseline, target, rows, options.shift_steps), options.tolerance, options.detail)
    examiner.backward = any(pair.baseline is not None and pair.baseline.site.endswith(".grad") for pair in pairs)
    objects = num_objects(chosen[0], options), num_objects(chosen[1], options)
    counts = num_selected(pairs, 0) + objects[0], num_selected(pairs, 1) + objects[1]
    sites = {**given[1].sites, **given[0].sites}
    notes = (*given[0].notes, *given[1].notes, *_shift_note(options, rows))
    everything = _examine(examiner, pairs, progress)
    flips = explain_flips([one for one in everything if not one.apart], examiner.preparer)
    return _Seen(everything, examiner, rows, sites, counts, objects, flips, notes, options)


def _shift_note(options: CompareOptions, rows: RowMap) -> list[str]:
    """What ``shift_steps`` does not do where token rows are known."""
    if not options.shift_steps or not rows.known:
        return []
    how = "token rows meet by request and position whatever their steps, unless they were computed again unsaid"
    return [f"--shift-steps {options.shift_steps}: {how}; it is about --steps, parameters and plain values"]


def _placed(divergence: Divergence, seen: _Seen) -> Divergence:
    """With the rows that are off in the step in which it shows first."""
    one = seen.examined[divergence.finding.order]
    tokens, count, place = tokens_of(seen.examiner, one, divergence.finding, divergence.step)
    return structs.replace(divergence, place=place, tokens=tokens, num_tokens=count)


def _twin(baseline: Run, target: Run, options: CompareOptions) -> Twin | None:
    """What ``options.floor`` says; raises ConfigError where it is one of the two runs."""
    if options.floor is None:
        return None
    with open_run(options.floor) as run:
        for other, what in ((baseline, "the baseline"), (target, "the target")):
            if Path(run.path).resolve() == Path(other.path).resolve():
                raise ConfigError(f"--floor {options.floor} is {what} itself; give a second run of the baseline")
        # The twin has the baseline's own names and numbers.
        dims = of_baseline((*options.dims, *options.mapping.dims), numbered(baseline))
        if baseline.mesh and not run.mesh and run.world_size == baseline.world_size:
            run.assume_mesh(baseline.mesh)
        own = structs.replace(options, mapping=MapFile(), dims=dims, shift_steps=0)
        seen = _see(baseline, run, own, (Damage(baseline), Damage(run))).without_moved_rows()
        return twin_of(str(options.floor), seen.examined, options.margin)


def _examine(examiner: Examiner, pairs: Sequence[Pair], progress: Progress | None) -> list[Examined]:
    done = count(1)
    return examine_all(examiner, pairs, lambda: progress(next(done), len(pairs)) if progress is not None else None)
