"""Routed rows: what a module of experts holds row by row in an order that its choice of experts decides.

Experts work on (token, choice) pairs, sorted by expert or expert after expert: which row is which token's follows from
the whole table of choices, that of padding included. Row i of one run is row i of the other where there is no padding
and the tables are equal bit for bit; else nobody has said which rows meet, and none do.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from tapscope.comparator.align import Plan
from tapscope.comparator.assemble import Whole
from tapscope.comparator.grids import SideRows
from tapscope.comparator.layout import is_parameter
from tapscope.comparator.rowmap import PADDING
from tapscope.record import FORWARD, Record
from tapscope.run import Run

_Place = tuple[str, int, int, int]
"""(model, step, micro-batch, rank)."""
Table = tuple[str, ...]
"""Hashes of the choices that decide an order, one a call."""
Wholes = Sequence[Whole]


class Choices:
    """The integers that modules of one run were given, several for each token."""

    def __init__(self, run: Run, rows: SideRows) -> None:
        self._rows = rows
        self._tables: dict[str, dict[_Place, list[Record]]] = {}
        for record in run.records:
            if record.dtype is not None and "int" in record.dtype and _is_table(record, rows):
                place = (record.key.model, record.key.step, record.key.micro, record.key.rank)
                self._tables.setdefault(_path(record), {}).setdefault(place, []).append(record)

    def __bool__(self) -> bool:
        return bool(self._tables)

    def tables(self, wholes: Sequence[Whole]) -> tuple[Table | None, ...]:
        """The choice that orders the rows of each firing, None where that does not tell; empty unless one orders all
        of them: a step's firings then have as many rows as the choice has entries."""
        path = _path(wholes[0].records[0])
        while path and self._tables:
            path = path.rpartition(".")[0]
            if path in self._tables and _fits(self._tables[path], wholes):
                return tuple(self._hashes(self._tables[path][_place(whole)]) for whole in wholes)
        return ()

    def _hashes(self, tables: Iterable[Record]) -> Table | None:
        found = [None if _is_padded(table, self._rows) else table.hash for table in tables]
        return tuple(h for h in found if h is not None) if None not in found else None


def with_order(
    plan: Plan, tables: tuple[Sequence[Table | None], Sequence[Table | None]], wholes: tuple[Wholes, Wholes]
) -> Plan:
    """The plan without the firings whose rows lie in orders of two different choices, or on one side only in one; with
    none where experts lie on ranks of their own, each of which has rows for its own experts first."""
    left, right = tables
    if plan.joins and any(_is_by_expert(*pair) for pair in _pairs(plan, wholes)):
        return structs.replace(plan, joins=(), apart="rows of experts that lie on other ranks in one of the runs")
    both = plan.joins if left and right else ()
    kept = [j for j in both if left[j.baseline] is not None and left[j.baseline] == right[j.target]]
    if plan.joins and len(kept) == len(plan.joins):
        return plan
    said = "rows that lie in the order of a choice of experts, which is not the same in both runs, or holds padding"
    if kept:
        return structs.replace(plan, joins=tuple(kept), note=f"left out {said}")
    return structs.replace(plan, joins=(), apart=said)


def _pairs(plan: Plan, wholes: tuple[Wholes, Wholes]) -> Iterable[tuple[Whole, Whole]]:
    return ((wholes[0][join.baseline], wholes[1][join.target]) for join in plan.joins)


def _is_by_expert(one: Whole, other: Whole) -> bool:
    """Whether shards were put together to rows of more columns than there are on the other side."""
    wide = max(one, other, key=lambda whole: whole.shape[1:])
    return one.shape[1:] != other.shape[1:] and len(wide.records) > 1


def _is_table(record: Record, rows: SideRows) -> bool:
    """Whether it holds two integers or more for each token row of its step."""
    port, shape = record.key.site.rpartition(":")[2], record.shape
    if record.key.pass_ != FORWARD or not port.startswith("in[") or len(shape) < 2 or shape[-1] < 2:
        return False
    grid = rows.of(record)
    return grid is not None and math.prod(shape[:-1]) == grid.num_slots


def _is_padded(record: Record, rows: SideRows) -> bool:
    grid = rows.of(record)
    return grid is None or bool((grid.pairs == PADDING).any())


def _fits(tables: Mapping[_Place, list[Record]], wholes: Sequence[Whole]) -> bool:
    if is_parameter(wholes[0].records[0].key.site):
        return False
    rows: dict[_Place, int] = {}
    for whole in wholes:
        rows[_place(whole)] = rows.get(_place(whole), 0) + (whole.shape[0] if len(whole.shape) > 1 else 0)
    return all(place in tables and _orders(tables[place], count) for place, count in rows.items())


def _orders(tables: Iterable[Record], rows: int) -> bool:
    return rows > 0 and rows == sum(math.prod(table.shape) for table in tables)


def _place(whole: Whole) -> _Place:
    key = whole.records[0].key
    return key.model, key.step, key.micro, key.rank


def _path(record: Record) -> str:
    return record.key.site.rpartition(":")[0]
