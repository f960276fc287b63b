"""Match, the second stage: pair the sites of both runs, call by call and model by model."""

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from tapscope.comparator.alignment.overlap_check import check_overlap
from tapscope.comparator.matching.concatenated import concat_steps
from tapscope.comparator.matching.match import Pair, match_sites
from tapscope.comparator.matching.models import name_by_model
from tapscope.comparator.matching.prefixes import prefix_hint, prefix_renames, wrapper_notes
from tapscope.comparator.matching.repeated_calls import split_calls
from tapscope.comparator.matching.selection import num_selected, select_pairs
from tapscope.comparator.pipeline.open_runs import OpenedRuns
from tapscope.comparator.runs.hints import hints_of
from tapscope.comparator.runs.series import series_of
from tapscope.run_format.index import SiteInfo


class MatchedRuns(Struct, frozen=True):
    """The pairs of sites of two runs, and sites that only one of them has."""

    opened: OpenedRuns
    pairs: list[Pair]
    """In the target's execution order."""
    sites: Mapping[str, SiteInfo]
    """Site -> its module's class, in either run."""
    models: tuple[str, ...]
    """Names of the models that prefix the sites; empty if there is one model."""
    num_records: tuple[int, int]
    """Records of these pairs and selected objects without a value, in baseline and target."""
    notes: tuple[str, ...]
    """Assumptions made."""

    @property
    def matched_names(self) -> list[tuple[str, str]]:
        """(baseline site, target site) of every pair that both runs have."""
        return [(pair.baseline.site, pair.target.site) for pair in self.pairs if pair.baseline and pair.target]

    def qualified(self, paths: Iterable[str]) -> frozenset[str]:
        """Module paths as named in these pairs: as given, and below each model."""
        paths = frozenset(paths)
        return paths | {f"{model}.{path}" for model in self.models for path in paths}


def match_runs(opened: OpenedRuns) -> MatchedRuns:
    """Pair the sites.

    Raises ConfigError for an entry of a map that matches nothing, and NothingInCommonError if no site or token row of
    one run has a counterpart.
    """
    options, rows = opened.options, opened.rows
    series = series_of(opened.baseline, opened.records[0]), series_of(opened.target, opened.records[1])
    hints = (
        hints_of(opened.baseline, opened.numbered[0].sites),
        hints_of(opened.target, opened.numbered[1].sites),
    )
    renames = (*prefix_renames(options.strip_prefix), *options.mapping.rename)
    pairs = select_pairs(match_sites(*series, structs.replace(options.mapping, rename=renames), hints), options)
    if options.concat_steps and not rows.known:
        pairs = concat_steps(pairs)
    hint = prefix_hint(pairs)
    check_overlap(opened.baseline, opened.target, pairs, rows, hint)
    counts = [num_selected(pairs, side) + opened.num_objects[side] for side in (0, 1)]
    notes = (*wrapper_notes(pairs), *filter(None, [hint]))
    pairs, models = name_by_model(split_calls(pairs, opened.records))
    left, right = opened.numbered
    return MatchedRuns(opened, pairs, {**right.sites, **left.sites}, models, (counts[0], counts[1]), notes)
