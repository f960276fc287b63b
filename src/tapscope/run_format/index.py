"""Index: parse the lines of a rank's ``records.jsonl`` into typed objects."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct, field, structs

from tapscope.core.formatting import plural
from tapscope.core.observe import StepInfo
from tapscope.core.regular_files import reading
from tapscope.core.site import compact_ranges
from tapscope.run_format import index_limits, record, record_index, validation
from tapscope.run_format.ledger import StepCounts, StepLine, begin_line, end_line, step_from_lines
from tapscope.run_format.manifest import COMPACTED, INDEX, is_mesh
from tapscope.run_format.records import Records, joined

if TYPE_CHECKING:
    from tapscope.run_format.record_parser import RecordLines

MAX_REPORTED = 8
"""Maximum number of unreadable lines of a rank that are reported individually; the others are only counted."""


MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line; longer ones are skipped, because parsed JSON can need 50 times as much memory."""
_MAX_SKIPPED = 1 << 28
_BLOCK = 1 << 20
"""Read size in bytes."""


class SiteInfo(Struct, frozen=True):
    """Properties of a site, from its ``site`` line."""

    site: str
    cls: str
    """Class name of the module, e.g. ``LlamaRMSNorm``."""
    params: dict[str, tuple[int, ...]]
    """Name -> local shape of the module's direct parameters."""
    parent: str | None = None
    """Class name of the parent module; None for the root or if unknown."""
    dims: str | None = None
    """Dims that the module declares for this port, see :mod:`tapscope.core.dims`; None if undeclared."""
    no_inputs: bool = False
    """For an output port: whether the module was called without tensor inputs. False if unknown."""


class Metric(Struct, frozen=True):
    """A metric: a named number of a step, e.g. the loss."""

    rank: int
    step: int
    name: str
    value: float


class Event(Struct, frozen=True):
    """An event of a rank's recording, of kind ``open``, ``close``, ``config``, ``failed``, ``dropped``, ..."""

    rank: int
    kind: str
    fields: dict[str, Any]


class RankIndex(Struct):
    """Parsed lines of one rank."""

    records: Records = field(default_factory=Records)
    sites: dict[str, SiteInfo] = field(default_factory=dict)
    begins: dict[int, dict[str, Any]] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    lates: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Information that the source does not record, one sentence each."""

    def add_step(self, step: int, num_values: int) -> None:
        """Add a complete step with ``num_values`` recorded values, for a source that has no step lines."""
        self.begins[step] = begin_line(StepInfo(step=step), 0)
        self.ends[step] = end_line(step, StepCounts(num_values, num_values))

    def take_records(self) -> Records:
        """Return the records sorted by ``seq``, and drop the reference to them: there may be millions."""
        records, self.records = self.records.in_order(), Records()
        return records


_decode = json.JSONDecoder().decode


def read_index(folder: Path, rank: int) -> RankIndex:
    """Parse the lines in a rank's directory; unreadable lines are skipped and reported in ``problems``."""
    from tapscope.run_format.record_parser import RecordLines, read_site  # lazy: not every process reads a run

    index = RankIndex()
    path = folder / INDEX
    known = record_index.read_record_index(path, rank)
    lines = _Lines(path, index, known)
    records = RecordLines(rank, index.records)
    num_unreadable = 0
    for number, line in lines.others(records):
        if (site := read_site(line)) is not None:
            _add_site(index, SiteInfo(site.site, site.cls, site.params, site.parent, site.dims, site.no_inputs))
            continue
        try:
            _add(index, _decode(str(line, "utf-8")), rank)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            num_unreadable += 1
            if num_unreadable <= MAX_REPORTED:
                text = f"{path}:{number}: unreadable line skipped ({type(error).__name__}: {error})"
                index.problems.append(text)
    lines.finish()
    if num_unreadable > MAX_REPORTED:
        index.problems.append(f"{path}: {num_unreadable - MAX_REPORTED:,} more unreadable lines skipped")
    for name, fields in _tables(index.events).items():
        _add_table(index, folder / name, rank, fields)
    undeclared = set(index.records.distinct_sites()).difference(index.sites)
    if 0 < len(undeclared) < len(index.sites):  # a writer declares either all of its sites or none
        index.problems.append(
            f"{path}: records of {plural(len(undeclared), 'site')} that no line declares, e.g. {min(undeclared)!r}"
        )
    return index


class Steps(dict[int, dict[int, StepLine]]):
    """Mapping of step -> rank -> step line, with a short repr because steps may have a million token ids."""

    def __repr__(self) -> str:
        ranks = {rank for by_rank in self.values() for rank in by_rank}
        phases = Counter(by_rank[min(by_rank)].info.phase for by_rank in self.values())
        kinds = ", ".join(f"{count:,} {phase}" for phase, count in phases.items())
        return f"<Steps {compact_ranges(self) or 'none'}{f': {kinds}; ranks {compact_ranges(ranks)}' if self else ''}>"


def steps_of(ranks: dict[int, RankIndex], problems: list[str]) -> Steps:
    """Build step -> rank -> step line from the parsed lines of all ranks.

    Consumes ``begins`` of each index to save memory. Malformed steps are skipped and reported in ``problems``.
    """
    steps: dict[int, dict[int, StepLine]] = {}
    for rank, index in sorted(ranks.items()):
        for step in list(index.begins):
            begin = index.begins.pop(step)  # may have a million token ids, which StepInfo stores in less memory
            try:
                line = step_from_lines(begin, index.ends.get(step), index.lates.get(step, ()))
                steps.setdefault(step, {})[rank] = line
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"rank {rank}: step {step} is malformed ({type(error).__name__}: {error})")
    return Steps(sorted(steps.items()))


def table_names(events: Iterable[Event]) -> set[str]:
    """Return the file names of the Parquet tables that the lines of a rank reference."""
    return set(_tables(events))


def _tables(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return table file name -> fields of its ``compacted`` event."""
    return {Path(str(e.fields.get("file"))).name: e.fields for e in events if e.kind == COMPACTED}


def _add_table(index: RankIndex, path: Path, rank: int, fields: dict[str, Any]) -> None:
    from tapscope.run_format.parquet import checksum, read_table

    num_records, crc = int(fields.get("num_records", 0)), fields.get("crc32")
    try:
        if crc is not None and checksum(path) != crc:
            index.problems.append(f"{path}: its bytes do not have the CRC-32 of {INDEX}: records may be wrong")
        table = read_table(path, rank)
    except (OSError, ValueError) as error:
        index.problems.append(f"{path}: cannot be read, and with it {num_records:,} records: {error}")
        return
    index.records = joined([part for part in (index.records, table) if part] or [table])
    if len(table) != num_records:
        index.problems.append(f"{path}: holds {len(table):,} records, {num_records:,} were compacted")


class _Lines:
    """Reads the lines of a rank, by columns for plain records and one by one for all other lines.

    The record index, if any, provides the records and other lines of a prefix of the file. :meth:`finish` writes an
    index for a finished run without one.
    """

    def __init__(self, path: Path, index: RankIndex, known: "record_index.RecordIndex | None") -> None:
        self._path, self._index, self._known = path, index, known
        self._state = record_index.state_of(path)
        self._kept: list[record_index.OtherLine] = []
        self._size, self._num_lines = (known.size, known.num_lines) if known else (0, 0)
        self._is_sound = True
        """Whether all lines so far are complete: none was torn or too long."""
        self._places: list[int] = []
        """Indices of the records that were added while parsing other lines."""
        if known is not None:
            index.records = known.records

    def others(self, records: "RecordLines") -> Iterator[tuple[int, bytes]]:
        """Yield (line number, line) of all lines that are not plain records; add plain records to ``records``."""
        index = self._index
        if self._known is not None and self._known.others:
            columns, index.records = index.records, Records()
            before = []
            for other in self._known.others:
                num = len(index.records)
                yield other.number, other.text.encode("latin-1")
                before += [other.num_records] * (len(index.records) - num)
            index.records = record_index.with_others(columns, index.records, before)
            records.into(index.records)
        yield from self._of_file(records)

    def _of_file(self, records: "RecordLines") -> Iterator[tuple[int, bytes]]:
        index, num_problems = self._index, len(self._index.problems)
        for first, block, num_lines in _blocks(self._path, index, self._size, self._num_lines + 1):
            for number, line in _others(records, first, block, num_lines):
                num = len(index.records)
                if self._known is None:
                    text = str(line, "latin-1")
                    self._kept.append(record_index.OtherLine(number, text, num - len(self._places)))
                num_reported = len(index.problems)
                yield number, line
                num_problems += len(index.problems) - num_reported
                self._places += range(num, len(index.records))
            self._size += len(block)
            self._num_lines = first - 1 + num_lines
        self._is_sound = len(index.problems) == num_problems

    def finish(self) -> None:
        """Write the record index if the rank closed and has many records."""
        index = self._index
        is_worth_it = self._known is None and len(index.records) >= index_limits.MIN_RECORDS
        if is_worth_it and self._is_sound and index.events and index.events[-1].kind == "close":
            plain = record_index.without(index.records, self._places)
            written = record_index.RecordIndex(plain, self._kept, self._size, self._num_lines)
            record_index.write_record_index(self._path, written, self._state)


def _others(records: "RecordLines", first: int, block: bytes, num_lines: int) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of the non-record lines of a block; ``first`` is the number of its first line."""
    others = records.read_block(block, num_lines)
    if others is not None and not others:
        return
    lines = block[:-1].split(b"\n")
    if others is not None:
        yield from ((first + at, lines[at]) for at in others)
        return
    yield from ((first + at, line) for at, line in enumerate(lines) if line and not records.read(line))


def _blocks(path: Path, index: RankIndex, start_at: int = 0, number: int = 1) -> Iterator[tuple[int, bytes, int]]:
    """Yield blocks as (number of the first line, complete lines, number of lines).

    Reads from byte ``start_at``, the start of line ``number``. A torn last line (left by a killed writer) and lines
    that are too long are omitted and reported in ``index.problems``.
    """
    try:
        with reading(path) as file:
            file.seek(start_at)
            while block := file.read(_BLOCK):
                if not block.endswith(b"\n"):
                    block += file.readline(MAX_LINE_BYTES)
                start = block.rfind(b"\n", 0, len(block) - 1) + 1  # start of the last line
                is_whole, length = block.endswith(b"\n"), len(block) - start
                whole = block if is_whole and length <= MAX_LINE_BYTES else block[:start]
                num_lines = whole.count(b"\n")
                if whole:
                    yield number, whole, num_lines
                number += num_lines
                if len(whole) == len(block):
                    continue
                if length < MAX_LINE_BYTES:
                    index.problems.append(f"{path}:{number}: the last line is cut off and was left out")
                    continue
                index.problems.append(f"{path}:{number}: longer than {MAX_LINE_BYTES >> 20} MiB, and was left out")
                if not is_whole and not _skip_line(file):
                    index.problems.append(f"{path}:{number}: so long that the following lines were left out, too")
                    return
                number += 1
    except OSError as error:
        index.problems.append(f"{path}: cannot be read: {error.strerror or error}")


def _skip_line(file: BinaryIO) -> bool:
    """Skip to the end of the current line; return False if it is longer than 256 MiB."""
    for _ in range(_MAX_SKIPPED // _BLOCK):
        part = file.read(_BLOCK)
        if end := part.find(b"\n") + 1:
            file.seek(end - len(part), os.SEEK_CUR)
        if end or not part:
            return True
    return False


def _add(index: RankIndex, line: Any, rank: int) -> None:
    if type(line) is not dict:
        raise ValueError(f"expected a JSON object, not {validation.short(line)}")
    kind = line["type"]
    if kind == "record":
        index.records.append(record.from_json(line, rank))
    elif kind == "site":
        params = {name: validation.counts(shape, "params") for name, shape in line["params"].items()}
        parent, dims = (validation.text(line, name, None) for name in ("parent", "dims"))
        site, cls = (validation.text(line, name) for name in ("site", "class"))
        _add_site(index, SiteInfo(site, cls, params, parent, dims, line.get("no_inputs") is True))
    elif kind == "step":
        _add_step(index, validation.count(line, "step"), line)
    elif kind == "metric":
        value = validation.number(line["value"], "value")
        step, name = validation.count(line, "step"), validation.text(line, "name")
        index.metrics.append(Metric(rank, step, name, float("nan") if value is None else float(value)))
    elif kind == "event":
        _add_event(index, line, rank)
    else:
        raise ValueError(f"unknown line type {kind!r}")


def _add_site(index: RankIndex, site: SiteInfo) -> None:
    """Add a site; if it is declared again (new configuration, other model), ``no_inputs`` requires both to be True."""
    known = index.sites.get(site.site)
    if site.no_inputs and known is not None and not known.no_inputs:
        site = structs.replace(site, no_inputs=False)
    index.sites[site.site] = site


def _add_event(index: RankIndex, line: dict[str, Any], rank: int) -> None:
    kind = validation.text(line, "kind")
    mesh, coords = line.get("mesh") or {}, line.get("coords") or {}
    for name in ("never_fired", "compiled", "never_held"):
        named = line.get(name, [])
        if type(named) is not list or not all(type(each) is str for each in named):
            raise ValueError(f"{name} is {validation.short(named)}, not a list of names")
    if "step" in line and line["step"] is not None:
        validation.count(line, "step")
    if kind == COMPACTED:
        validation.text(line, "file")
        validation.count(line, "num_records", 0)
    if kind in ("open", "mesh") and not (is_mesh(mesh) and _is_place(coords)):
        raise ValueError(f"mesh {mesh!r} with coords {coords!r}: both must be objects of axis and number")
    index.events.append(Event(rank, kind, {k: v for k, v in line.items() if k not in ("type", "kind")}))


def _is_place(coords: Any) -> bool:
    return isinstance(coords, dict) and all(map(validation.is_count, coords.values()))


def _add_step(index: RankIndex, step: int, line: dict[str, Any]) -> None:
    at = validation.text(line, "at")
    if at == "late":
        index.lates.setdefault(step, []).append(line)
    elif at in ("begin", "end"):
        (index.begins if at == "begin" else index.ends)[step] = line
    else:
        raise ValueError(f"unknown step line {at!r}")
