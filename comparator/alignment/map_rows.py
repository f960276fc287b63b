"""Map rows: the row map of two runs, from the row tables of their hosts or from the recorded arguments of the model."""

from msgspec import structs

from tapscope.comparator.alignment.forks import find_forks
from tapscope.comparator.alignment.request_history import follow_requests
from tapscope.comparator.alignment.requests import match_requests
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.alignment.row_pairing import RowPairing, RowPairingSide
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.runs.grids import SideRows, TokenGrids, lineages, recorded_grids_of, select_grids
from tapscope.comparator.runs.token_grid_inference import inferred_grids, repeated_call_notes
from tapscope.comparator.runs.token_ids import TokenIds
from tapscope.core.gc_control import trim_heap
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.run import Run


def map_rows(baseline: Run, target: Run, options: CompareOptions | None = None) -> RowMap:
    """Pair the rows of the selected steps and ranks of both runs."""
    options = options or CompareOptions()
    runs = baseline, target
    told = [_told(run, options.steps_of(side), options.ranks) for side, run in enumerate(runs)]
    mute = [run.name for run, one in zip(runs, told, strict=True) if not one.grids]
    if mute:
        who = f"{mute[0]} does" if len(mute) == 1 else "both runs do"
        note = f"{who} not record which token rows the steps hold: tensors are compared whole, step by step"
        has_rows = any(run.manifest.get("format") != CHECKPOINT_FORMAT for run in runs)
        return RowMap(SideRows({}), SideRows({}), notes=(note,) if has_rows else ())
    left, right = (follow_requests(one.grids, lineages(run, one.grids)) for run, one in zip(runs, told, strict=True))
    matching = match_requests((baseline.name, target.name), left.requests, right.requests)
    forks, unchecked = find_forks(left.requests, right.requests, matching.pairs)
    for request in (*left.requests, *right.requests):
        request.tokens = TokenIds()  # there may be millions, and they are not needed again
    trim_heap()
    work = RowPairing((RowPairingSide(left), RowPairingSide(right, options.shift_steps)))
    work.enter(matching.pairs, forks)
    notes = (*told[0].notes, *told[1].notes, *matching.notes, *unchecked)
    found = work.row_map(forks, notes, (*told[0].doubts, *told[1].doubts, *matching.problems))
    del left, right, work
    trim_heap()
    return found


def _told(run: Run, steps: frozenset[int] | None, ranks: frozenset[int] | None) -> TokenGrids:
    """The token grids that the host recorded, else those inferred from the recorded arguments of the model."""
    told = recorded_grids_of(run, steps, ranks)
    read = inferred_grids(run, frozenset(grid.step for grid in told), steps)
    better = {grid.step for grid in read.grids}
    grids = [grid for grid in told if grid.step not in better] + select_grids(read.grids, ranks)
    again = repeated_call_notes(run, frozenset(grid.step for grid in told) - better)
    return structs.replace(
        read,
        notes=(*read.notes, *again),
        grids=tuple(sorted(grids, key=lambda grid: (grid.step, grid.micro or 0, grid.ranks))),
    )
