"""Run: the reader of a run directory (docs/reference/run-format.md is normative)."""

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
    """One run, read-only; create instances with :func:`tapscope.open_run`.

    Opening a run parses its record lines; payloads are memory-mapped on demand. A run can be read while a recorder
    still writes to the directory.
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
        """Create a run from its parsed lines.

        ``payloads`` is the source of tensor values (default: the run's segments); ``name`` defaults to the last
        component of ``path``.
        """
        self.path = path
        self.name = path.name if name is None else name
        """Display name: the last component of the path, unless the source provides another one."""
        self.manifest = manifest
        self._ranks = ranks
        self.ranks = tuple(sorted(ranks))
        """Ranks that wrote at least one line, ascending."""
        self.payloads: Payloads = payloads or SegmentPayloads(path)
        """Source of tensor values."""
        self.quantized: Mapping[str, Callable[[], Any]] = {}
        """Site of a dequantized weight -> function that measures the error explained by its quantizer."""
        self.records = joined([ranks[rank].take_records() for rank in sorted(ranks)])
        """All records, ordered by rank, then by recording order. Record objects are created on access (about 2 us
        each): convert the sequence to a list before iterating many times."""
        self.sites: dict[str, SiteInfo] = {}
        for rank in sorted(ranks, reverse=True):
            self.sites.update(ranks[rank].sites)
        self.problems: list[str] = [p for rank in sorted(ranks) for p in ranks[rank].problems]
        self.unknown: list[str] = list(
            dict.fromkeys(sentence for rank in sorted(ranks) for sentence in ranks[rank].unknown)
        )
        """Information that the source of the run does not record; see :attr:`.Ledger.unknown`."""
        self.problems += self.payloads.missing(self.records)
        self._assumed: dict[str, int] = {}
        self.steps: dict[int, dict[int, StepLine]] = steps_of(ranks, self.problems)
        """step -> rank -> step line."""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [(len(self.records), "record"), (len(self.steps), "step"), (len(self.ranks), "rank")]
        counts = ", ".join(plural(number, noun) for number, noun in parts)
        return f"<Run {self.path}: {counts}{'' if self.closed else ', still open'}>"

    def _repr_html_(self) -> str:
        """Return a summary of the run as an HTML table for notebooks."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        facts = {name: str(self.manifest.get(name) or "") for name in ("model", "framework", "dtype", "created")}
        facts |= {"mesh": mesh, "steps": f"{len(self.steps):,}", "records": f"{len(self.records):,}"}
        facts |= {"ranks": f"{len(self.ranks):,}", "state": "closed" if self.closed else "still open"}
        return html_table([(name, text) for name, text in facts.items() if text], title=f"Run {self.path}")

    @property
    def world_size(self) -> int:
        """Number of ranks of the recorded job."""
        return int(self.manifest.get("world_size") or len(self._ranks))

    @property
    def hash_version(self) -> int:
        """Version of the hash function used for the records; hashes of different versions are not comparable."""
        return int(self.manifest.get("hash_version") or min(self.manifest["version"], HASH_VERSION))

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> size, e.g. ``{"tp": 2}``; empty if unknown."""
        later = next((e.fields.get("mesh") for e in self.events() if e.kind == "mesh"), None)
        return dict(self.manifest.get("mesh") or later or self._assumed)

    @property
    def model_config(self) -> dict[str, int | float]:
        """Model hyperparameters under their Hugging Face names, e.g. ``num_key_value_heads``; empty if unknown."""
        return dict(self.manifest.get("model_config") or {})

    def coords(self, rank: int) -> dict[str, int]:
        """Return the mesh coordinates of ``rank``: axis -> coordinate."""
        opened = [e.fields for e in self.events(rank) if e.kind in ("open", "mesh")]
        coords = dict(opened[-1].get("coords", {})) if opened else {}
        if coords or not self._assumed:
            return coords
        place = np.unravel_index(rank, tuple(self._assumed.values()))
        return {axis: int(at) for axis, at in zip(self._assumed, place, strict=True)}

    def assume_mesh(self, mesh: Mapping[str, int]) -> None:
        """Set the mesh (axis -> size) of a run that does not record one.

        Ranks are laid out in C order, last axis fastest, as in torch's ``init_device_mesh``. Raises ConfigError if the
        run records a different mesh, or if the size of the mesh differs from the number of ranks.
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
        """Return the events of ``rank``, or of all ranks."""
        return [e for r in self.ranks if rank in (None, r) for e in self._ranks[r].events]

    def metrics(self, rank: int | None = None) -> list[Metric]:
        """Return the metrics of ``rank``, or of all ranks, in recording order per rank."""
        return [m for r in self.ranks if rank in (None, r) for m in self._ranks[r].metrics]

    @property
    def closed(self) -> bool:
        """Whether every rank sent its close message."""
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
        """Return the records whose site matches any of ``globs`` (all sites if empty) and none of ``skip``.

        A plain string counts as a single glob. ``layers``, ``steps`` and ``ranks`` restrict the result further. Raises
        RuleError like :meth:`matching`.
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
        """Like :meth:`select`, but return columnar :class:`.Records`, which create record objects on access.

        Raises RuleError for a glob that matches no site of the run, so that a typo does not look like missing data.
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
        """Return a polars DataFrame with one row per record; see :func:`tapscope.run_format.table.table`."""
        return table(self.records)

    def array(self, rec: Record | str) -> np.ndarray[Any, Any]:
        """Return the payload of a record as a read-only, memory-mapped array of the record's shape.

        ``rec`` may also be the name of a site with exactly one record. bf16 and fp8 arrays have ml_dtypes dtypes.
        Raises DataError if the record has no payload: only statistics were kept, or the value is not a tensor. Raises
        RunCorruptError if the bytes are missing, and RuleError for a site with no record or with several.
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
        """Return the sketch of a record: [256] float32 counters.

        Raises DataError if the record has no sketch, and RunCorruptError if its bytes are missing.
        """
        read = getattr(self.payloads, "sketch", None)
        if rec.sketch is None or read is None:
            raise DataError(f"{rec.key.site} at step {rec.key.step} has no sketch: capture with keep=sketch")
        return read(rec)  # type: ignore[no-any-return]

    def file(self, rec: Record, end: int) -> np.ndarray[Any, Any] | None:
        """Memory-map the whole file that contains the payload of ``rec``.

        Returns None if the payload is not one contiguous range of a local file. Raises RunCorruptError if the file has
        fewer than ``end`` bytes.
        """
        return self.payloads.file(rec, end)

    @property
    def damaged(self) -> list[str]:
        """One error message per unreadable file; included in :attr:`problems`."""
        return self.payloads.damaged

    def lacks(self, rec: Record) -> str:
        """Return why the file cannot contain the payload of ``rec``, judged by metadata only; empty if it can."""
        return self.payloads.lacks(rec)

    def suspects(self, records: Records) -> Sequence[Record]:
        """Return the records for which :meth:`lacks` may report a defect, without creating the other records."""
        return records.take(self.payloads.suspects(records))

    def suspect_places(self, records: Records) -> np.ndarray[Any, Any]:
        """Return the indices in ``records`` of the records that :meth:`suspects` returns."""
        return self.payloads.suspects(records)

    @property
    def has_checksums(self) -> bool:
        """Whether :meth:`flaw` can detect corruption: the source stores checksums for some of its files."""
        return self.payloads.has_checksums

    def flaw(self, record: Record) -> str | None:
        """Check the payload of ``record`` against a checksum stored in its file; reads the payload.

        Returns the mismatch as the end of a sentence ("its bytes ..."), an empty string if the checksum matches, or
        None if there is no checksum. ``record`` must have an entry. Raises RunCorruptError if the file is unreadable.
        """
        return self.payloads.flaw(record)

    def tokens(self) -> dict[str, dict[int, int]]:
        """Return the known token ids as request -> position -> token id, where later steps overwrite earlier ones.

        Rows of rejected drafts are excluded, see :meth:`.StepLine.own_rows`.
        """
        table: dict[str, dict[int, int]] = {}
        for line in self.step_lines():
            for span, ids in line.own_rows():
                positions = range(span.position, span.position + span.count)
                table.setdefault(span.request, {}).update(zip(positions, ids, strict=False))
        return table

    def step_lines(self) -> Iterator[StepLine]:
        """Yield the step lines of all ranks in step order."""
        return (line for step in sorted(self.steps) for line in self.steps[step].values())

    def prompts(self) -> dict[str, list[int]]:
        """Return request -> prompt token ids, taken to be the tokens computed in the request's first step."""
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
        """Return the completeness ledger, which compares the values expected with the values on disk."""
        return audit(self)

    def close(self) -> None:
        """Release the memory maps; arrays that are still referenced keep theirs alive."""
        self.payloads.close()
