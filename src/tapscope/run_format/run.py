"""Run: read the directory of one observed execution (docs/reference/run-format.md is normative)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.core.errors import ConfigError, DataError, RuleError
from tapscope.core.formatting import plural
from tapscope.core.html_table import html_table
from tapscope.core.site import describe_sites, layer_of, module_of
from tapscope.expr.site_pattern import site_pattern
from tapscope.run_format.completeness import audit
from tapscope.run_format.index import Event, Metric, RankIndex, SiteInfo, steps_of
from tapscope.run_format.ledger import Ledger, StepLine
from tapscope.run_format.manifest import HASH_VERSION
from tapscope.run_format.payload import Payloads, SegmentPayloads
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records, joined
from tapscope.run_format.table import table

if TYPE_CHECKING:
    import polars as pl


class Run:
    """One run, read-only. Use :func:`tapscope.open_run`.

    The index is read when the run is opened; payloads are mapped on demand. A run may be read while it is written.
    """

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        ranks: dict[int, RankIndex],
        payloads: Payloads | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """``payloads``: where its values are, unless in segments; ``name``: unless it is the last part of the path."""
        self.path = path
        self.name = path.name if name is None else name
        """Last part of the path, unless the source names it otherwise."""
        self.manifest = manifest
        self._ranks = ranks
        self.ranks = tuple(sorted(ranks))
        """Ranks that wrote anything."""
        self.payloads: Payloads = payloads or SegmentPayloads(path)
        """Where the values are read from."""
        self.quantized: Mapping[str, Callable[[], Any]] = {}
        """Site of a weight that was multiplied out -> measures the error that its quantizer explains."""
        self.records = joined([ranks[rank].take_records() for rank in sorted(ranks)])
        """Every record, by rank and then in recording order. Each access creates a record in 2 us: convert them to a
        list to iterate many times."""
        self.sites: dict[str, SiteInfo] = {}
        for rank in sorted(ranks, reverse=True):
            self.sites.update(ranks[rank].sites)
        self.problems: list[str] = [p for rank in sorted(ranks) for p in ranks[rank].problems]
        self.unknown: list[str] = list(
            dict.fromkeys(sentence for rank in sorted(ranks) for sentence in ranks[rank].unknown)
        )
        """What the source of the run does not record; see :class:`~tapscope.run_format.ledger.Ledger`."""
        self.problems += self.payloads.missing(self.records)
        self._assumed: dict[str, int] = {}
        self.steps: dict[int, dict[int, StepLine]] = steps_of(ranks, self.problems)
        """step -> rank -> line."""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [(len(self.records), "record"), (len(self.steps), "step"), (len(self.ranks), "rank")]
        counts = ", ".join(plural(number, noun) for number, noun in parts)
        return f"<Run {self.path}: {counts}{'' if self.closed else ', still open'}>"

    def _repr_html_(self) -> str:
        """A small table for notebooks."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        facts = {name: str(self.manifest.get(name) or "") for name in ("model", "framework", "dtype", "created")}
        facts |= {"mesh": mesh, "steps": f"{len(self.steps):,}", "records": f"{len(self.records):,}"}
        facts |= {"ranks": f"{len(self.ranks):,}", "state": "closed" if self.closed else "still open"}
        return html_table([(name, text) for name, text in facts.items() if text], title=f"Run {self.path}")

    @property
    def world_size(self) -> int:
        """Number of ranks the job had."""
        return int(self.manifest.get("world_size") or len(self._ranks))

    @property
    def hash_version(self) -> int:
        """Version of the hash of its records; hashes of different versions cannot be compared."""
        return int(self.manifest.get("hash_version") or min(self.manifest["version"], HASH_VERSION))

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> size, e.g. ``{"tp": 2}``."""
        later = next((e.fields.get("mesh") for e in self.events() if e.kind == "mesh"), None)
        return dict(self.manifest.get("mesh") or later or self._assumed)

    @property
    def model_config(self) -> dict[str, int | float]:
        """Hyperparameters under Hugging Face's names, e.g. ``num_key_value_heads``; empty if unknown."""
        return dict(self.manifest.get("model_config") or {})

    def coords(self, rank: int) -> dict[str, int]:
        """Mesh axis -> coordinate of the rank."""
        opened = [e.fields for e in self.events(rank) if e.kind in ("open", "mesh")]
        coords = dict(opened[-1].get("coords", {})) if opened else {}
        if coords or not self._assumed:
            return coords
        place = np.unravel_index(rank, tuple(self._assumed.values()))
        return {axis: int(at) for axis, at in zip(self._assumed, place, strict=True)}

    def assume_mesh(self, mesh: Mapping[str, int]) -> None:
        """Set the mesh of a run that records none: axis -> size, ranks in C order, the last axis fastest (as torch's
        ``init_device_mesh``).

        Raises ConfigError if the run has another mesh, or the mesh another number of ranks.
        """
        if self.mesh and {a: n for a, n in self.mesh.items() if n > 1} != {a: n for a, n in mesh.items() if n > 1}:
            has = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            raise ConfigError(f"{self.path} records another mesh, {has}; give a mesh only for a run without one")
        size = math.prod(mesh.values())
        if size != max(self.world_size, *(rank + 1 for rank in self.ranks), 1):
            mesh_text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            raise ConfigError(f"mesh {mesh_text} has {size} ranks, but {self.path} has {self.world_size}")
        self._assumed = dict(mesh)

    def events(self, rank: int | None = None) -> list[Event]:
        """Events of one rank or all."""
        return [e for r in self.ranks if rank in (None, r) for e in self._ranks[r].events]

    def metrics(self, rank: int | None = None) -> list[Metric]:
        """Metrics of one rank or all, in order."""
        return [m for r in self.ranks if rank in (None, r) for m in self._ranks[r].metrics]

    @property
    def closed(self) -> bool:
        """Whether every rank has sent its close message."""
        return all(any(e.kind == "close" for e in self.events(rank)) for rank in self.ranks)

    def select(
        self,
        globs: Iterable[str] = (),
        *,
        skip: Iterable[str] = (),
        layers: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
    ) -> list[Record]:
        """Records that match any of ``globs`` (all when empty) and none of ``skip``; raises as :meth:`matching`.

        A string is one glob.
        """
        return list(self.matching(globs, skip=skip, layers=layers, steps=steps, ranks=ranks))

    def matching(
        self,
        globs: Iterable[str] = (),
        *,
        skip: Iterable[str] = (),
        layers: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
    ) -> Records:
        """As :meth:`select`, as columns: records are created on access.

        Raises RuleError for a glob that matches no site of the run: a typing error must not look like absence.
        """
        wanted, unwanted = (
            [site_pattern(text) for text in ((given,) if isinstance(given, str) else given)] for given in (globs, skip)
        )
        sites = set(self.records.distinct_sites())
        for glob in (*wanted, *unwanted):
            if not any(glob.matches(site) for site in sites):
                hint = f"{describe_sites(glob.text, sites)} (see: tapscope ls {self.path})"
                raise RuleError(f"no site matches {glob.text!r} in {self.path}; {hint}")
        chosen = {
            site
            for site in sites
            if (not wanted or any(g.matches(site) for g in wanted)) and not any(g.matches(site) for g in unwanted)
        }
        if layers is not None:
            keep = set(layers)
            chosen = {site for site in chosen if layer_of(module_of(site)) in keep}
        return self.records if chosen == sites and steps is ranks is None else self.records.of(steps, ranks, chosen)

    def table(self) -> "pl.DataFrame":
        """Every record as a row of a polars frame, see :func:`tapscope.run_format.table.table`."""
        return table(self.records)

    def array(self, rec: Record | str) -> np.ndarray[Any, Any]:
        """The payload as a read-only array of the record's shape, memory-mapped. ``rec`` may be the name of a site
        that has only one record.

        bf16 and fp8 are ml_dtypes types. Raises DataError if the record has no payload (only statistics were kept, or
        its value is not a tensor), RunCorruptError if its bytes are missing, RuleError for a site that has no record or
        several.
        """
        if isinstance(rec, str):
            rec = self._only_record(rec)
        if rec.entry is None or rec.dtype is None:
            what = f"{rec.key.site} at step {rec.key.step}"
            if rec.dtype is None:
                value = rec.value if isinstance(rec.value, dict) else {}
                raise DataError(f"{what} is not a tensor: {value.get('class') or value.get('type') or 'unknown'}")
            kept = "statistics only" if rec.sketch is None else "statistics and a sketch"
            raise DataError(f"{what} was kept as {kept}: no values on disk")
        return self.payloads.array(rec)

    def _only_record(self, site: str) -> Record:
        matches = list(self.records.of(None, None, {site})) or self.select([site])
        if len(matches) > 1:
            first, last = matches[0].key, matches[-1].key
            where = f"steps {first.step} to {last.step}" if first.step < last.step else f"step {first.step}"
            raise RuleError(
                f"{len(matches):,} records of {self.path} match {site!r} ({where}): choose one, e.g. "
                f"run.array(run.select({site!r}, steps=[{last.step}])[0])"
            )
        return matches[0]

    def sketch(self, rec: Record) -> np.ndarray[Any, Any]:
        """The 256 float32 counters of a record's sketch. Raises DataError if it has none, RunCorruptError if they are
        missing."""
        read = getattr(self.payloads, "sketch", None)
        if rec.sketch is None or read is None:
            raise DataError(f"{rec.key.site} at step {rec.key.step} has no sketch: capture with keep=sketch")
        return read(rec)  # type: ignore[no-any-return]

    def file(self, rec: Record, end: int) -> np.ndarray[Any, Any] | None:
        """All bytes of the file that holds the payload of a record, mapped; None if the payload is not stored in one
        piece. Raises RunCorruptError when there are fewer than ``end``."""
        return self.payloads.file(rec, end)

    @property
    def damaged(self) -> list[str]:
        """The error of each file that could not be read; part of :attr:`problems`."""
        return self.payloads.damaged

    def lacks(self, rec: Record) -> str:
        """Why the file cannot contain the bytes of a record with a payload, without reading it; empty if it may."""
        return self.payloads.lacks(rec)

    def suspects(self, records: Records) -> Sequence[Record]:
        """The records for which :meth:`lacks` may find something, without creating all of them."""
        return records.take(self.payloads.suspects(records))

    def suspect_places(self, records: Records) -> np.ndarray[Any, Any]:
        """As :meth:`suspects`: the indices of these records in ``records``."""
        return self.payloads.suspects(records)

    @property
    def has_checksums(self) -> bool:
        """Whether :meth:`flaw` may find anything."""
        return self.payloads.has_checksums

    def flaw(self, record: Record) -> str | None:
        """How the bytes of a record with an entry violate a checksum of their file, as the end of a sentence: empty
        if they do not, None without a checksum. Reads the file. Raises RunCorruptError."""
        return self.payloads.flaw(record)

    def tokens(self) -> dict[str, dict[int, int]]:
        """Token ids known from the steps, see :meth:`.StepLine.own_rows`: request -> position -> id (the latest visit
        wins)."""
        table: dict[str, dict[int, int]] = {}
        for line in self.step_lines():
            for span, ids in line.own_rows():
                positions = range(span.position, span.position + span.count)
                table.setdefault(span.request, {}).update(zip(positions, ids, strict=False))
        return table

    def step_lines(self) -> Iterator[StepLine]:
        """Each rank's steps, in the order of steps."""
        return (line for step in sorted(self.steps) for line in self.steps[step].values())

    def prompts(self) -> dict[str, list[int]]:
        """The prompt of each request: the tokens computed in its first step."""
        prompts: dict[str, list[int]] = {}
        for step in sorted(self.steps):
            line = self.steps[step][min(self.steps[step])]
            ids, first_here = iter(line.info.token_ids), set()
            for run in line.info.rows:
                tokens = [t for _, t in zip(range(run.count), ids, strict=False)]
                if run.request not in prompts or run.request in first_here:
                    prompts.setdefault(run.request, []).extend(tokens)
                    first_here.add(run.request)
        return prompts

    def ledger(self) -> Ledger:
        """The completeness ledger: what was expected, and what is on disk."""
        return audit(self)

    def close(self) -> None:
        """Close the mapped files (arrays in use keep theirs)."""
        self.payloads.close()
