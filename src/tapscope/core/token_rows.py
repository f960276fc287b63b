"""RowReader: infers the token rows that a step computes from the arguments of the model's forward.

Hosts that report their rows do not need it. For others, the token ids and accompanying arguments determine the rows:
positions or position ids, lengths (SGLang's ``seq_lens``, the ``cu_seqlens`` of packed sequences), request ids or
slots, and an attention mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tapscope.core.observe import RowSpan, StepInfo

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a model's forward as arrays; None if unknown."""

    ids: Array
    """[tokens] packed, or [batch, sequence]."""
    positions: Array | None = None
    """[tokens], [batch, sequence] or [1, sequence]; [3, tokens] for three-component positions (M-RoPE)."""
    lengths: Array | None = None
    """[requests]: number of tokens in this step, or length of the whole context including them (SGLang's
    ``seq_lens``)."""
    real_lengths: Array | None = None
    """[requests]: lengths without the trailing padding that :attr:`lengths` includes; None: no padding."""
    names: Sequence[str] = ()
    """Request ids, or the numbers of the requests' slots."""
    mask: Array | None = None
    """[batch, sequence or longer]: 0 for padding rows."""


@dataclass(slots=True)
class RowReader:
    """Infers the rows of consecutive steps; requests without an id are recognized by their next position."""

    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Generated id -> (next position, last step), for requests without an id."""
    num_ambiguous: int = 0
    """Number of spans that could continue several equally recent requests; the first candidate was chosen."""

    def read(self, step: int, phase: str, given: Arguments, shard: tuple[int, int] = (0, 1)) -> StepInfo | None:
        """Return the step, or None if its rows cannot be inferred.

        ``shard`` is the rank's index in the context-parallel group and the size of that group.
        """
        ids = given.ids
        if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.size:
            return None
        if (zigzag := self._zigzag(step, phase, given, shard)) is not None:
            return zigzag
        packed = ids.ndim == 1 or (len(ids) == 1 and given.lengths is not None and len(given.lengths) > 1)
        return self._packed(step, phase, given) if packed else _padded(step, phase, given)

    def _packed(self, step: int, phase: str, given: Arguments) -> StepInfo | None:
        tokens = given.ids.reshape(-1).astype(np.int64)
        positions = _flat(given.positions, len(tokens))
        spans = _spans(len(tokens), positions, given.lengths)
        if spans is None:
            return None
        spans = _without_padding(spans, given)
        if not spans:
            return None
        names = given.names if len(given.names) == len(spans) else self._names(spans, step)
        rows = tuple(RowSpan(name, first, n, 0, slot) for name, (slot, first, n) in zip(names, spans, strict=True))
        kept = np.concatenate([tokens[slot : slot + n] for slot, _, n in spans])
        grid = given.ids.shape
        return StepInfo(step=step, phase=phase, grid=grid, rows=rows, token_ids=tuple(kept.tolist()))

    def _zigzag(self, step: int, phase: str, given: Arguments, shard: tuple[int, int]) -> StepInfo | None:
        """Return the step for packed sequences in Megatron's THD layout under context parallelism, or None for other
        calls.

        Each rank holds two chunks of every sequence, at equal distance from start and end. ``lengths`` are those of
        whole sequences, ``ids`` are local to the rank, padding comes last. Also None if the given positions do not
        match the chunks.
        """
        place, size = shard
        if size < 2 or given.lengths is None:
            return None
        lengths = given.lengths.reshape(-1).astype(np.int64)
        total = int(lengths.sum())
        if not 0 < total <= size * given.ids.size or (lengths < 0).any() or (lengths % (2 * size)).any():
            return None
        chunks = [
            (number, first, int(length) // (2 * size))
            for number, length in enumerate(lengths)
            for first in (place * int(length) // (2 * size), (2 * size - 1 - place) * int(length) // (2 * size))
        ]
        places = np.concatenate([np.arange(first, first + count) for _, first, count in chunks])
        positions = _flat(given.positions, given.ids.size)
        if positions is not None and not np.array_equal(positions[: len(places)], places):
            return None
        whole = [(int(end - n), 0, int(n)) for end, n in zip(np.cumsum(lengths), lengths, strict=True)]
        names = given.names if len(given.names) == len(whole) else self._names(whole, step)
        names = ["0"] if len(whole) == 1 and given.ids.ndim == 2 else names  # same name as in a padded batch of one
        slots = np.cumsum([0, *(count for _, _, count in chunks)])
        ends = lengths if given.real_lengths is None else given.real_lengths.reshape(-1)
        real = [max(min(count, int(ends[number]) - first), 0) for number, first, count in chunks]
        rows = tuple(
            RowSpan(names[number], first, count, 0, int(slot))
            for (number, first, _), slot, count in zip(chunks, slots[:-1], real, strict=True)
            if count
        )
        ids = given.ids.reshape(-1)
        kept = np.concatenate([ids[row.slot : row.slot + row.count] for row in rows] or [ids[:0]]).tolist()
        return StepInfo(step=step, phase=phase, grid=given.ids.shape, rows=rows, token_ids=tuple(kept))

    def _names(self, spans: "Sequence[_Span]", step: int) -> list[str]:
        """Return the request that each span continues, most recent first; a new request if none expects this
        position."""
        requests: list[str] = []
        by_next_position: dict[int, list[str]] = {}
        for name, (end, _) in sorted(self.ends.items(), key=lambda item: -item[1][1]):  # stable sort
            by_next_position.setdefault(end, []).append(name)
        for _, first, count in spans:
            names = by_next_position.get(first, []) if first else []
            self.num_ambiguous += len(names) > 1 and self.ends[names[0]][1] == self.ends[names[1]][1]
            name = names.pop(0) if names else str(len(self.ends))
            self.ends[name] = first + count, step
            requests.append(name)
        return requests


_Span = tuple[int, int, int]
"""(first slot, position at that slot, number of rows) of one request."""


def _without_padding(spans: "list[_Span]", given: Arguments) -> "list[_Span]":
    """Return the spans without the padding after each sequence."""
    if given.real_lengths is None or given.lengths is None:
        return spans
    ends = given.real_lengths.reshape(-1)[given.lengths.reshape(-1) > 0].tolist()
    if len(ends) != len(spans):
        return spans
    real = [(slot, first, min(n, end - first)) for (slot, first, n), end in zip(spans, ends, strict=True)]
    return [span for span in real if span[2] > 0]


def _flat(positions: Array | None, count: int) -> Array | None:
    """Return one position per row, or None on a size mismatch; for M-RoPE, the first component (text position)."""
    if positions is None:
        return None
    if positions.ndim == 2 and positions.shape[0] == 3 and positions.shape[1] == count:
        positions = positions[0]
    flat = positions.reshape(-1).astype(np.int64)
    return flat if len(flat) == count else None


def _spans(count: int, positions: Array | None, lengths: Array | None) -> list[_Span] | None:
    """Split the rows into spans of consecutive positions, one request each; None if the arguments are inconsistent.

    A context of ``L`` tokens whose first row in this step is at position ``p`` has ``L - p`` rows: a whole prompt, the
    rest after a cached prefix, or the single token of a decode step. Rows after the last request are padding.
    """
    if positions is None:
        return _spans_by_length(count, lengths)
    cuts = [0, *(np.flatnonzero(positions[1:] != positions[:-1] + 1) + 1).tolist(), count]
    pieces = [(a, int(positions[a]), b - a) for a, b in pairwise(cuts)]
    if lengths is None:
        return pieces
    spans, slot = [], 0
    for length in lengths.reshape(-1).astype(np.int64).tolist():
        if slot >= count:
            return None
        first = int(positions[slot])
        rows = length - first
        if rows <= 0 or slot + rows > count or positions[slot + rows - 1] != length - 1:
            return pieces if len(pieces) == lengths.size else None
        spans.append((slot, first, rows))
        slot += rows
    return spans


def _spans_by_length(count: int, lengths: Array | None) -> list[_Span] | None:
    """Split the rows without positions: one token per request, or whole prompts, possibly followed by padding."""
    if lengths is None:
        return None
    sizes = lengths.reshape(-1).astype(np.int64)
    if len(sizes) == count and sizes.sum() != count:
        return [(i, int(n) - 1, 1) for i, n in enumerate(sizes)]
    if not 0 < sizes.sum() <= count or (sizes < 0).any():
        return None
    starts = np.cumsum(sizes) - sizes
    return [(int(a), 0, int(n)) for a, n in zip(starts, sizes, strict=True) if n]


def _padded(step: int, phase: str, given: Arguments) -> StepInfo | None:
    batch, length = given.ids.shape
    positions = np.arange(length) if given.positions is None else given.positions
    if positions.size not in (length, batch * length):
        return None
    places = np.broadcast_to(positions.reshape(-1, length), (batch, length))
    valid = np.ones((batch, length), bool)
    if given.mask is not None and given.mask.ndim == 2 and given.mask.shape[0] == batch:
        valid = np.asarray(given.mask)[:, -length:].astype(bool)
    elif given.lengths is not None and given.lengths.size == batch and given.positions is not None:
        valid = places < given.lengths.reshape(-1, 1)
    elif given.lengths is not None and given.lengths.size == batch:
        valid = np.arange(length) < given.lengths.reshape(-1, 1)
    names = given.names if len(given.names) == batch else [str(i) for i in range(batch)]
    return None if valid.shape != (batch, length) else padded_step(step, phase, given.ids, places, valid, names)


def padded_step(
    step: int,
    phase: str,
    ids: Sequence[Sequence[int]] | Array,
    positions: Sequence[Sequence[int]] | Array,
    valid: Sequence[Sequence[bool]] | Array,
    requests: Sequence[str],
) -> StepInfo:
    """Return the step for a padded ``[batch, sequence]`` grid; rows that are not ``valid`` are padding."""
    tokens, places = np.asarray(ids, np.int64), np.asarray(positions, np.int64)
    real = np.asarray(valid, bool)
    if not real.any():
        return StepInfo(step=step, phase=phase, grid=tokens.shape)
    # A span ends where a row is padding or the next position is not consecutive.
    follows = np.zeros_like(real)
    follows[:, 1:] = real[:, 1:] & real[:, :-1] & (places[:, 1:] == places[:, :-1] + 1)
    starts = np.flatnonzero(real & ~follows)
    counts = np.add.reduceat(real.reshape(-1).astype(np.int64), starts)
    length = tokens.shape[1]
    runs = tuple(
        RowSpan(requests[slot // length], int(places.reshape(-1)[slot]), int(count), 0, int(slot))
        for slot, count in zip(starts, counts, strict=True)
    )
    return StepInfo(step=step, phase=phase, grid=tokens.shape, rows=runs, token_ids=tokens[real].tolist())
