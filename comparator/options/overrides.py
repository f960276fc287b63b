"""Overrides: dims and meshes given at comparison time, which supplement or replace the recorded ones."""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from tapscope.comparator.options.map_file import DimsEntry
from tapscope.comparator.runs.pipeline_stages import NumberedRecords
from tapscope.core.axes import AXES, STAGES
from tapscope.core.dims import parse
from tapscope.core.errors import ConfigError, DimsError, RuleError
from tapscope.core.site import Glob, describe_layers
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run

SIDES = ("baseline", "target")
_MESH = re.compile(r"(?P<axis>\w+)=(?P<size>[0-9]{1,6})")


class MeshEntry(Struct, frozen=True):
    """The mesh of a run that does not record one."""

    where: str
    """Flag, or file and key, for messages."""
    sizes: tuple[tuple[str, int], ...]
    """(axis, size) pairs, the slowest-varying axis first."""
    side: str = "both"


def parse_dims(text: str) -> DimsEntry:
    """Parse ``[baseline:|target:]GLOB=DIMS``, the value of ``--dims``; raises ConfigError or DimsError."""
    side, rest = split_side(text)
    glob, equals, dims = rest.partition("=")
    if not equals or not glob.strip() or not dims.strip():
        raise ConfigError(f"--dims {text!r} must be GLOB=DIMS, e.g. 'layers.*.mlp:out=t h[tp:partial]'")
    return DimsEntry(f"--dims {text!r}", glob.strip(), dims.strip(), side)


def parse_mesh(text: str) -> MeshEntry:
    """Parse ``[baseline:|target:]AXIS=SIZE,...``, the value of ``--mesh``; raises ConfigError."""
    side, rest = split_side(text)
    matches = [_MESH.fullmatch(part.strip()) for part in rest.split(",")]
    sizes = tuple((m["axis"], int(m["size"])) for m in matches if m is not None)
    if len(sizes) < len(matches) or not all(size for _, size in sizes) or len(dict(sizes)) < len(sizes):
        raise ConfigError(f"--mesh {text!r} must be AXIS=SIZE,..., the slowest axis first, e.g. 'pp=2,tp=4'")
    unknown = next((axis for axis, _ in sizes if axis not in (*AXES, *STAGES)), None)
    if unknown is not None:
        raise ConfigError(f"--mesh {text!r}: unknown mesh axis {unknown!r}; valid axes: {', '.join((*AXES, *STAGES))}")
    return MeshEntry(f"--mesh {text!r}", sizes, side)


def split_side(text: str) -> tuple[str, str]:
    """Split ``[baseline:|target:]REST`` into (side, rest); the side is ``both`` if none is given."""
    side, colon, rest = text.partition(":")
    return (side, rest) if colon and side in SIDES else ("both", text)


def assume_meshes(runs: tuple[Run, Run], entries: Iterable[MeshEntry]) -> None:
    """Set the meshes of the runs.

    Raises ConfigError for an entry that no run needs, or that contradicts the run.
    """
    for entry in entries:
        sides = [i for i, side in enumerate(SIDES) if entry.side in (side, "both")]
        if entry.side == "both":
            sides = [i for i in sides if not runs[i].mesh and runs[i].world_size > 1]
        if not sides:
            raise ConfigError(f"{entry.where}: both runs record their mesh, or have one rank")
        for i in sides:
            runs[i].assume_mesh(dict(entry.sizes))


def override_dims(
    runs: tuple[Run, Run], given: tuple[NumberedRecords, NumberedRecords], entries: Sequence[DimsEntry]
) -> tuple[NumberedRecords, NumberedRecords]:
    """Return the records of both runs, with the dims of the first entry that matches their site.

    Raises DimsError, naming the entry, for invalid dims, and RuleError for an entry that matches no tensor.
    """
    for entry in entries:
        try:
            parse(entry.dims)
        except DimsError as error:
            raise DimsError(f"{entry.where}: {error}") from None
    if not entries:
        return given
    used: set[int] = set()
    left, right = (_overridden(numbered, entries, side, used) for numbered, side in zip(given, SIDES, strict=True))
    sites = [{r.key.site for r in numbered.records if r.dtype is not None} for numbered in given]
    for entry in (entry for i, entry in enumerate(entries) if i not in used):
        mine = [some for some, side in zip(sites, SIDES, strict=True) if entry.side in (side, "both")]
        if any(Glob(entry.site).matches(site) for some in mine for site in some):
            note = f"{entry.where}: unused, since earlier dims cover {entry.site!r}"
            left = structs.replace(left, notes=(*left.notes, note))
            continue
        paths = [str(run.path) for run, side in zip(runs, SIDES, strict=True) if entry.side in (side, "both")]
        every = {site for numbered in given for site in numbered.records.distinct_sites()}
        raise RuleError(
            f"{entry.where}: no tensor of {' or '.join(paths)} is at {entry.site!r}; {describe_layers(every)} "
            f"(see: tapscope ls {paths[0]})"
        )
    return left, right


def side_entries(entries: Iterable[DimsEntry], side: str) -> list[tuple[Glob, str]]:
    """Return (site glob, dims) of the entries that apply to one side of :data:`SIDES`."""
    return [(Glob(entry.site), entry.dims) for entry in entries if entry.side in (side, "both")]


def baseline_entries(entries: Iterable[DimsEntry], numbered: NumberedRecords) -> tuple[DimsEntry, ...]:
    """Return the entries that set the dims of baseline sites; these also apply to a noise run."""
    mine = [entry for entry in entries if entry.side != "target"]
    globs = [Glob(entry.site) for entry in mine]
    sites = {r.key.site for r in numbered.records if r.dtype is not None}
    first = {next((i for i, glob in enumerate(globs) if glob.matches(site)), -1) for site in sites}
    return tuple(entry for i, entry in enumerate(mine) if i in first)


def _overridden(numbered: NumberedRecords, entries: Sequence[DimsEntry], side: str, used: set[int]) -> NumberedRecords:
    mine = [(i, Glob(entry.site), entry.dims) for i, entry in enumerate(entries) if entry.side in (side, "both")]
    chosen: dict[str, str | None] = {}
    records = []
    for record in numbered.records:
        site = record.key.site
        if record.dtype is not None and site not in chosen:
            first = next(((i, dims) for i, glob, dims in mine if glob.matches(site)), None)
            chosen[site] = first[1] if first else None
            used |= {first[0]} if first else set()
        dims = chosen.get(site)
        records.append(record if dims is None or record.dtype is None else record._replace(dims=dims))
    return structs.replace(numbered, records=Records(records))
