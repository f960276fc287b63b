"""Match, the second stage: pair the sites of both runs, call by call and model by model."""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.matching.concatenated import concat_steps
from tapscope.comparator.matching.map_proposal import MapProposal, proposal
from tapscope.comparator.matching.match import Pair, match_sites
from tapscope.comparator.matching.prefixes import (
    MIN_MATCHING_NAMES,
    prefix_hint,
    prefix_renames,
    remove_prefixes,
    removed_note,
    wrapper_notes,
)
from tapscope.comparator.matching.repeated_calls import split_calls
from tapscope.comparator.matching.selection import num_selected, select_pairs
from tapscope.comparator.options.map_file import RenameEntry
from tapscope.comparator.pipeline.open_runs import OpenedRuns
from tapscope.comparator.runs.hints import hints_of
from tapscope.comparator.runs.series import Series, series_of
from tapscope.comparator.verdict.model_mismatch import differences
from tapscope.core.errors import NothingInCommonError
from tapscope.core.formatting import plural
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.run import Run

_MIN_UNMATCHED_SHARE = 0.25
"""Minimum number of unmatched sites in both runs, as a fraction of the matched sites, for a map to be proposed."""


class MatchedRuns(Struct, frozen=True):
    """The pairs of sites of two runs, including sites that only one run has."""

    opened: OpenedRuns
    pairs: list[Pair]
    """In the target's execution order."""
    sites: Mapping[str, SiteInfo]
    """Site -> module metadata, from either run."""
    models: tuple[str, ...]
    """Names of the models that prefix the sites; empty for a single model."""
    num_records: tuple[int, int]
    """Number of records of these pairs, plus selected objects without a value, in baseline and target."""
    notes: tuple[str, ...]
    """The assumptions that were made, one sentence each."""
    prefixes: tuple[str, ...] = ()
    """``target:PREFIX`` for each prefix that was removed automatically, as by ``--strip-prefix``."""
    proposed_map: MapProposal | None = None
    """A map for unmatched modules, if there are many of them."""

    @property
    def matched_names(self) -> list[tuple[str, str]]:
        """(baseline site, target site) of every pair with both sides."""
        return [(pair.baseline.site, pair.target.site) for pair in self.pairs if pair.baseline and pair.target]

    def qualified(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the module paths as they occur in these pairs: unchanged, and prefixed with each model."""
        paths = frozenset(paths)
        return paths | {f"{model}.{path}" for model in self.models for path in paths}


def match_runs(opened: OpenedRuns) -> MatchedRuns:
    """Pair the sites of the opened runs.

    Raises ConfigError for a map entry that matches nothing, and NothingInCommonError if no site or no token row of one
    run has a counterpart.
    """
    options, rows = opened.options, opened.rows
    series = series_of(opened.baseline, opened.records[0]), series_of(opened.target, opened.records[1])
    hints = (
        hints_of(opened.baseline, opened.numbered[0].sites),
        hints_of(opened.target, opened.numbered[1].sites),
    )
    renames = (*prefix_renames(options.strip_prefix), *options.mapping.rename)

    def match(suggested: Sequence[RenameEntry] = ()) -> list[Pair]:
        return match_sites(*series, structs.replace(options.mapping, rename=(*renames, *suggested)), hints)

    every, removed = remove_prefixes(match(), match)
    pairs = select_pairs(every, options)
    if options.concat_steps and not rows.known:
        pairs = concat_steps(pairs)
    proposed = _proposed_map(every, opened.runs)
    hint = prefix_hint(pairs) or _map_note(proposed, opened.runs)
    check_overlap(opened.baseline, opened.target, pairs, rows, hint)
    counts = [num_selected(pairs, side) + opened.num_objects[side] for side in (0, 1)]
    notes = (*(removed_note(prefix, pairs) for prefix in removed), *wrapper_notes(pairs), *filter(None, [hint]))
    pairs, models = name_by_model(split_calls(pairs, opened.records))
    left, right = opened.numbered
    sites = {**right.sites, **left.sites}
    for site, info in left.sites.items():
        if info.no_inputs and site in right.sites:
            sites[site] = structs.replace(info, no_inputs=right.sites[site].no_inputs)
    return MatchedRuns(opened, pairs, sites, models, (counts[0], counts[1]), notes, removed, proposed)


def _proposed_map(pairs: Sequence[Pair], runs: tuple[Run, Run]) -> MapProposal | None:
    """Propose a map for unmatched sites, if both runs have many and the values identify them; None otherwise."""
    matched = sum(1 for pair in pairs if pair.baseline and pair.target)
    alone = [sum(1 for p in pairs if not p.note and (p.baseline, p.target)[1 - side] is None) for side in (0, 1)]
    if min(alone) < max(MIN_MATCHING_NAMES, _MIN_UNMATCHED_SHARE * matched):
        return None
    proposed = proposal(pairs, runs, with_splits=False)
    return proposed if proposed.renames else None


def _map_note(proposed: MapProposal | None, runs: tuple[Run, Run]) -> str:
    if proposed is None:
        return ""
    names = plural(sum(one.num_modules for one in proposed.renames), "unmatched module")
    command = shlex.join(["tapscope", "map", *(str(run.path) for run in runs), "-o", "names.yaml"])
    return f"{names} of the target may have another name in the baseline; propose a map with: {command}"


def name_by_model(pairs: Sequence[Pair]) -> tuple[list[Pair], tuple[str, ...]]:
    """Name the sites of the pairs ``MODEL.PATH:PORT`` if there are several models; also return these models."""
    models = dict.fromkeys(_series(pair).group[0] for pair in pairs)
    if len(models) < 2:
        return list(pairs), ()
    return [_named(pair) for pair in pairs], tuple(filter(None, models))


def _series(pair: Pair) -> Series:
    series = pair.baseline or pair.target
    assert series is not None
    return series


def _named(pair: Pair) -> Pair:
    series = _series(pair)
    model, site = series.group[0], pair.site or series.site
    if not model:
        return pair
    return structs.replace(pair, site=f"{model}{site}" if site.startswith(":") else f"{model}.{site}")


def _differ(pair: Pair) -> bool:
    """Return whether the first firings of both sides have hashes, and these or the shapes differ."""
    one, two = (side.first for side in pair.sides)
    return one.hash is not None and two.hash is not None and (one.hash, one.shape) != (two.hash, two.shape)


def check_overlap(baseline: Run, target: Run, pairs: Sequence[Pair], rows: RowMap, hint: str = "") -> None:
    """Raise NothingInCommonError if the runs have no matching record, site or token row.

    ``hint`` is a suggestion that would make names match.
    """
    for run in (baseline, target):
        if not run.records:
            reason = run.problems[0] if run.problems else f"see tapscope info {run.path}"
            raise NothingInCommonError(
                f"{run.path} holds no record{'' if run.closed and run.ranks else ' yet'}; {reason}"
            )
    if not any(p.baseline and p.target for p in pairs):
        examples = [next((s.site for p in pairs if (s := getattr(p, side))), "none") for side in ("baseline", "target")]
        advice = hint or _checkpoint_hint(baseline, target)
        advice = advice or (
            "were they captured from models of one architecture? (tapscope map BASELINE TARGET proposes which names "
            "correspond, for --map FILE)"
        )
        raise NothingInCommonError(
            f"{baseline.path} and {target.path} have no site in common: "
            f"e.g. {examples[0]} against {examples[1]}; {advice}"
        )
    if rows.known and not rows.num_pairs:
        facts = [*rows.problems, *(f"request {f.request} diverges at position {f.position}" for f in rows.forks)]
        why = facts[0] if facts else "their steps hold different positions"
        if masks := [p for p in pairs if p.baseline and p.target and is_mask(p.baseline.site) and _differ(p)]:
            why = f"{masks[0].baseline.site if masks[0].baseline else ''} marks different tokens in each run; {why}"
        advice = "capture both with the same prompts and request ids"
        if odd := differences(baseline, target):
            advice = (
                f"they are runs of different models ({', '.join(odd)}), whose token ids need not mean the same: "
                f"compare runs of one checkpoint, or {advice}"
            )
        raise NothingInCommonError(f"{baseline.path} and {target.path} have no token row in common: {why}; {advice}")


def _checkpoint_hint(baseline: Run, target: Run) -> str:
    """Return advice for the case that exactly one of the runs is a checkpoint; empty otherwise."""
    stored = [run for run in (baseline, target) if run.manifest.get("format") == CHECKPOINT_FORMAT]
    if len(stored) != 1:
        return ""
    return (
        f"{stored[0].path} is a checkpoint, which holds parameters only; compare it with a checkpoint, or with a run "
        "captured with params=true"
    )
