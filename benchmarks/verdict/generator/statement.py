"""Statement: the parsed parts of a sentence that states a cause."""

import re
from typing import NamedTuple

_ORDINALS = {"second": 2, "third": 3}

NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
FACTOR = rf"(?:\(1 (?P<off>[+-] [\d.e-]+)\)|(?P<factor>{NUMBER})) × baseline"
LIST = r"\d+(?:–\d+)?(?:(?:, | and )\d+(?:–\d+)?)*"
COLUMNS = rf"(?:every \w+ column from \d+(?: to \d+| on)|columns? {LIST})"
_WHERE = re.compile(r"in (?P<where>[^:]*): (?P<claim>.*)$", re.DOTALL)
_ROWS = re.compile(r"\b(?:positions?|requests?|rows?|tokens?|steps?)\b")


class Statement(NamedTuple):
    """The parts of a stated cause."""

    columns: frozenset[int] | int | None
    """The named columns, or their number; None if no columns are named."""
    has_rows: bool
    """Whether the statement is restricted to some token rows."""
    rank: int | None
    partial_sum: int | None
    """The rank whose partial sum the statement is about."""
    claim: str
    """The sentence without its place and share."""
    total: int | None = None
    """Total number of columns, in ``16 of 64 columns``."""
    is_lower_bound: bool = False
    """Whether ``columns`` is a lower bound, as in ``at least 16 of 64 columns``."""


def statement(text: str, width: int | None = None) -> Statement:
    """Parse ``in column 3 (of rank 1) of request r0: target is zero``; ``width`` ends open ranges."""
    found = _WHERE.match(text)
    where, claim = (found["where"], found["claim"]) if found else ("", text)
    claim = re.sub(r" \(removes [\d.]+ % of the error\)$", "", claim)
    rank, partial_sum = (
        re.search(r"\(?(?:of |shard of )?rank (\d+)\)?", where),
        re.search(r"partial sum of rank (\d+)", where),
    )
    is_lower_bound = where.startswith("at least ")
    where = where.removeprefix("at least ")
    named = re.match(rf"{COLUMNS}|[\d,]+ of [\d,]+ columns", where)
    rest = where[named.end() :] if named else where
    head = re.match(r" of each head of (\d+)", rest)
    columns: frozenset[int] | int | None = None
    total = None
    if named is not None:
        count = re.match(r"([\d,]+) of ([\d,]+) columns", named[0])
        columns = int(count[1].replace(",", "")) if count else indices(named[0], width)
        if count is not None:
            total = int(count[2].replace(",", ""))
        elif head is not None and width is not None:
            size = int(head[1])
            columns = frozenset(start + i for start in range(0, width, size) for i in indices(named[0]))
    of_sum = int(partial_sum[1]) if partial_sum else None
    return Statement(
        columns,
        bool(_ROWS.search(rest)),
        int(rank[1]) if rank and not partial_sum else None,
        of_sum,
        claim,
        total,
        is_lower_bound,
    )


def indices(text: str, width: int | None = None) -> frozenset[int]:
    """Return the indices in ``columns 0–3 and 7`` or ``every third column from 1 to 10``; open ranges end at
    ``width``."""
    return frozenset(listed(text, width))


def listed(text: str, width: int | None = None) -> list[int]:
    """Return the indices in the order of the text, see :func:`indices`."""
    every = re.search(r"every (\w+) \w+ from (\d+)(?: to (\d+)| on)", text)
    if every is not None:
        step = _ORDINALS.get(every[1]) or int(re.sub(r"\D", "", every[1]))
        first = int(every[2])
        last = int(every[3]) if every[3] is not None else (width or first + 2 * step + 1) - 1
        return list(range(first, last + 1, step))
    ends = re.findall(r"(\d+)(?:–(\d+))?", text)
    return [i for a, b in ends for i in range(int(a), int(b or a) + 1)]


def claimed_moves(stated: Statement, width: int | None) -> dict[int, int] | None:
    """Return column -> column whose values it is claimed to hold; None if the sentence claims no moved columns."""
    claim = stated.claim
    if (found := re.match(rf"target has (?P<one>{COLUMNS}) and (?P<two>{COLUMNS}) swapped", claim)) is not None:
        one, two = (listed(found[name], width) for name in ("one", "two"))
        pairs = list(zip(one, two, strict=False))
        return dict(pairs) | {b: a for a, b in pairs} if len(one) == len(two) else None
    if (
        found := re.match(rf"target has (?P<what>{COLUMNS}|its columns) rotated by (?P<by>[−-]?\d+)", claim)
    ) is not None:
        named = range(width or 0) if found["what"] == "its columns" else indices(found["what"], width)
        return _rotated(sorted(named), int(found["by"].replace("−", "-")))
    if (found := re.match(rf"target holds baseline's (?P<two>{COLUMNS}) in (?P<one>{COLUMNS})", claim)) is not None:
        one, two = (listed(found[name], width) for name in ("one", "two"))
        return dict(zip(one, two, strict=False)) if len(one) == len(two) else None
    if (found := re.match(r"target has the two halves of each row swapped \((\d+) columns each", claim)) is not None:
        half = int(found[1])
        return {i: (i + half) % (2 * half) for i in range(2 * half)}
    return _claimed_blocks(stated, width)


def _rotated(columns: list[int], by: int) -> dict[int, int]:
    """Return a cyclic shift of the listed columns by ``by`` places."""
    count = len(columns)
    return {column: columns[(i - by) % count] for i, column in enumerate(columns)}


def _claimed_blocks(stated: Statement, width: int | None) -> dict[int, int] | None:
    claim = stated.claim
    if (found := re.match(r"target has blocks (\d+) and (\d+) of (\d+) columns swapped", claim)) is not None:
        one, two, size = map(int, found.groups())
        pairs = [(one * size + i, two * size + i) for i in range(size)]
        return dict(pairs) | {b: a for a, b in pairs}
    if (
        found := re.match(r"target has the (\d+) blocks of (\d+) columns (in reverse|rotated by (\d+))", claim)
    ) is not None:
        count, size = int(found[1]), int(found[2])
        order = [count - 1 - i if found[4] is None else (i - int(found[4])) % count for i in range(count)]
        return {i * size + k: order[i] * size + k for i in range(count) for k in range(size)}
    if (
        found := re.match(r"target has the \d+ blocks of (\d+) columns in the order (\d+(?:, \d+)*)", claim)
    ) is not None:
        size, order = int(found[1]), [int(one) for one in found[2].split(", ")]
        return {i * size + k: order[i] * size + k for i in range(len(order)) for k in range(size)}
    if (found := re.search(r"hold what the baseline has (\d+) columns (later|earlier)", claim)) is not None:
        by = int(found[1]) * (1 if found[2] == "later" else -1)
        if not isinstance(stated.columns, frozenset):
            return None
        return {i: i + by for i in stated.columns}
    return None
