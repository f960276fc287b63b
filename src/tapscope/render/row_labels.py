"""Row labels: the request and position of each row of a tensor."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tapscope.core import dims as dims_module
from tapscope.core.errors import DimsError
from tapscope.core.observe import RowSpan, again_words, row_label
from tapscope.run_format.ledger import StepLine
from tapscope.run_format.record import Record


class Place(NamedTuple):
    """Request, position and visit of a token row."""

    request: str
    position: int
    visit: int
    branch: int = 0
    """See :attr:`.RowSpan.branch`."""

    def __str__(self) -> str:
        return f"request {self.request}, position {self.position}{again_words(self.visit, self.branch)}"

    @property
    def label(self) -> str:
        """See :func:`.row_label`."""
        return row_label(self.request, self.position, self.branch)


@dataclass(frozen=True, slots=True)
class RowMap:
    """The mapping of a tensor's rows to token rows."""

    axes: tuple[int, ...]
    """Tensor axes that enumerate tokens: one if packed, two (batch, sequence) if padded."""
    sizes: tuple[int, ...]
    """Sizes of :attr:`axes`."""
    inferred: bool
    """True if inferred without dims: the leading axes have the sizes of the step's token grid."""
    slots: tuple[tuple[int, int], ...]
    """Slots of the step's token grid covered by the rows, as (first, count) in row order."""
    runs: tuple[RowSpan, ...]
    """The valid rows of the step."""

    @property
    def num_rows(self) -> int:
        """Number of token rows."""
        return math.prod(self.sizes)

    def place(self, row: int) -> Place | None:
        """Return the request and position of the flattened token row, or None for padding."""
        slot = self._slot(row)
        for run in self.runs:
            if slot is not None and run.slot <= slot < run.slot + run.count:
                return Place(run.request, run.position + slot - run.slot, run.visit, run.branch)
        return None

    def row_of(self, place: Place) -> int | None:
        """Return the flattened token row of a place, or None if the tensor does not contain it."""
        for run in self.runs:
            slot = run.slot + place.position - run.position
            is_run = (run.request, run.visit, run.branch) == (place.request, place.visit, place.branch)
            if is_run and run.slot <= slot < run.slot + run.count:
                before = 0
                for first, num in self.slots:
                    if first <= slot < first + num:
                        return before + slot - first
                    before += num
        return None

    def label(self, row: int) -> str:
        """Return the short label of a row for tables, see :func:`.row_label`; ``padding`` for padding."""
        place = self.place(row)
        return place.label if place else "padding"

    def describe(self, limit: int = 4) -> str:
        """Format the spans of positions in row order: ``request 0: 0-4, request 1: 0-1``."""
        stretches: list[tuple[str, int, int, int]] = []
        for first, num in self.slots:
            for run in self.runs:
                start, end = max(first, run.slot), min(first + num, run.slot + run.count)
                if start < end:
                    shift = run.position - run.slot
                    stretches.append((run.request, start + shift, end - 1 + shift, run.branch))
        shown = [
            row_label(f"request {name}", f" {a if a == b else f'{a}-{b}'}", branch)
            for name, a, b, branch in stretches[:limit]
        ]
        more = f", and {len(stretches) - limit} more" if len(stretches) > limit else ""
        return (", ".join(shown) or "padding only") + more

    def _slot(self, row: int) -> int | None:
        for first, num in self.slots:
            if row < num:
                return first + row
            row -= num
        return None


def row_map(record: Record, step: StepLine | None) -> RowMap | None:
    """Return the token rows of ``record``, or None if neither dims nor shape determine them.

    Dims take precedence (axis ``t``, or ``b`` and ``s``); without dims, the leading axes must have the sizes of the
    step's token grid.
    """
    if step is None or not step.info.rows:
        return None
    axes = _annotated_axes(record)
    inferred = axes is None
    if axes is None:
        grid = step.info.grid
        if not grid or record.shape[: len(grid)] != grid:
            return None
        axes = tuple(range(len(grid)))
    sizes = tuple(record.shape[axis] for axis in axes)
    slots = record.rows if record.rows is not None else ((0, math.prod(step.info.grid)),)
    if not sizes or sum(num for _, num in slots) != math.prod(sizes):
        return None
    return RowMap(axes, sizes, inferred, slots, step.rows)


def dims_words(record: Record) -> str:
    """Return the dims annotation, or the reason why it is missing or unusable."""
    if record.dims is None:
        return "not annotated"
    try:
        _checked_dims(record.dims, record)
    except DimsError as error:
        return f"unusable: {error}"
    return record.dims


def _checked_dims(text: str, record: Record) -> dims_module.Dims:
    dims = dims_module.parse(text)
    dims.check(record.shape)
    return dims


def _annotated_axes(record: Record) -> tuple[int, ...] | None:
    if record.dims is None:
        return None
    try:
        dims = _checked_dims(record.dims, record)
    except DimsError:
        return ()
    packed = dims.index("t")
    if packed is not None:
        return (packed,)
    batch, sequence = dims.index("b"), dims.index("s")
    return (batch, sequence) if batch is not None and sequence is not None else ()
