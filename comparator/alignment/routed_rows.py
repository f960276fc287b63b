"""Routing maps: bool flags [tokens, experts] with which a router module assigns tokens to experts.

Megatron's dispatcher gathers the tokens of an expert-parallel group in rank order and passes each expert the tokens
whose flag is set, in that order; the rows of a rank are sorted by expert. Padding has flags too. The maps of the group
and the token grid of each rank determine which rows of an expert are tokens, and which tokens they are.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.runs.modules import parent
from tapscope.comparator.runs.routers import ROUTERS
from tapscope.core import dims as dims_grammar
from tapscope.core import dtypes
from tapscope.core.errors import DimsError
from tapscope.core.site import is_parameter
from tapscope.run_format.record import FORWARD, Key, Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]
_EXPERT = re.compile(r"^(.*)\.experts(?:\.local_experts\.(\d+)(?=[.:])|(?=:)).*$")
"""A site of one expert, or of the module that holds the experts of a rank; the first group is the parent of the
router."""
_MAX_KEPT = 64


class RoutedRows(NamedTuple):
    """The rows of all firings of a site, padding included."""

    pairs: Array
    """[rows] int64: row pair, or a code of :mod:`.row_map`."""
    experts: Array
    """[rows] int64: expert index."""
    turns: Array
    """[rows] int64: call within the step."""
    firing: Array
    row: Array
    """[rows] index within the firing."""


class _Map(NamedTuple):
    """The flags of one call, gathered over the expert-parallel group."""

    flags: Array
    """[tokens of all ranks, experts] bool."""
    pairs: Array
    """[tokens of all ranks] row pair of each token."""
    turn: int


class RoutingMapTables:
    """The routing maps that one run recorded."""

    def __init__(self, run: Run, rows: SideRows) -> None:
        self._run, self._rows = run, rows
        self._records: dict[str, dict[Key, Record]] = {}  # parent of the router -> key without site -> map
        self._kept: dict[tuple[str, Key], _Map | None] = {}
        self._num_ranks = run.mesh.get("ep", 1)
        for record in run.records.take(run.records.which(lambda kind: kind.dtype == "bool")):
            path, _, port = record.key.site.rpartition(":")
            is_map = path.rpartition(".")[2] in ROUTERS and port.startswith("out") and len(record.shape) == 2
            if is_map and record.entry is not None and record.key.pass_ == FORWARD and rows.of(record) is not None:
                self._records.setdefault(parent(path), {})[_place(record.key)] = record

    def __bool__(self) -> bool:
        return bool(self._records)

    def rows(self, wholes: Sequence[AssembledTensor]) -> RoutedRows | None:
        """Return the rows of the firings of one site; None if no map accounts for all of them.

        Raises DataError if a map cannot be read.
        """
        site = wholes[0].records[0].key.site
        match = _EXPERT.match(site)
        if match is None or match[1] not in self._records or is_parameter(site):
            return None
        parts: list[RoutedRows] = []
        for i, whole in enumerate(wholes):
            here = [self._part(match[1], match[2], record, i) for record in whole.records]
            if not dtypes.is_float(whole.dtype or "") or any(one is None for one in here) or not whole.shape:
                return None
            part = RoutedRows(*map(np.concatenate, zip(*filter(None, here), strict=True)))
            if len(part.pairs) != whole.shape[0]:
                return None
            parts.append(part._replace(row=np.arange(len(part.pairs))))
        return RoutedRows(*map(np.concatenate, zip(*parts, strict=True)))

    def counts(self, wholes: Sequence[AssembledTensor]) -> Array | None:
        """Return the values of a site that holds the number of rows per expert, padding included; None for other sites.

        Raises DataError if the values cannot be read.
        """
        match = _EXPERT.match(wholes[0].records[0].key.site)
        if match is None or match[2] is not None or match[1] not in self._records:
            return None
        if "int" not in (wholes[0].dtype or ""):
            return None
        values: list[Array] = []
        for record in (record for whole in wholes for record in whole.records):
            gathered = self._gathered(match[1], _place(record.key)) if record.entry is not None else None
            numbers = None if gathered is None else gathered.flags[:, self._experts_of_rank(gathered, record)].sum(0)
            if numbers is None or not np.array_equal(numbers, value := self._run.array(record)):
                return None
            values.append(value)
        return np.concatenate(values)

    def _experts_of_rank(self, gathered: "_Map", record: Record) -> slice:
        """Return the range of experts on the record's rank."""
        count = gathered.flags.shape[1] // self._num_ranks
        first = self._run.coords(record.key.rank).get("ep", 0) * count
        return slice(first, first + count)

    def _part(self, block: str, expert: str | None, record: Record, firing: int) -> RoutedRows | None:
        """Return the rows of one rank; None if the flags imply a different number of rows than the record has."""
        gathered = self._gathered(block, _place(record.key))
        if gathered is None:
            return None
        some = self._experts_of_rank(gathered, record) if expert is None else slice(int(expert), int(expert) + 1)
        number, token = np.nonzero(gathered.flags[:, some].T)
        if not record.shape or len(token) != record.shape[0]:
            return None
        same = np.full(len(token), firing)
        return RoutedRows(
            gathered.pairs[token], number + some.start, np.full(len(token), gathered.turn), same, np.arange(len(token))
        )

    def _gathered(self, block: str, key: Key) -> _Map | None:
        if (block, key) not in self._kept:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[block, key] = self._gather(block, key)
        return self._kept[block, key]

    def _gather(self, block: str, key: Key) -> _Map | None:
        """Gather the maps of the expert-parallel group of the key's rank; None if one is missing or its rows are
        unknown."""
        maps = [self._records[block].get(key._replace(rank=rank)) for rank in self._group(key.rank)]
        known = [record for record in maps if record is not None]
        pairs = [self._pairs(record) for record in known]
        if not known or len(known) < len(maps) or any(each is None for each in pairs):
            return None
        grid = self._rows.of(known[0])
        turn = key.occurrence + (key.micro << 20 if grid is not None and grid.whole_step else 0)
        flags = [self._run.array(record).astype(bool) for record in known]
        return _Map(np.concatenate(flags), np.concatenate([each for each in pairs if each is not None]), turn)

    def _group(self, rank: int) -> Sequence[int]:
        """Return the ranks of the rank's expert-parallel group, in order; empty if the mesh coordinates do not
        determine it."""
        coords = {each: self._run.coords(each) for each in self._run.ranks}
        stage = sorted(each for each, at in coords.items() if at.get("pp", 0) == coords[rank].get("pp", 0))
        first = stage.index(rank) // self._num_ranks * self._num_ranks
        group = stage[first : first + self._num_ranks]
        is_one = [coords[each].get("ep", 0) for each in group] == list(range(self._num_ranks))
        return group if is_one else ()

    def _pairs(self, record: Record) -> Array | None:
        """Return the row pair of each row of a map as [tokens]; None if the map's dims do not determine them."""
        grid = self._rows.of(record)
        if grid is None:
            return None
        pairs = grid.pairs
        try:
            first = dims_grammar.parse(record.dims).dims[0] if record.dims else None
        except DimsError:  # reported where the map is assembled
            return None
        names = first.names if first is not None else ()
        if min(grid.grid) > 1 and len(grid.grid) == 2 and sorted(names) != ["b", "s"]:
            return None
        if names == ("s", "b") and len(grid.grid) == 2:
            pairs = pairs.reshape(grid.grid).T.reshape(-1)
        num, rest = divmod(len(pairs), record.shape[0]) if record.shape[0] else (0, 1)
        axes = [shard.axis for shard in first.shards] if first is not None else []
        if rest or (num > 1 and (len(axes) != 1 or self._run.mesh.get(axes[0], 1) != num)):
            return None
        at = self._run.coords(record.key.rank).get(axes[0], 0) if num > 1 else 0
        return pairs[at * record.shape[0] : (at + 1) * record.shape[0]]


def _place(key: Key) -> Key:
    """Return the key of the call that a value, a gradient or a map belongs to."""
    return key._replace(site="", pass_=FORWARD)
