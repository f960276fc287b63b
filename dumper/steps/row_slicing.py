"""Row slicing: the part of a tensor that a rule keeps, by token rows or by request."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tapscope.core.observe import StepInfo
from tapscope.run_format.record import Slice

Ranges = tuple[tuple[int, int], ...]


class SlicedTensor(NamedTuple):
    """The sliced tensor."""

    tensor: torch.Tensor
    rows: Ranges | None = None
    """Slots of the step's grid that its first axis holds; None for all of them, or when unknown."""
    slice: Slice | None = None


def rows_per_token(tensor: torch.Tensor, dims: str | None, info: StepInfo) -> int | None:
    """How many consecutive rows of a packed tensor belong to each token, or to a padding row at the end of the step.

    1 where the first of ``dims`` is ``t``; the number of experts of a token where it is ``pair``. None for other
    tensors.
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
    """``(3, 4, 5, 9)`` -> ``((3, 3), (9, 1))``: the form of :attr:`Record.rows`."""
    if slots and tuple(slots) == tuple(range(slots[0], slots[0] + len(slots))):  # most, and at every step
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
    """The rows of ``requests`` (None: all), and of those the ones that ``rows`` selects.

    ``row_set`` are the slots that the first axis holds, if not the whole grid. Raises ValueError when rows of a request
    are wanted and the rows of the tensor are unknown.
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
    """The grid's slots that the leading axes hold; None when unknown."""
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
