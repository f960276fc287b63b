"""Data source of the browse screen: all queries of one run. Calls may be slow, so workers make them."""

import shlex
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from rich.text import Text

from tapscope.core import dtypes
from tapscope.core.formatting import plural, printable, size
from tapscope.core.site import describe_layers, module_of
from tapscope.dashboard.model.record_filter import matching_records
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.module_tree import SiteNode, modules_of
from tapscope.kernels.native import filled
from tapscope.render.anomalies import anomalous_places
from tapscope.render.record_notes import flags
from tapscope.render.row_labels import RowMap, row_map
from tapscope.render.run_report import payload_sizes, run_report
from tapscope.render.tensor_summary import Digest, digest
from tapscope.run_format.directory import may_grow
from tapscope.run_format.ledger import Ledger
from tapscope.run_format.manifest import INDEX
from tapscope.run_format.record import Key, Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.dashboard.model.module_graph import ModuleGraph
    from tapscope.dashboard.model.value_table import ValueTable

Array = np.ndarray[Any, Any]
SORTS = ("in order", "by |max|", "by size")
SORT_OF_COLUMN = dict(zip(("site", "|max|", "shape"), SORTS, strict=True))
"""Column of the record table -> sort order that a click on its header selects."""
ACCOUNT_INDENT = 11
"""Column in which the text of :meth:`RunSource.account` starts."""
CACHED_DIGESTS = 32
BIG_TENSOR_BYTES = 256 * 10**6
"""Payload size above which a tensor is read only on the user's request."""


@dataclass(frozen=True, slots=True)
class Query:
    """Selection and sort order of the records on the browse screen."""

    step: int
    rank: int
    path: str = ""
    """Module whose records, including those of its submodules, are shown; empty for all modules."""
    sort: str = SORTS[0]
    reverse: bool = False
    """Whether the sort order is reversed."""
    find: str = ""
    """A filter, see :func:`matching_records`; while set, ``path`` is ignored."""

    @property
    def order(self) -> str:
        """Text that describes the sort order."""
        return f"{self.sort}, reversed" if self.reverse else self.sort


@dataclass(frozen=True, eq=False, slots=True)
class ModuleCounts:
    """Number of records and anomalies of each module and its submodules, in one step on one rank."""

    records: Array
    """[modules + 1] int64, prefix sums: entry i counts the records of modules numbered below i."""
    anomalies: Array
    """[modules + 1] int64, prefix sums of the records with an anomaly."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleCounts):
            return NotImplemented
        return np.array_equal(self.records, other.records) and np.array_equal(self.anomalies, other.anomalies)

    __hash__ = None  # type: ignore[assignment]

    def of(self, module: SiteNode) -> tuple[int, int]:
        """Return the number of records, and of records with an anomaly, in the module's subtree."""
        first, stop = (module.first, module.stop)
        return int(self.records[stop] - self.records[first]), int(self.anomalies[stop] - self.anomalies[first])


class RunSource:
    """Queries of one run on disk; safe to call from several threads."""

    def __init__(self, run: Run, sizes: Mapping[str, int] | None = None) -> None:
        """Index the records of ``run``. ``sizes`` are the bytes of its index files, taken before the run was read."""
        self.run, self._sizes = run, _sizes(run.path) if sizes is None else sizes
        run.records = records = filled(run, run.records)
        self._places = records.by_step()
        self._site_numbers, self._site_of = records.site_codes()
        self.steps: tuple[int, ...] = tuple(sorted({step for step, _ in self._places} | set(run.steps)))
        self.ranks: tuple[int, ...] = run.ranks
        places, self._is_nonfinite = anomalous_places(records)
        ranks = records.of_kinds(lambda kind: kind.rank)[places]
        order = np.lexsort((records.seq[places], ranks, records.step[places]))
        self._anomalies, self._is_nonfinite = places[order], self._is_nonfinite[order]
        self._is_anomalous = np.zeros(len(records), np.bool_)
        """[records] bool: whether the record has an anomaly."""
        self._is_anomalous[places] = True
        self.modules: dict[str, SiteNode] = modules_of(self._site_numbers)
        """Module path -> module; the empty path is the whole model."""
        self.header = self._header()
        self._digests: OrderedDict[Key, Digest] = OrderedDict()
        self._lock = Lock()
        self._latest: tuple[tuple[int, int], Records] | None = None

    @classmethod
    def open(cls, path: str | Path) -> "RunSource":
        """Open a run that may still be written. Raises the errors of :func:`open_run`."""
        sizes = _sizes(Path(path))  # measured first: lines appended while the run is read count as growth
        return cls(open_run(path), sizes)

    @property
    def num_anomalies(self) -> int:
        """Number of records with an anomaly in the whole run."""
        return len(self._anomalies)

    def phase(self, step: int, rank: int) -> str:
        """Return the phase of the step as the rank reported it; empty if unknown."""
        line = self.run.steps.get(step, {}).get(rank)
        return line.info.phase if line else ""

    def num_records(self, step: int, rank: int) -> int:
        """Return the number of records of one step on one rank."""
        return len(self._of(step, rank))

    def _of(self, step: int, rank: int) -> Array:
        """Return the indices of the records of one step and rank."""
        return self._places.get((step, rank), np.zeros(0, np.int64))

    def records(self, query: Query) -> Records:
        """Return the records that match the query, in its sort order."""
        records = self._of_step(query.step, query.rank)
        if query.find:
            matches = matching_records(records, query.find)
            records = records if matches is True else records.take(np.flatnonzero(matches))
        elif query.path:
            module = self.modules.get(query.path, SiteNode(query.path, ""))
            numbers = self._module_of[self._site_of[self._of(query.step, query.rank)]]
            records = records.take(np.flatnonzero((numbers >= module.first) & (numbers < module.stop)))
        order = np.arange(len(records))
        if query.sort != SORTS[0]:
            order = records.largest_first() if query.sort == SORTS[1] else np.argsort(-records.nbytes, kind="stable")
        elif not query.reverse:
            return records
        return records.take(order[::-1] if query.reverse else order)

    def _of_step(self, step: int, rank: int) -> Records:
        """Return the records of one step and rank. The latest result is cached: successive queries filter it."""
        latest = self._latest
        if latest is None or latest[0] != (step, rank):
            latest = self._latest = (step, rank), self.run.records.take(self._of(step, rank))
        return latest[1]

    def of_site(self, site: str, step: int | None = None, rank: int | None = None) -> Records:
        """Return the records of a site, in order; a ``step`` or ``rank`` of None selects all."""
        number = self._site_numbers.get(site, -1)
        if step is not None and rank is not None:
            places = self._of(step, rank)
            return self.run.records.take(places[self._site_of[places] == number])
        records = self.run.records.take(np.flatnonzero(self._site_of == number))
        return records.of(None if step is None else [step], None if rank is None else [rank])

    @property
    def nonfinite_places(self) -> Array:
        """Indices of the records whose anomaly is a non-finite value."""
        return self._anomalies[self._is_nonfinite]

    @property
    def num_sites(self) -> int:
        """Number of distinct sites."""
        return len(self._site_numbers)

    @property
    def site_numbers(self) -> tuple[list[str], Array]:
        """Distinct sites in order of their first records, and [records] int32: the index of each record's site."""
        return list(self._site_numbers), self._site_of

    def counts(self, step: int, rank: int) -> ModuleCounts:
        """Count the records and anomalies of every module in one step on one rank."""
        places = self._of(step, rank)
        odd = places[self._is_anomalous[places]]
        return ModuleCounts(self._below(self._site_of[places]), self._below(self._site_of[odd]))

    def _below(self, sites: Array) -> Array:
        amounts = np.bincount(self._module_of[sites], minlength=len(self.modules))
        return np.concatenate(([0], np.cumsum(amounts)))

    @cached_property
    def _module_of(self) -> Array:
        """[sites] int64: number of each site's module."""
        return np.array([self.modules[module_of(site)].first for site in self._site_numbers], np.int64)

    def next_anomaly(self, step: int, rank: int, seq: int, direction: int) -> Record | None:
        """Return the next (``direction`` > 0) or previous record with an anomaly, wrapping around; None if there is
        none."""
        num = len(self._anomalies)
        if not num:
            return None
        cut = bisect_right if direction > 0 else bisect_left
        at = cut(range(num), (step, rank, seq), key=lambda i: _place(self.run.records[int(self._anomalies[i])]))
        return self.run.records[int(self._anomalies[at % num if direction > 0 else at - 1])]

    def num_firings(self, record: Record) -> int:
        """Return the number of records of this site in the same step, microbatch, pass and rank."""
        key = record.key
        others = (other.key._replace(occurrence=0) for other in self.of_site(key.site, key.step, key.rank))
        return sum(other == key._replace(occurrence=0) for other in others)

    def rows(self, record: Record) -> RowMap | None:
        """Return the map of the record's rows to tokens; None if unknown."""
        return row_map(record, self.run.steps.get(record.key.step, {}).get(record.key.rank))

    def cached_digest(self, record: Record) -> Digest | None:
        """Return the cached digest of the record, or None; never reads the payload."""
        with self._lock:
            if record.key in self._digests:
                self._digests.move_to_end(record.key)
            return self._digests.get(record.key)

    def digest(self, record: Record) -> Digest:
        """Return the digest of the record's payload; the latest 32 are cached. Raises RunCorruptError."""
        summary = self.cached_digest(record)
        if summary is None:
            summary = digest(self.run.array(record), self.rows(record))
            with self._lock:
                self._digests[record.key] = summary
                while len(self._digests) > CACHED_DIGESTS:
                    self._digests.popitem(last=False)
        return summary

    def table(self, record: Record) -> "ValueTable":
        """Return all values of the record as a table that reads on demand. Raises RunCorruptError."""
        from tapscope.dashboard.model.record_values import RecordValueTable
        from tapscope.dashboard.model.value_table import folded

        return folded(RecordValueTable(self.run, record))

    def module_graph(self, step: int, rank: int) -> "ModuleGraph":
        """Return the graph of the modules that fired in one step on one rank."""
        from tapscope.dashboard.model.module_graph import run_graph  # this module is slow to import

        return run_graph(self.run, self.records(Query(step, rank)))

    def command(self, record: Record | None, query: Query) -> str:
        """Return the equivalent command line: ``tapscope show ...``, or ``tapscope ls ...`` without a record."""
        words = ["tapscope", "ls", str(self.run.path)]
        if record is not None:
            words[1:] = ["show", str(self.run.path), record.key.site, "--step", str(record.key.step)]
            words += ["--rank", str(record.key.rank), "--occurrence", str(record.key.occurrence)]
            key = record.key
            words += flags(key, (each.key for each in self.of_site(key.site, key.step, key.rank)))
        else:
            words += ["--steps", str(query.step), "--ranks", str(query.rank)]
        return shlex.join(words)

    def account(self) -> Text:
        """Return a summary of the run as text: contents, anomalies, missing data."""
        sections = [(name, line) for name, lines in run_report(self.run).sections() for line in lines]
        names = [name for name, _ in sections]
        width = ACCOUNT_INDENT - 1
        shown = (
            f"{'' if i and names[i - 1] == name else name:<{width}} {line}" for i, (name, line) in enumerate(sections)
        )
        return Text("\n".join(map(printable, shown)))

    def hint(self) -> str:
        """Describe the sites of the run, as a hint for a search without matches."""
        return describe_layers(set(self._site_numbers))

    @property
    def is_open(self) -> bool:
        """Whether a rank has not closed the run, so that it may still grow."""
        return "OPEN" in self.header.state

    @property
    def may_grow(self) -> bool:
        """Whether the run is probably still being recorded; False for a copy of an unfinished run."""
        return self.is_open and may_grow(self.run.path)

    def has_grown(self) -> bool:
        """Return whether lines were appended on disk since the run was opened."""
        return _sizes(self.run.path) != self._sizes

    def close(self) -> None:
        """Close the memory-mapped files."""
        self.run.close()

    def _header(self) -> Header:
        run, manifest, odd = self.run, self.run.manifest, self.run.records.irregular_places
        mesh = " ".join(f"{axis}{num}" for axis, num in run.mesh.items())
        sketches = {(r.key.rank, r.sketch.entry) for r in map(run.records.__getitem__, odd) if r.sketch is not None}
        nbytes = payload_sizes(run.records)[1] + sum(entry.nbytes for _, entry in sketches)
        facts = [
            str(manifest.get("model") or ""),
            dtypes.short(manifest["dtype"]) if manifest.get("dtype") else "",
            mesh,
            plural(len(self.steps), "step"),
            plural(len(run.records), "record"),
            size(nbytes) if nbytes else "statistics only",
            f"{self.num_anomalies:,} with anomalies" if self.num_anomalies else "",
        ]
        ledger = run.ledger()
        if may_grow(run.path):
            ledger = _without_steps_in_progress(ledger)
        words = [
            *(["OPEN"] if ledger.open_ranks or not run.ranks else []),
            *([] if ledger.complete else ["INCOMPLETE"]),
        ]
        state = " · ".join(words) or "ON DISK"
        missing = () if ledger.complete else tuple(ledger.sentences())
        return Header(run.name, tuple(fact for fact in facts if fact), state, missing)


def _without_steps_in_progress(ledger: Ledger) -> Ledger:
    """Return ``ledger`` without the last unfinished step of each open rank: that step is still in progress."""
    last = {rank: max(s for r, s in ledger.unfinished_steps if r == rank) for rank, _ in ledger.unfinished_steps}
    in_progress = {(rank, step) for rank, step in last.items() if rank in ledger.open_ranks}
    return replace(ledger, unfinished_steps=[each for each in ledger.unfinished_steps if each not in in_progress])


def _sizes(path: Path) -> dict[str, int]:
    """Return the size in bytes of each rank's index file; ranks without a directory are left out."""
    return {str(file): file.stat().st_size for file in path.glob(f"rank-*/{INDEX}")}


def _place(record: Record) -> tuple[int, int, int]:
    return (record.key.step, record.key.rank, record.seq)
