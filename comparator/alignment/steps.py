"""Step matching: which step of the target is which of the baseline, for tensors without token rows."""

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
    """Matched steps."""

    baseline_of: Mapping[int, int]
    """Target step -> baseline step."""
    note: str = ""
    """Assumptions made."""
    is_by_rows: bool = False
    """Whether steps are matched by equal rows, so that a step without a partner is not missing anything."""


class StepMatcher:
    """Matches the steps of one comparison.

    A tensor that depends on the rows of its step (a mask, a loss) is matched with a step of the same rows, in the same
    slots of the same grid and with the same history. A vector may have its padding elsewhere, and a scalar its
    requests in another order. Everything else (parameters, runs without row tables) is matched by step number; if the
    runs have no number in common, in order, with a note.
    """

    def __init__(self, rows: RowMap, shift: int = 0) -> None:
        """``shift``: target step number minus baseline step number."""
        self.shift = shift
        self._rows = rows
        self._found: dict[int, Mapping[int, int]] = {}
        left, right = ({step for step, _ in side.at} for side in (rows.baseline, rows.target))
        self._with_rows = left, right

    def by_rows(self, num_axes: int, baseline: Iterable[int] = (), target: Iterable[int] = ()) -> StepPairs:
        """Steps that hold the same rows, for tensors with this number of axes; needs row tables of both runs.

        ``baseline`` and ``target`` are the steps of the site. Those that hold no rows in a run whose other steps do, as
        of a vision tower, a denoiser or a VAE, are matched by number, or in order if both are equally many, since the
        numbers count the calls of other models, too.
        """
        kind = min(num_axes, 2)
        if kind not in self._found:
            pairs = self._by_rows(_FORMS[kind])
            self._found[kind] = self._of_like_past(pairs) if kind == 2 else pairs
        left, right = sorted(set(baseline) - self._with_rows[0]), sorted(set(target) - self._with_rows[1])
        if not left or not right:
            return StepPairs(self._found[kind], is_by_rows=True)
        rest = self.by_number(left, right)
        if len(left) == len(right) and len(rest.baseline_of) < len(left):
            note = f"{ROWLESS_IN_ORDER}, {left[0]} with {right[0]} and so on"
            rest = StepPairs(dict(zip(right, left, strict=True)), note)
        return StepPairs({**self._found[kind], **rest.baseline_of}, rest.note, is_by_rows=True)

    def by_number(self, baseline: Iterable[int], target: Iterable[int]) -> StepPairs:
        """Steps with equal numbers or, if there are none, in order."""
        numbers = set(baseline)
        left, right = sorted(numbers), sorted(set(target))
        equal = {step: step - self.shift for step in right if step - self.shift in numbers}
        if equal or not left or not right or self.shift:
            return StepPairs(equal)
        note = f"{IN_ORDER}, {left[0]} with {right[0]} and so on"
        return StepPairs(dict(zip(right, left, strict=False)), note)

    def _of_like_past(self, partners: Mapping[int, int]) -> dict[int, int]:
        """The steps whose requests were batched alike before as well, so that keys of attention are at the same
        places."""
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
        """Target step -> baseline step that holds exactly the same rows."""
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
"""Number of axes (2 for more) -> what must be equal in two steps."""
