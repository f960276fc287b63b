"""Request history: the requests that a run computed, with all their token rows, derived from the grids of its steps.

A name does not yet identify a request. A batch index ("0", "1", …) names a different request in every call, an id may
be reused after its request has finished, and a request may be computed more than once (preemption, a growing prompt, an
epoch). A *round* begins each time a name starts again at its first position; rounds with consistent tokens are one
request.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from msgspec import Struct, field

from tapscope.comparator.runs.grids import Grid
from tapscope.comparator.runs.token_ids import TokenIds
from tapscope.core.observe import RowSpan

Array = np.ndarray[Any, Any]
NEVER = np.iinfo(np.int64).max


class Request(Struct, eq=False):
    """One request of one run, with its known tokens."""

    name: str
    part: int
    """Index among the requests of this name: 0 for the first."""
    step: int
    """Step that first computed the request."""
    first: int
    """Lowest computed position."""
    end: int
    """Highest computed position, plus 1."""
    prompt_end: int
    """Position after the last prompt token."""
    tokens: TokenIds = field(default_factory=TokenIds)

    @property
    def label(self) -> str:
        """The name, with the step appended if the name alone is ambiguous."""
        return f"{self.name} (step {self.step})" if self.part else self.name

    @property
    def is_one_repeated_token(self) -> bool:
        """Whether the request has a generated name and consists of one token, repeated at least once."""
        _, known = self.tokens.columns()
        return is_generated_name(self.name) and len(known) > 1 and bool((known == known[0]).all())

    @property
    def text(self) -> bytes:
        """Token ids from :attr:`first` on as big-endian int64; empty if some are unknown."""
        _, known = self.tokens.columns()
        return known.astype(">i8").tobytes() if len(known) == self.end - self.first else b""


class RequestHistory(Struct, frozen=True):
    """The requests of one run and all their rows, as columns of equal length in order of computation."""

    grids: tuple[Grid, ...]
    requests: tuple[Request, ...]
    request: Array
    """[rows] index into :attr:`requests`."""
    position: Array
    visit: Array
    """[rows] visit as recorded by the host."""
    is_recomputed: Array
    """[rows] int: how often the same (request, position) was computed before."""
    is_replaced: Array
    """[rows] bool: computed for, or after, a token that was replaced later, such as a rejected draft."""
    grid: Array
    """[rows] index into :attr:`grids`."""
    slot: Array
    branch: Array
    """[rows] see :attr:`.RowSpan.branch`; rows of a branch do not belong to any token of the final request."""

    def padding_sequences(self) -> frozenset[int]:
        """Return the indices of unnamed requests that look like padding of packed batches: one repeated token, at the
        end of a batch."""
        ends = np.append(np.flatnonzero(np.diff(self.grid)), len(self.grid) - 1) if len(self.grid) else ()
        begins = np.append(0, np.add(ends, 1)[:-1]).astype(np.int64)
        last: set[int] = set()
        for begin, end in zip(begins.tolist(), np.asarray(ends).tolist(), strict=True):
            shape = self.grids[self.grid[end]].shape
            if math.prod(shape[:-1]) == 1 and self.request[begin] != self.request[end]:
                last.add(int(self.request[end]))
        return frozenset(i for i in last if self.requests[i].is_one_repeated_token)


class _Chunk(Struct):
    """A span of adjacent rows, and the position from which later tokens replaced the span's own."""

    grid: int
    run: RowSpan
    stale_from: int = NEVER


class _Round(Struct):
    """The rows computed for a name since it last started at its first position."""

    request: Request
    chunks: list[_Chunk] = field(default_factory=list)


_Parts = list[tuple[int, RowSpan, Sequence[int]]]
"""(grid index, rows, tokens of the rows) of one thread in one step."""
_Thread = tuple[str, int, int]
"""(name, lineage, sequence within a packed batch row): identifies a request from one step to the next."""


def follow_requests(grids: Sequence[Grid], lineage: Mapping[int, int]) -> RequestHistory:
    """Reconstruct the requests from the grids of all steps.

    ``lineage`` maps a rank to its lineage: on ranks of different lineages, an equal generated name is a different
    request.
    """
    rounds: dict[_Thread, list[_Round]] = {}
    for _, here in groupby(enumerate(grids), key=lambda item: (item[1].step, item[1].micro)):
        together = [item for item in here if item[1].rows]
        parts_of_thread: dict[_Thread, _Parts] = {}
        for index, grid in together:
            _collect(parts_of_thread, index, grid, lineage.get(grid.ranks[0], 0), alone=len(together) == 1)
        for thread, parts in parts_of_thread.items():
            _advance(rounds.setdefault(thread, []), thread[0], parts, together[0][1])
    requests: list[Request] = []
    chunks: list[tuple[int, _Chunk]] = []
    parts_of: Counter[str] = Counter()
    for (name, *_), mine in rounds.items():
        parts_of[name] += _merge(mine, requests, chunks, parts_of[name])
    return _columns(grids, requests, chunks)


def _collect(parts_of_thread: dict[_Thread, _Parts], index: int, grid: Grid, line: int, *, alone: bool) -> None:
    """Add a grid's rows to the parts of each thread in this step.

    A batch row of a padded model may hold several packed sequences under one generated name. A new sequence begins
    where positions go back, or jump ahead while no other rank holds the positions between. Neither applies to a tree of
    drafts.
    """
    start = 0
    threads: dict[str, int] = {}
    last: dict[str, int] = {}
    for run in grid.rows:
        name, position, end = run.request, run.position, start + run.count
        part = index, run, grid.tokens[start:end]
        start = end
        if not is_generated_name(name):
            parts_of_thread.setdefault((name, 0, 0), []).append(part)
            continue
        thread = threads.get(name, 0)
        if name in last and name not in grid.drafts and (position < last[name] or (alone and position != last[name])):
            thread = threads[name] = thread + 1
        last[name] = position + run.count
        parts_of_thread.setdefault((name, line, thread), []).append(part)


@lru_cache(maxsize=4096)
def is_generated_name(name: str) -> bool:
    """Return whether a request name is a plain number: a batch index or counter, which identifies nothing across
    runs."""
    return name.strip("#").isdecimal()


def _advance(rounds: list[_Round], name: str, parts: _Parts, grid: Grid) -> None:
    """Append the ``parts`` that a thread computed in the step of ``grid`` to its rounds, starting a new round if
    needed."""
    branches = [_Chunk(index, run) for index, run, _ in parts if run.branch]
    if branches and rounds:
        rounds[-1].chunks += branches
        parts = [part for part in parts if not part[1].branch]
        if not parts:
            return
    start, end = parts[0][1].position, parts[0][1].position + parts[0][1].count
    for _, run, _ in parts[1:]:
        start, end = min(start, run.position), max(end, run.position + run.count)
    if not rounds or start <= rounds[-1].request.first:
        rounds.append(_Round(Request(name, 0, grid.step, start, start, end)))
    current = rounds[-1]
    request, before = current.request, current.request.end
    kept_ends = _kept_ends(parts, end, grid, name)
    if (
        name not in grid.drafts
        and start == request.prompt_end
        and (grid.phase == "prefill" or (grid.phase != "decode" and end - start > 1))
    ):
        request.prompt_end = end
    branch = NEVER  # position where a tree of drafts branches within the step: the accepted branch is unknown
    for (index, run, given), kept_end in zip(parts, kept_ends, strict=True):
        tokens = given[: max(kept_end - run.position, 0)]
        changed = _replace(current, run.position, tokens) if run.position < request.end and tokens else None
        chunk, end = _Chunk(index, run), run.position + run.count
        current.chunks.append(chunk)
        if end > kept_end:
            chunk.stale_from, end = kept_end, max(kept_end, run.position)
        request.end = max(request.end, end)
        if changed is not None and changed >= before:
            branch = min(branch, changed)
        if end > branch:
            chunk.stale_from = branch
            tokens = tokens[: max(branch - run.position, 0)]
        if len(tokens) == 1:
            request.tokens[run.position] = tokens[0]
        elif len(tokens):
            request.tokens.put(run.position, tokens[: run.count])


def _kept_ends(parts: _Parts, end: int, grid: Grid, name: str) -> list[int]:
    """Return for each part the position before which its rows were kept; ``end`` is the position after the step's last
    row."""
    accepted = grid.branches.get(name)
    if accepted is None:
        rejected = grid.rejected.get(name, 0)
        return [end - rejected if rejected else NEVER] * len(parts)
    row = -(sum(run.count for _, run, _ in parts) - grid.drafts[name])  # row 0 is the first draft
    ends = []
    for _, run, _ in parts:
        kept = 0
        while kept < run.count and (row + kept < 0 or row + kept in accepted):
            kept += 1
        row += run.count
        ends.append(run.position + kept)
    return ends


def _replace(current: _Round, start: int, tokens: Sequence[int]) -> int | None:
    """Mark rows computed for or after a replaced token as stale and return the token's position; None if nothing
    changed."""
    changed = current.request.tokens.changed(start, tokens)
    if changed is None:
        return None
    for chunk in current.chunks:
        if chunk.run.position + chunk.run.count > changed and not chunk.run.branch:
            chunk.stale_from = min(chunk.stale_from, changed)
    current.request.tokens.cut(changed)
    return changed


def _merge(rounds: list[_Round], requests: list[Request], chunks: list[tuple[int, _Chunk]], part: int) -> int:
    """Merge rounds with consistent tokens into requests, append the requests and their chunks, and return how many
    there are."""
    mine: list[int] = []
    for one in rounds:
        same = next((i for i in mine if _agree(requests[i], one.request)), None)
        if same is None:
            same = len(requests)
            one.request.part = part + len(mine)
            requests.append(one.request)
            mine.append(same)
        else:
            kept = requests[same]
            kept.tokens.update(one.request.tokens)
            kept.end = max(kept.end, one.request.end)
        chunks += [(same, chunk) for chunk in one.chunks]
    return len(mine)


def _agree(one: Request, other: Request) -> bool:
    """Return whether the tokens of two rounds are equal where both are known."""
    if one.first != other.first:
        return False
    small, large = sorted((one.tokens, other.tokens), key=len)
    return small.is_within(large)


def _columns(grids: Sequence[Grid], requests: list[Request], chunks: list[tuple[int, _Chunk]]) -> RequestHistory:
    chunks.sort(key=lambda item: (item[1].grid, item[1].run.slot))
    facts = [
        (request, c.run.position, c.run.visit, c.grid, c.run.slot, c.run.count, c.stale_from, c.run.branch)
        for request, c in chunks
    ]
    table = np.array(facts, np.int64).reshape(-1, 8)
    counts = table[:, 5]
    request, visit, grid, branch = (_narrow(np.repeat(_narrow(table[:, i]), counts)) for i in (0, 2, 3, 7))
    within = np.arange(counts.sum())
    within -= np.repeat(np.cumsum(counts) - counts, counts)
    position = np.repeat(table[:, 1], counts)
    position += within
    superseded = position >= np.repeat(table[:, 6], counts)
    within += np.repeat(table[:, 4], counts)
    again = _narrow(_count_again(request, position, superseded, branch))
    position, within = _narrow(position), _narrow(within)
    rows = request, position, visit, again, superseded, grid, within, branch
    return RequestHistory(tuple(grids), tuple(requests), *rows)


def _narrow(column: Array) -> Array:
    """Return the column as int32 if its values fit: a run may have millions of rows."""
    return column.astype(np.int32) if column.max(initial=0) < 1 << 31 else column


def _count_again(request: Array, position: Array, superseded: Array, branch: Array) -> Array:
    """Count for each row the earlier rows with the same request, position, branch and superseded flag."""
    order = np.lexsort((superseded, branch, position, request))  # stable: ties stay in order of computation
    same = np.ones(len(order), bool)
    same[:1] = False
    for column in (request, position, branch, superseded):
        same[1:] &= column[order][1:] == column[order][:-1]
    index = np.arange(len(order))
    began = np.maximum.accumulate(np.where(same, 0, index))
    again = np.empty(len(order), np.int64)
    again[order] = index - began
    return again
