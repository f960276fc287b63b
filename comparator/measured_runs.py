"""Seen: two runs, matched and measured, before anything is judged."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from msgspec import Struct, structs

from tapscope.comparator.alignment.overlap_check import check_common
from tapscope.comparator.alignment.prepare import Preparer
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.alignment.rows import map_rows
from tapscope.comparator.detectors.cast_gradients import without_branches
from tapscope.comparator.detectors.exclude_rerouted_rows import set_aside
from tapscope.comparator.detectors.implied_routing import implied_flips
from tapscope.comparator.matching.concatenated import concatenated
from tapscope.comparator.matching.match import Pair, match
from tapscope.comparator.matching.models import of_models
from tapscope.comparator.matching.prefixes import prefix_hint, prefix_renames, seen_through
from tapscope.comparator.matching.repeated_calls import call_by_call
from tapscope.comparator.matching.selection import num_objects, num_selected, select, select_pairs, without_objects
from tapscope.comparator.metrics.images import convolving
from tapscope.comparator.metrics.near_zero_rows import norms_of
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.options.overrides import SIDES, of_side, override_dims
from tapscope.comparator.pair_analysis.analyze import Examiner
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.pair_analysis.pool import examine_all
from tapscope.comparator.runs.call_index import by_argument
from tapscope.comparator.runs.hints import hints_of
from tapscope.comparator.runs.pipeline_stages import numbered
from tapscope.comparator.runs.series import Series, series_of
from tapscope.comparator.verdict.corruption import Damage
from tapscope.comparator.verdict.near_ties import Flip, explain_flips
from tapscope.comparator.verdict.rules import Rule, check_rules
from tapscope.comparator.verdict.sampled_tokens import BASIS, with_tokens
from tapscope.kernels.native import filled
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.run import Run

Progress = Callable[[int, int], None]
"""Called with (sites done, sites in all)."""


class Seen(Struct, frozen=True):
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

    def without_moved_rows(self) -> "Seen":
        """Without the token rows that went to other experts at a near tie, where these matter."""
        return structs.replace(self, everything=set_aside(self.everything, self.flips, self.examiner))

    def up_to(self, step: int) -> "Seen":
        """The same of the target's steps up to one, that included, with what the baseline has of their rows."""
        recorded = [one.pair for one in self.everything if one.basis != BASIS]
        pairs = [early for pair in recorded if (early := _up_to(pair, step)) is not None]
        own = self.examiner.preparer
        preparer = Preparer(own.baseline, own.target, self.rows, own.shift_steps, self.options.ranks)
        everything = without_branches(_examine(self.examiner.anew(preparer), pairs, None))
        return _with_flips(structs.replace(self, everything=everything, examiner=self.examiner.anew(preparer)))

    @property
    def examined(self) -> list[Examined]:
        """What is judged."""
        return [one for one in self.everything if not one.apart]


def see(
    baseline: Run,
    target: Run,
    options: CompareOptions,
    damage: tuple[Damage, Damage],
    rules: Sequence[Rule] = (),
    progress: Progress | None = None,
) -> Seen:
    """Match and measure; raises as :func:`~.compare.compare_closely`."""
    dims = (*options.dims, *options.mapping.dims)
    given = by_argument((numbered(baseline, of_side(dims, SIDES[0])), numbered(target, of_side(dims, SIDES[1]))))
    given = override_dims((baseline, target), given, dims)
    chosen = select((baseline, target), given, options)
    runs = (baseline, target)
    kept = [
        filled(run, damage[i].sound(without_objects(chosen[i]), verify=options.verify)) for i, run in enumerate(runs)
    ]
    rows = map_rows(baseline, target, options)
    series = series_of(baseline, kept[0]), series_of(target, kept[1])
    hints = hints_of(baseline, given[0].sites), hints_of(target, given[1].sites)
    stripped = (*prefix_renames(options.strip_prefix), *options.mapping.rename)
    pairs = select_pairs(match(*series, structs.replace(options.mapping, rename=stripped), hints), options)
    pairs = concatenated(pairs) if options.concat_steps and not rows.known else pairs
    check_common(baseline, target, pairs, rows, hint := prefix_hint(pairs))
    check_rules(rules, [(p.baseline.site, p.target.site) for p in pairs if p.baseline and p.target])
    sites = {**given[1].sites, **given[0].sites}
    preparer = Preparer(baseline, target, rows, options.shift_steps, options.ranks)
    examiner = Examiner(preparer, options.tolerance, options.detail)
    examiner.backward = any(pair.baseline is not None and pair.baseline.site.endswith(".grad") for pair in pairs)
    examiner.norms, examiner.convolving = norms_of(sites), convolving(sites)
    objects = num_objects(chosen[0], options), num_objects(chosen[1], options)
    counts = num_selected(pairs, 0) + objects[0], num_selected(pairs, 1) + objects[1]
    notes = (*given[0].notes, *given[1].notes, *_step_notes(options, rows))
    notes = (*notes, *seen_through(pairs), *filter(None, [hint]))
    pairs, models = of_models(call_by_call(pairs, kept))
    examiner.norms |= {f"{model}.{path}" for model in models for path in examiner.norms}
    examiner.convolving |= {f"{model}.{path}" for model in models for path in examiner.convolving}
    everything = without_branches(_examine(examiner, pairs, progress))
    return _with_flips(Seen(everything, examiner, rows, sites, counts, objects, {}, notes, options))


def _with_flips(seen: Seen) -> Seen:
    preparer = seen.examiner.preparer
    everything = with_tokens(seen.everything, preparer)
    flips = {**implied_flips(everything, preparer), **explain_flips(everything, preparer)}
    return structs.replace(seen, everything=everything, flips=flips)


def _up_to(pair: Pair, step: int) -> Pair | None:
    """A pair without the target's firings behind a step; None where none is left."""
    target = None if pair.target is None else _begun(pair.target, step)
    return None if target is None and pair.target is not None else structs.replace(pair, target=target)


def _begun(series: Series, step: int) -> Series | None:
    if series.firings[-1].step <= step:
        return series
    firings = tuple(firing for firing in series.firings if firing.step <= step)
    sources = tuple(each for one in series.sources if (each := _begun(one, step)) is not None)
    return structs.replace(series, firings=firings, sources=sources) if firings else None


def _step_notes(options: CompareOptions, rows: RowMap) -> list[str]:
    """What flags about steps do, or do not where token rows are known."""
    if options.concat_steps:
        meet = "token rows meet by request and position: nothing was laid one behind the other"
        done = "the steps of each site were laid one behind the other, in the order of their numbers"
        return [f"--concat-steps: {meet if rows.known else done}"]
    if not options.shift_steps or not rows.known:
        return []
    how = "token rows meet by request and position whatever their steps, unless they were computed again unsaid"
    return [f"--shift-steps {options.shift_steps}: {how}; it is about --steps, parameters and plain values"]


def _examine(examiner: Examiner, pairs: Sequence[Pair], progress: Progress | None) -> list[Examined]:
    done = count(1)
    return examine_all(examiner, pairs, lambda: progress(next(done), len(pairs)) if progress is not None else None)
