"""Row slicing: selection of the token rows of a tensor that a rule keeps, by index or by request."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tapscope.core.observe import StepInfo
from tapscope.run_format.record import Slice

Ranges = tuple[tuple[int, int], ...]


class SlicedTensor(NamedTuple):
    """The selected rows of a tensor, with their slots in the step's grid."""

    tensor: torch.Tensor
    rows: Ranges | None = None
    """(first, count) ranges of the grid slots along the first axis; None for all slots, or if unknown."""
    slice: Slice | None = None
    """The applied slice and the shape of the whole tensor; None if not sliced by index."""


def rows_per_token(tensor: torch.Tensor, dims: str | None, info: StepInfo) -> int | None:
    """Return the number of consecutive rows of a packed tensor per token or padding row; None for other tensors.

    1 if the first of ``dims`` is ``t``, the number of experts per token if it is ``pair``.
    """
    padded = info.grid[0] + info.num_padding if info.grid else 0
    if not (padded and tensor.ndim):
        return None
    count, rest = divmod(len(tensor), padded)
    if rest or not count:
        return None
    named = dims or ""
    return count if (named.startswith("t") and count == 1) or named.startswith("pair") else None


def slots_as_ranges(slots: Sequence[int]) -> Ranges:
    """Return slots as (first, count) ranges, as in :attr:`Record.rows`: ``(3, 4, 5, 9)`` -> ``((3, 3), (9, 1))``."""
    if slots and tuple(slots) == tuple(range(slots[0], slots[0] + len(slots))):  # fast path for the common case
        return ((slots[0], len(slots)),)
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][0] + ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((slot, 1))
    return tuple(ranges)


def slice_rows(
    tensor: torch.Tensor,
    info: StepInfo,
    row_set: Sequence[int] | None,
    rows: slice | None,
    requests: frozenset[str] | None,
) -> SlicedTensor:
    """Select the rows of ``requests`` (None: all rows), and then the slice ``rows`` of these.

    ``row_set`` gives the grid slots along the first axis, if these are not the whole grid. Raises ValueError if
    ``requests`` is given and the slots of the tensor's rows are unknown.
    """
    shape = tuple(tensor.shape)
    slots = _slots(shape, info, row_set)
    depth = len(info.grid) if slots is not None and row_set is None else 1
    if requests is not None:
        if slots is None:
            raise ValueError(
                f"rows of requests {', '.join(sorted(requests))} asked for, and the step's grid is unknown"
            )
        wanted = {run.slot + i for run in info.rows if run.request in requests for i in range(run.count)}
        chosen = [index for index, slot in enumerate(slots) if slot in wanted]
    else:
        chosen = list(range(len(slots) if slots is not None else shape[0] if shape else 0))
    note = None
    if rows is not None:
        chosen = chosen[rows]
        if requests is None:
            note = Slice(rows.indices(len(slots) if slots is not None else shape[0] if shape else 0), shape)
    flat = tensor.flatten(0, depth - 1) if depth > 1 else tensor
    kept = _select(flat, chosen)
    return SlicedTensor(kept, None if slots is None else slots_as_ranges([slots[index] for index in chosen]), note)


def _slots(shape: tuple[int, ...], info: StepInfo, row_set: Sequence[int] | None) -> Sequence[int] | None:
    """Return the grid slots along the leading axes of a tensor; None if unknown."""
    if row_set is not None:
        return row_set if shape and shape[0] == len(row_set) else None
    if not info.grid or shape[: len(info.grid)] != tuple(info.grid):
        return None
    return range(torch.Size(info.grid).numel())


def _select(tensor: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    ranges = slots_as_ranges(chosen)
    if len(ranges) == 1:
        return tensor.narrow(0, *ranges[0])
    return torch.cat([tensor.narrow(0, first, count) for first, count in ranges]) if ranges else tensor[:0]
