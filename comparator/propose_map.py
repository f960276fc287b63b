"""Propose a map file for two runs whose names differ, after the map and prefixes of the user's options."""

from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import structs

from tapscope.comparator.matching.map_proposal import MapProposal, proposal
from tapscope.comparator.matching.match import Pair, match_sites
from tapscope.comparator.matching.prefixes import prefix_hint, prefix_renames, remove_prefixes
from tapscope.comparator.options.map_file import RenameEntry
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.runs.hints import hints_of
from tapscope.comparator.runs.series import series_of
from tapscope.core.gc_control import gc_paused
from tapscope.kernels.native import filled
from tapscope.run_format.run import Run


@gc_paused()
def propose_map(baseline: Run, target: Run, options: CompareOptions | None = None) -> MapProposal:
    """Propose a map for sites that remain unmatched after the maps and prefixes of ``options``.

    Raises RuleError for a selection that matches nothing.
    """
    options = options or CompareOptions()
    for run in (baseline, target):
        run.records = filled(run, run.records)
    opened = open_runs(baseline, target, options, (CorruptRecords(baseline), CorruptRecords(target)))
    series = series_of(baseline, opened.records[0]), series_of(target, opened.records[1])
    hints = hints_of(baseline, opened.numbered[0].sites), hints_of(target, opened.numbered[1].sites)

    def matched(prefixes: Iterable[str], proposed: Sequence[RenameEntry] = ()) -> list[Pair]:
        renames = (*prefix_renames(prefixes), *options.mapping.rename, *proposed)
        return match_sites(*series, structs.replace(options.mapping, rename=renames), hints)

    pairs, removed = remove_prefixes(matched(options.strip_prefix), partial(matched, options.strip_prefix))
    prefix = prefix_hint(pairs).rpartition("--strip-prefix ")[2]
    if prefix:
        pairs = matched((*options.strip_prefix, prefix), prefix_renames(removed))
    return proposal(pairs, (baseline, target), prefix)
