"""Open, the first stage: select the records of both runs and match their token rows."""

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.forks import find_forks
from tapscope.comparator.alignment.request_history import follow_requests
from tapscope.comparator.alignment.requests import match_requests
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.alignment.row_pairing import RowPairing, RowPairingSide
from tapscope.comparator.matching.selection import num_non_tensors, select, without_non_tensors
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.options.overrides import SIDES, override_dims, side_entries
from tapscope.comparator.runs.call_index import index_calls_by_argument
from tapscope.comparator.runs.call_tags import index_calls_by_tags
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.runs.grids import (
    SideRows,
    TokenGrids,
    draft_steps_of,
    lineages,
    recorded_grids_of,
    select_grids,
)
from tapscope.comparator.runs.lazy_records import lazy_records
from tapscope.comparator.runs.pipeline_stages import NumberedRecords, number_across_ranks
from tapscope.comparator.runs.token_grid_inference import inferred_grids, repeated_call_notes
from tapscope.comparator.runs.token_ids import TokenIds
from tapscope.core.formatting import plural
from tapscope.core.gc_control import trim_heap
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run


class OpenedRuns(Struct, frozen=True):
    """The selected records of both runs, before their sites are matched."""

    baseline: Run
    target: Run
    options: CompareOptions
    numbered: tuple[NumberedRecords, NumberedRecords]
    """All records, with model-wide layer and expert numbers and the user's dims."""
    records: tuple[Records, Records]
    """The selected records that have a value and are not corrupt."""
    num_objects: tuple[int, int]
    """Number of selected records of objects without a value, per run."""
    rows: RowMap
    corrupt: tuple[CorruptRecords, CorruptRecords]
    """The excluded records of each run."""

    @property
    def runs(self) -> tuple[Run, Run]:
        """Baseline and target."""
        return self.baseline, self.target

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions made, one sentence each."""
        return *self.numbered[0].notes, *self.numbered[1].notes, *_step_notes(self.options, self.rows)


def open_runs(
    baseline: Run, target: Run, options: CompareOptions, corrupt: tuple[CorruptRecords, CorruptRecords]
) -> OpenedRuns:
    """Select the records to compare, without those in ``corrupt``; records found missing here are added to ``corrupt``.

    Raises RuleError for a selection that matches nothing, DimsError for invalid dims, and RunCorruptError if no value
    of a run is intact.
    """
    runs = baseline, target
    # Sites: model-wide numbers, calls separated by an argument or by tags, and the user's dims.
    dims = (*options.dims, *options.mapping.dims)
    named = index_calls_by_argument(
        (
            number_across_ranks(baseline, side_entries(dims, SIDES[0])),
            number_across_ranks(target, side_entries(dims, SIDES[1])),
        )
    )
    named = override_dims(runs, index_calls_by_tags(named), dims)
    # Records: the user's selection, without objects that have no value and without corrupt records.
    chosen = select(runs, named, options)
    drafts, draft_notes = _unpaired_drafts(runs)
    chosen = _without_steps(chosen[0], drafts[0]), _without_steps(chosen[1], drafts[1])
    left, right = (
        lazy_records(run, corrupt[i].intact(without_non_tensors(chosen[i]), verify=options.verify))
        for i, run in enumerate(runs)
    )
    counts = num_non_tensors(chosen[0], options), num_non_tensors(chosen[1], options)
    rows = map_rows(baseline, target, options)
    rows = structs.replace(rows, notes=(*rows.notes, *draft_notes))
    return OpenedRuns(baseline, target, options, named, (left, right), counts, rows, corrupt)


def _unpaired_drafts(runs: tuple[Run, Run]) -> tuple[tuple[frozenset[int], frozenset[int]], list[str]]:
    """Return the draft model's steps of each run if only one run has any, and a note about these steps."""
    left, right = draft_steps_of(runs[0]), draft_steps_of(runs[1])
    if bool(left) == bool(right):
        return (frozenset(), frozenset()), []
    run, count = (runs[0], len(left)) if left else (runs[1], len(right))
    return (left, right), [f"{run.name} has {plural(count, 'step')} of a draft model, which are not compared"]


def _without_steps(records: Records, steps: frozenset[int]) -> Records:
    return records if not steps else records.take(np.flatnonzero(~np.isin(records.step, list(steps))))


def _step_notes(options: CompareOptions, rows: RowMap) -> list[str]:
    """Describe the effect of ``--concat-steps`` and ``--shift-steps``; neither affects tensors with known token
    rows."""
    if options.concat_steps:
        ignored = "ignored, since token rows are matched by request and position"
        applied = "the steps of each site were concatenated in order"
        return [f"--concat-steps: {ignored if rows.known else applied}"]
    if not options.shift_steps or not rows.known:
        return []
    reason = "token rows are matched by request and position whatever their steps"
    return [f"--shift-steps {options.shift_steps}: {reason}; it applies to --steps, parameters and plain values"]


def map_rows(baseline: Run, target: Run, options: CompareOptions | None = None) -> RowMap:
    """Pair the token rows of the selected steps and ranks of both runs."""
    options = options or CompareOptions()
    runs = baseline, target
    token_grids = [_token_grids(run, options.steps_of(side), options.ranks) for side, run in enumerate(runs)]
    drafts, _ = _unpaired_drafts(runs)
    token_grids = [
        structs.replace(one, grids=tuple(grid for grid in one.grids if grid.step not in drafts[side]))
        for side, one in enumerate(token_grids)
    ]
    without_rows = [run.name for run, one in zip(runs, token_grids, strict=True) if not one.grids]
    if without_rows:
        subject = f"{without_rows[0]} does not record" if len(without_rows) == 1 else "neither run records"
        note = f"{subject} which token rows the steps hold: tensors are compared whole, step by step"
        has_rows = any(run.manifest.get("format") != CHECKPOINT_FORMAT for run in runs)
        return RowMap(SideRows({}), SideRows({}), notes=(note,) if has_rows else ())
    left, right = (
        follow_requests(one.grids, lineages(run, one.grids)) for run, one in zip(runs, token_grids, strict=True)
    )
    padding = left.padding_sequences(), right.padding_sequences()
    matching = match_requests((baseline.name, target.name), left.requests, right.requests, padding)
    forks, unchecked = find_forks(left.requests, right.requests, matching.pairs)
    for request in (*left.requests, *right.requests):
        request.tokens = TokenIds()  # there may be millions, and they are not needed again
    trim_heap()
    pairing = RowPairing((RowPairingSide(left), RowPairingSide(right, options.shift_steps)))
    pairing.enter(matching.pairs, forks, matching.padding)
    notes = (*token_grids[0].notes, *token_grids[1].notes, *matching.notes, *unchecked)
    row_map = pairing.row_map(forks, notes, (*token_grids[0].doubts, *token_grids[1].doubts, *matching.problems))
    del left, right, pairing
    trim_heap()
    return row_map


def _token_grids(run: Run, steps: frozenset[int] | None, ranks: frozenset[int] | None) -> TokenGrids:
    """Return the recorded token grids, replaced by grids inferred from recorded model arguments where these exist."""
    recorded = recorded_grids_of(run, steps, ranks)
    read = inferred_grids(run, frozenset(grid.step for grid in recorded), steps)
    better = {grid.step for grid in read.grids}
    grids = [grid for grid in recorded if grid.step not in better] + select_grids(read.grids, ranks)
    again = repeated_call_notes(run, frozenset(grid.step for grid in recorded) - better)
    return structs.replace(
        read,
        notes=(*read.notes, *again),
        grids=tuple(sorted(grids, key=lambda grid: (grid.step, grid.micro or 0, grid.ranks))),
    )
