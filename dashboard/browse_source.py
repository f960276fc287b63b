"""Sources: what the browse screen asks of a run. Everything here may take long and is called from workers."""

import shlex
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.text import Text

from tapscope.core import dtypes
from tapscope.core.formatting import plural, printable, size
from tapscope.core.site import Glob, describe_layers
from tapscope.dashboard.module_tree import SiteNode, ancestors, build_tree, contains
from tapscope.kernels.native import filled
from tapscope.render.anomalies import anomaly_of
from tapscope.render.record_notes import flags
from tapscope.render.row_labels import RowMap, row_map
from tapscope.render.run_report import run_report
from tapscope.render.tensor_summary import CORNER_COLUMNS, CORNER_ROWS, Corner, Digest, digest, window
from tapscope.run_format.directory import may_grow
from tapscope.run_format.ledger import Ledger
from tapscope.run_format.manifest import INDEX
from tapscope.run_format.record import Key, Record
from tapscope.run_format.run import Run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.dashboard.model.value_table import ValueTable

SORTS = ("in order", "by |max|", "by size")
CACHED_DIGESTS = 32
BIG_TENSOR_BYTES = 256 * 10**6
"""A payload above this is read only when the user says so."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which records the screen shows."""

    step: int
    rank: int
    path: str = ""
    """Module whose records (and its submodules') are shown; empty for all."""
    sort: str = SORTS[0]
    find: str = ""
    """Part of a site, or a pattern; replaces ``path`` while it is set."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Records under one module, in one step on one rank."""

    num_records: int = 0
    num_odd: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The run in one line."""

    name: str
    facts: tuple[str, ...]
    state: str
    """ON DISK, OPEN, INCOMPLETE, or both of the latter."""
    missing: tuple[str, ...]
    """Why it is not complete, one sentence each."""


class RunSource:
    """Answers of one run on disk; safe to call from several threads."""

    def __init__(self, run: Run, sizes: Mapping[str, int] | None = None) -> None:
        """``sizes`` are those of :meth:`open`."""
        self.run, self._sizes = run, _sizes(run.path) if sizes is None else sizes
        run.records = filled(run, run.records)
        self._index: dict[tuple[int, int], list[Record]] = defaultdict(list)
        records = list(run.records)
        for record in records:
            self._index[record.key.step, record.key.rank].append(record)
        self._firings = Counter(record.key._replace(occurrence=0) for record in records)
        self.steps: tuple[int, ...] = tuple(sorted({r.key.step for r in records} | set(run.steps)))
        self.ranks: tuple[int, ...] = run.ranks
        odd = (record for record in records if anomaly_of(record))
        self._odd = sorted(odd, key=_place)
        self._odd_places = [_place(record) for record in self._odd]
        self.tree: SiteNode = build_tree(records)
        self.header = self._header()
        self._digests: OrderedDict[Key, Digest] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def open(cls, path: str | Path) -> "RunSource":
        """Open a run that may be written meanwhile; raises what open_run raises."""
        sizes = _sizes(Path(path))  # before it is read: what comes while it is read counts as more
        return cls(open_run(path), sizes)

    @property
    def num_odd(self) -> int:
        """Records of the whole run that look wrong."""
        return len(self._odd)

    def phase(self, step: int, rank: int) -> str:
        """Phase of the step as the rank reported it; empty when unknown."""
        line = self.run.steps.get(step, {}).get(rank)
        return line.info.phase if line else ""

    def num_records(self, step: int, rank: int) -> int:
        """Records of one step on one rank."""
        return len(self._index.get((step, rank), ()))

    def records(self, query: Query) -> list[Record]:
        """Records that match, in the query's order."""
        found = self._index.get((query.step, query.rank), [])
        if query.find:
            matches = _matcher(query.find)
            found = [record for record in found if matches(record.key.site)]
        else:
            found = [record for record in found if contains(query.path, record.key.site)]
        if query.sort == SORTS[1]:
            return sorted(found, key=_largest_first)
        return sorted(found, key=lambda r: -r.nbytes) if query.sort == SORTS[2] else list(found)

    def counts(self, step: int, rank: int) -> dict[str, Counts]:
        """Module path -> its counts; modules without a record are left out."""
        records: dict[str, int] = defaultdict(int)
        odd: dict[str, int] = defaultdict(int)
        for record in self._index.get((step, rank), []):
            is_odd = anomaly_of(record) is not None
            for path in ancestors(record.key.site.rpartition(":")[0]):
                records[path] += 1
                odd[path] += is_odd
        return {path: Counts(num, odd[path]) for path, num in records.items()}

    def next_odd(self, step: int, rank: int, seq: int, direction: int) -> Record | None:
        """The nearest odd record after (or before) this place in the whole run, around the end; None if none is."""
        if not self._odd:
            return None
        here = (step, rank, seq)
        if direction > 0:
            return self._odd[bisect_right(self._odd_places, here) % len(self._odd)]
        return self._odd[bisect_left(self._odd_places, here) - 1]

    def num_firings(self, record: Record) -> int:
        """How many records this site has in the same step, micro, pass and rank."""
        return self._firings[record.key._replace(occurrence=0)]

    def rows(self, record: Record) -> RowMap | None:
        """Whose token rows the record holds."""
        return row_map(record, self.run.steps.get(record.key.step, {}).get(record.key.rank))

    def cached_digest(self, record: Record) -> Digest | None:
        """The digest if it is at hand; never reads."""
        with self._lock:
            if record.key in self._digests:
                self._digests.move_to_end(record.key)
            return self._digests.get(record.key)

    def digest(self, record: Record) -> Digest:
        """Read the payload and boil it down; the latest 32 are kept. Raises RunCorruptError."""
        found = self.cached_digest(record)
        if found is None:
            found = digest(self.run.array(record), self.rows(record))
            with self._lock:
                self._digests[record.key] = found
                while len(self._digests) > CACHED_DIGESTS:
                    self._digests.popitem(last=False)
        return found

    def table(self, record: Record) -> "ValueTable":
        """All its values, read on demand. Raises RunCorruptError."""
        from tapscope.dashboard.model.value_table import RecordValueTable, folded

        return folded(RecordValueTable(self.run, record))

    def corner_at(self, record: Record, index: tuple[int, ...]) -> Corner | None:
        """The values around an index of the tensor; None where it is outside. Raises RunCorruptError."""
        if len(index) != len(record.shape) or any(i >= n for i, n in zip(index, record.shape, strict=True)):
            return None
        rows = self.rows(record)
        axes = rows.axes if rows else tuple(range(min(len(index), 1)))
        others = [axis for axis in range(len(index)) if axis not in axes]
        row, column = (_flat([index[a] for a in part], [record.shape[a] for a in part]) for part in (axes, others))
        array = self.run.array(record)
        return window(array, rows, max(row - 2, 0), max(column - 4, 0), CORNER_ROWS, CORNER_COLUMNS)

    def command(self, record: Record | None, query: Query) -> str:
        """The command line that shows the same: ``tapscope show ...``, or ``tapscope ls ...`` without a record."""
        words = ["tapscope", "ls", str(self.run.path)]
        if record is not None:
            words[1:] = ["show", str(self.run.path), record.key.site, "--step", str(record.key.step)]
            words += ["--rank", str(record.key.rank), "--occurrence", str(record.key.occurrence)]
            words += flags(record.key, (each.key for each in self.run.records))
        else:
            words += ["--steps", str(query.step), "--ranks", str(query.rank)]
        return shlex.join(words)

    def account(self) -> Text:
        """What the run holds, what is odd or missing in it."""
        sections = [(name, line) for name, lines in run_report(self.run).sections() for line in lines]
        names = [name for name, _ in sections]
        shown = (f"{'' if i and names[i - 1] == name else name:<10} {line}" for i, (name, line) in enumerate(sections))
        return Text("\n".join(map(printable, shown)))

    def hint(self) -> str:
        """Which sites there are, for an empty search."""
        return describe_layers(set(self.run.records.sites))

    @property
    def is_open(self) -> bool:
        """Whether it may grow."""
        return "OPEN" in self.header.state

    @property
    def may_grow(self) -> bool:
        """Whether somebody still records it, as far as is known: a copy that was cut off stays as it is."""
        return self.is_open and may_grow(self.run.path)

    def has_grown(self) -> bool:
        """Whether there are more lines on disk than when it was opened."""
        return _sizes(self.run.path) != self._sizes

    def close(self) -> None:
        """Let go of the mapped files."""
        self.run.close()

    def _header(self) -> Header:
        run, manifest = self.run, self.run.manifest
        mesh = " ".join(f"{axis}{num}" for axis, num in run.mesh.items())
        entries = {(r.key.rank, stored[0]) for r in run.records if (stored := r.payload) is not None}
        nbytes = sum(entry.nbytes for _, entry in entries)
        facts = [
            str(manifest.get("model") or ""),
            dtypes.short(manifest["dtype"]) if manifest.get("dtype") else "",
            mesh,
            plural(len(self.steps), "step"),
            plural(len(run.records), "record"),
            size(nbytes) if nbytes else "statistics only",
            f"{self.num_odd:,} odd" if self.num_odd else "",
        ]
        ledger = run.ledger()
        if may_grow(run.path):
            ledger = _as_far_as_it_goes(ledger)
        words = [
            *(["OPEN"] if ledger.open_ranks or not run.ranks else []),
            *([] if ledger.complete else ["INCOMPLETE"]),
        ]
        state = " · ".join(words) or "ON DISK"
        missing = () if ledger.complete else tuple(ledger.sentences())
        return Header(run.name, tuple(fact for fact in facts if fact), state, missing)


def _flat(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major position."""
    found = 0
    for i, num in zip(index, sizes, strict=True):
        found = found * num + i
    return found


def _as_far_as_it_goes(ledger: Ledger) -> Ledger:
    """Without the last step of ranks that still record: it is being taken, nothing of it is missing yet."""
    last = {rank: max(s for r, s in ledger.unfinished_steps if r == rank) for rank, _ in ledger.unfinished_steps}
    going_on = {(rank, step) for rank, step in last.items() if rank in ledger.open_ranks}
    return replace(ledger, unfinished_steps=[each for each in ledger.unfinished_steps if each not in going_on])


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of the lines of every rank; a rank that has no directory yet is not among them."""
    return {str(file): file.stat().st_size for file in path.glob(f"rank-*/{INDEX}")}


def _place(record: Record) -> tuple[int, int, int]:
    return (record.key.step, record.key.rank, record.seq)


def _largest_first(record: Record) -> tuple[bool, float]:
    """Non-finite before all."""
    stats = record.stats
    return (not (stats and stats.nonfinite), -((stats.absmax or 0.0) if stats else 0.0))


def _matcher(find: str) -> Callable[[str], bool]:
    """A pattern when it has * or ?, else a part of the site in any case."""
    if "*" in find or "?" in find:
        return Glob(find).matches
    part = find.lower()
    return lambda site: part in site.lower()
