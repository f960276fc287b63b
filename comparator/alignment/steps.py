"""Step matching: pair the steps of both runs, for tensors without token rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.row_map import PADDING, RowMap
from tapscope.comparator.runs.grids import StepRows

Array = np.ndarray[Any, Any]
IN_ORDER = "no step number is in both runs: steps are matched in order"
ROWLESS_IN_ORDER = "steps without token rows are matched in order"


class StepPairs(Struct, frozen=True):
    """The matched steps."""

    baseline_of: Mapping[int, int]
    """Target step -> baseline step."""
    note: str = ""
    """Assumptions behind the matching."""
    is_by_rows: bool = False
    """Whether steps are matched by equal rows; a step without a partner then does not count as missing."""


class StepMatcher:
    """Matches the steps of one comparison.

    A tensor that depends on the rows of its step (a mask, a loss) is matched with a step that holds the same rows in
    the same slots of the same grid, with the same history. For a vector, padding may be placed differently; for a
    scalar, the order of requests may differ too. All other tensors (parameters, runs without row tables) are matched by
    step number, or in order, with a note, if the runs have no step number in common.
    """

    def __init__(self, rows: RowMap, shift: int = 0) -> None:
        """Match steps of the runs of ``rows``; ``shift``: target step number minus baseline step number."""
        self.shift = shift
        self._rows = rows
        self._found: dict[int, Mapping[int, int]] = {}
        left, right = ({step for step, _ in side.at} for side in (rows.baseline, rows.target))
        self._with_rows = left, right

    def by_rows(self, num_axes: int, baseline: Iterable[int] = (), target: Iterable[int] = ()) -> StepPairs:
        """Pair the steps that hold the same rows, for tensors with ``num_axes`` axes; needs row tables of both runs.

        ``baseline`` and ``target`` are the steps of the site. Steps without rows in a run whose other steps have rows
        (a vision tower, a denoiser, a VAE) are matched by number. If numbers match only some of them and both sides
        have equally many, they are matched in order: the numbers also count calls of other models.
        """
        kind = min(num_axes, 2)
        if kind not in self._found:
            pairs = self._by_rows(_FORMS[kind])
            self._found[kind] = self._with_equal_history(pairs) if kind == 2 else pairs
        left, right = sorted(set(baseline) - self._with_rows[0]), sorted(set(target) - self._with_rows[1])
        if not left or not right:
            return StepPairs(self._found[kind], is_by_rows=True)
        rest = self.by_number(left, right)
        if len(left) == len(right) and len(rest.baseline_of) < len(left):
            note = f"{ROWLESS_IN_ORDER}, {left[0]} with {right[0]} and so on"
            rest = StepPairs(dict(zip(right, left, strict=True)), note)
        return StepPairs({**self._found[kind], **rest.baseline_of}, rest.note, is_by_rows=True)

    def by_number(self, baseline: Iterable[int], target: Iterable[int]) -> StepPairs:
        """Pair steps with equal numbers or, if there are none, in order."""
        numbers = set(baseline)
        left, right = sorted(numbers), sorted(set(target))
        equal = {step: step - self.shift for step in right if step - self.shift in numbers}
        if equal or not left or not right or self.shift:
            return StepPairs(equal)
        note = f"{IN_ORDER}, {left[0]} with {right[0]} and so on"
        return StepPairs(dict(zip(right, left, strict=False)), note)

    def _with_equal_history(self, partners: Mapping[int, int]) -> dict[int, int]:
        """Keep the steps whose requests were also batched alike in all earlier steps, so that attention keys are at the
        same positions."""
        kept: dict[int, int] = {}
        unlike: set[int] = set()
        for step, grids in self._rows.target.by_step().items():
            pairs = _valid(grids)
            requests = set(self._rows.pair_request[pairs[pairs >= 0]].tolist())
            if step in partners and not requests & unlike:
                kept[step] = partners[step]
            else:
                unlike |= requests
        return kept

    def _by_rows(self, form: Callable[[Sequence[StepRows]], bytes]) -> dict[int, int]:
        """Map each target step to the baseline step that holds exactly the same rows."""
        steps_of: dict[bytes, list[int]] = {}
        for step, grids in self._rows.baseline.by_step().items():
            valid = _valid(grids)
            if len(valid) and valid.min() >= 0:
                steps_of.setdefault(form(grids), []).append(step)
        partners = {}
        for step, grids in self._rows.target.by_step().items():
            same = steps_of.get(form(grids))
            if same:
                partners[step] = same[0]
        return partners


def _valid(grids: Sequence[StepRows]) -> Array:
    return np.concatenate([grid.pairs[grid.pairs != PADDING] for grid in grids])


def _everything(grids: Sequence[StepRows]) -> bytes:
    return b"".join(f"{grid.grid}".encode() + grid.pairs.tobytes() for grid in grids)


_FORMS: Mapping[int, Callable[[Sequence[StepRows]], bytes]] = {
    0: lambda grids: np.sort(_valid(grids)).tobytes(),
    1: lambda grids: _valid(grids).tobytes(),
    2: _everything,
}
"""Number of axes (2 for more) -> serialization of a step's grids that must be equal in matched steps."""
