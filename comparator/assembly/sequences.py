"""Sequence lengths of a step whose tokens were distributed over context-parallel ranks."""

import math
from collections.abc import Sequence
from itertools import pairwise

from tapscope.comparator.assembly.pieces import Piece, leaves
from tapscope.comparator.assembly.shards import AssemblyError
from tapscope.core.axes import Dim, Shard
from tapscope.run_format.run import Run


def interleaved_lengths(run: Run, parts: Sequence[Piece], axis: int, dim: Dim, shard: Shard) -> list[int] | None:
    """Lengths of the sequences that were interleaved over the shards; None if the axis was cut into contiguous parts.

    Packed tokens ``t`` are distributed sequence by sequence, as in Megatron-core and SGLang under context parallelism;
    ``s`` is one sequence. Raises AssemblyError for an order that cannot be undone.
    """
    total = sum(part.shape[axis] for part in parts)
    zigzag, packed = shard.order == "zigzag", dim.names == ("t",)
    if zigzag and not packed and dim.names != ("s",):
        raise AssemblyError(f"zigzag order applies to the axes s and t, not to '{dim}'")
    if not packed or not (zigzag or shard.axis.endswith("cp")):
        return [total] if zigzag else None
    key = next(leaves(parts[0])).key
    lengths = sequence_lengths(run, key.step, key.rank)
    if zigzag and not lengths:
        raise AssemblyError(
            f"'{dim}' is distributed sequence by sequence, but no row table of step {key.step} has their lengths: "
            "capture with rows, or name the axis s if it is one sequence"
        )
    divide = len(lengths) > 1 and all(length % len(parts) == 0 for length in lengths)
    return lengths if zigzag or (divide and sum(lengths) <= total) else None


def sequence_lengths(run: Run, step: int, rank: int) -> list[int]:
    """Token slots of each sequence of a step, padding included, from the rank's row table; empty if unknown."""
    line = run.steps.get(step, {}).get(rank)
    if line is None or not line.info.grid or not line.info.rows:
        return []
    if len(line.info.grid) == 2:
        return [line.info.grid[1]] * line.info.grid[0]
    rows = sorted(line.info.rows, key=lambda row: row.slot)
    others = [row.slot for before, row in pairwise(rows) if row.request != before.request]
    return [stop - start for start, stop in pairwise([0, *others, math.prod(line.info.grid)])]
