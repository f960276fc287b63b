"""Expert entries: map rows inside MoE modules, ordered by the router's choice, to (token, choice) pairs.

Experts work on (token, choice) pairs. The row of each pair follows from the full table of choices (padding included)
and from the layout: sorted by expert, or unsorted with tokens or choices first. A routing map gives the rows directly.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.routed_rows import RoutingMapTables
from tapscope.comparator.alignment.row_join import KeyedRows
from tapscope.comparator.alignment.row_map import FORKED, UNALIGNED
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.runs.routers import is_of_experts
from tapscope.core.site import is_parameter, module_of
from tapscope.run_format.record import FORWARD, Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]
_Place = tuple[str, int, int, int]
"""(model, step, microbatch, rank)."""
_MAX_EXPERTS = 1 << 20


class ExpertEntries(Struct, frozen=True):
    """The (token, choice) pairs of a site, and the row that each pair has in the site's firings."""

    keys: Array
    """[entries] int64: row pair and expert packed into one integer; negative values are codes of :mod:`.row_map`."""
    experts: Array
    """[entries] int64: expert index, combined with the microbatch."""
    at: tuple[Array, ...]
    """One [entries] array per layout of :func:`_layouts`: index into :attr:`firing` and :attr:`row`."""
    firing: Array
    """[rows] index of the firing; all firings are concatenated."""
    row: Array
    """[rows] row index within the firing."""

    @property
    def is_known(self) -> bool:
        """Whether the row order is known, so that there is only one layout."""
        return len(self.at) == 1

    def rowed(self, layout: int) -> KeyedRows:
        """Return the rows under one layout, with their matching keys."""
        at = self.at[layout]
        use, forked, unaligned = (self.keys >= 0), (self.keys == FORKED), (self.keys == UNALIGNED)
        valid = np.bincount(self.firing[at[use | forked | unaligned]], minlength=1)
        counts = dict(enumerate(valid.tolist()))
        rows = at[use]
        return KeyedRows(
            self.keys[use], self.firing[rows], self.row[rows], counts, int(forked.sum()), int(unaligned.sum()), {}
        )


class ExpertChoiceTables:
    """The router choices that one run recorded: integer tables of expert indices passed to its modules, or routing maps
    returned by its routers."""

    def __init__(self, run: Run, rows: SideRows) -> None:
        self._run, self._rows = run, rows
        self._tables: dict[str, dict[_Place, list[Record]]] = {}
        has_experts = any(
            is_of_experts(name) for site in run.records.distinct_sites() for name in site.partition(":")[0].split(".")
        )
        self._maps: RoutingMapTables | None = None
        if not has_experts:
            return
        self._maps = RoutingMapTables(run, rows)
        for record in run.records.take(run.records.which(lambda kind: "int" in (kind.dtype or ""))):
            if _is_table(record, rows):
                place = (record.key.model, record.key.step, record.key.micro, record.key.rank)
                self._tables.setdefault(module_of(record.key.site), {}).setdefault(place, []).append(record)

    def __bool__(self) -> bool:
        return bool(self._tables) or bool(self._maps)

    def entries(self, wholes: Sequence[AssembledTensor], num_pairs: int) -> ExpertEntries | None:
        """Return the entries of one site's firings; None if no recorded choice orders their rows.

        A table applies if the firings of each step have one row per (token, choice) pair. Raises DataError if the table
        or map cannot be read.
        """
        path = module_of(wholes[0].records[0].key.site)
        while path and self._tables:
            path = path.rpartition(".")[0]
            if path in self._tables and _fits(self._tables[path], wholes):
                return self._entries(self._tables[path], wholes, num_pairs)
        return _mapped(self._maps, wholes, num_pairs) if self._maps else None

    def counts(self, wholes: Sequence[AssembledTensor]) -> Array | None:
        """Return the values of a site that holds per-expert row counts, see :meth:`.RoutingMapTables.counts`."""
        return self._maps.counts(wholes) if self._maps else None

    def _entries(
        self, tables: Mapping[_Place, list[Record]], wholes: Sequence[AssembledTensor], num_pairs: int
    ) -> ExpertEntries:
        firings: dict[_Place, list[int]] = {}
        for i, whole in enumerate(wholes):
            firings.setdefault(place_of(whole), []).append(i)
        order = [i for places in firings.values() for i in places]
        parts = [part for place in firings for part in self._parts(tables[place], num_pairs)]
        starts = np.cumsum([0, *(len(part.keys) for part in parts)])[:-1].tolist()
        at = [[start + rows for rows in part.at] for start, part in zip(starts, parts, strict=True)]
        sizes = [wholes[i].shape[0] for i in order]
        return ExpertEntries(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.experts for part in parts]),
            tuple(map(np.concatenate, zip(*at, strict=True))),
            np.repeat(np.array(order, np.int64), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
        )

    def _parts(self, tables: Iterable[Record], num_pairs: int) -> Iterator["_Part"]:
        for table in tables:
            grid = self._rows.of(table)
            assert grid is not None  # true for every table accepted by _is_table
            experts = self._run.array(table).reshape(-1, table.shape[-1]).astype(np.int64)
            turn = table.key.micro * _MAX_EXPERTS if grid.whole_step else 0
            known = turn + experts.reshape(-1) % _MAX_EXPERTS
            pairs = np.repeat(grid.pairs, experts.shape[1])
            yield _Part(np.where(pairs < 0, pairs, pairs + num_pairs * known), known, _layouts(experts))


def _mapped(maps: RoutingMapTables, wholes: Sequence[AssembledTensor], num_pairs: int) -> ExpertEntries | None:
    """Return entries whose rows a routing map gives directly; None if no map accounts for the site."""
    routed = maps.rows(wholes)
    if routed is None:
        return None
    known = routed.turns * _MAX_EXPERTS + routed.experts
    keys = np.where(routed.pairs < 0, routed.pairs, routed.pairs + num_pairs * known)
    return ExpertEntries(keys, known, (np.arange(len(keys)),), routed.firing, routed.row)


class _Part(Struct, frozen=True):
    """The entries of one table; the fields match :class:`ExpertEntries`."""

    keys: Array
    experts: Array
    at: tuple[Array, ...]


def _layouts(experts: Array) -> tuple[Array, ...]:
    """Return the row of each entry under each known layout, as arrays [tokens * choices], for ``experts`` [tokens,
    choices].

    The layouts are: by expert, then token (grouped GEMM); by expert, then choice (a loop over experts); both by
    descending expert (the backward pass of a loop); tokens first; choices first.
    """
    flat, num = experts.reshape(-1), experts.size
    by_choice = np.arange(num).reshape(experts.shape).T.reshape(-1)
    orders = [np.argsort(by, kind="stable") for by in (flat, -flat)]
    orders += [by_choice[np.argsort(by[by_choice], kind="stable")] for by in (flat, -flat)]
    return tuple(np.argsort(order) for order in (*orders, np.arange(num), by_choice))


def _is_table(record: Record, rows: SideRows) -> bool:
    """Return whether a record is a table of expert indices: at least two integers per token row of its step.

    One integer per row is accepted only as an input of modules that take expert indices: with one token per request,
    token ids and positions have the same shape.
    """
    path, _, port = record.key.site.rpartition(":")
    shape, least = record.shape, 1 if "expert" in path.rpartition(".")[2] else 2
    if record.key.pass_ != FORWARD or not port.startswith("in[") or len(shape) < 2 or shape[-1] < least:
        return False
    grid = rows.of(record)
    return grid is not None and math.prod(shape[:-1]) == grid.num_slots


def _fits(tables: Mapping[_Place, list[Record]], wholes: Sequence[AssembledTensor]) -> bool:
    if is_parameter(wholes[0].records[0].key.site):
        return False
    rows: dict[_Place, int] = {}
    for whole in wholes:
        rows[place_of(whole)] = rows.get(place_of(whole), 0) + (whole.shape[0] if len(whole.shape) > 1 else 0)
    return all(place in tables and _orders(tables[place], count) for place, count in rows.items())


def _orders(tables: Iterable[Record], rows: int) -> bool:
    return rows > 0 and rows == sum(math.prod(table.shape) for table in tables)


def place_of(whole: AssembledTensor) -> _Place:
    """Return the key that relates a firing to the router choice that orders its rows."""
    key = whole.records[0].key
    return key.model, key.step, key.micro, key.rank
