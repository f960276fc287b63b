"""Pipeline stages: make layer and expert numbers global if a framework restarts them on every rank.

Megatron-core keeps the layers of a stage in a local list: ``decoder.layers.0`` of the second of two stages is layer 2
of 4. Expert parallelism does the same with ``local_experts``. A run with global numbers is left unchanged, and so is a
site whose dims declare it equal on all stages. Virtual stages, recorded as several models per rank, are merged into one
model.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct, structs

from tapscope.core.dims import parse
from tapscope.core.errors import DimsError
from tapscope.core.site import Glob, module_of
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.record import Key, Record, virtual_stages
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run


class NumberedModules(Struct, frozen=True):
    """A kind of numbered module (layer or expert) and the mesh axis that distributes it."""

    axis: str
    """Mesh axis over which the modules are distributed."""
    noun: str
    pattern: re.Pattern[str]
    """Matches a site of such a module; the second group is the number."""
    totals: tuple[str, ...]
    """Names of the hyperparameters that may hold the total number of modules."""


KINDS = (
    NumberedModules(
        "pp", "layer", re.compile(r"^((?:[^:.]+\.)*?(?:layers|h|blocks)\.)(\d+)(?=[.:])"), ("num_hidden_layers",)
    ),
    NumberedModules(
        "ep",
        "expert",
        re.compile(r"^([^:]*\.local_experts\.)(\d+)(?=[.:])"),
        ("num_experts", "num_local_experts", "n_routed_experts"),
    ),
)


class NumberedRecords(Struct, frozen=True):
    """The records of a run with global layer and expert numbers."""

    records: Records
    sites: Mapping[str, SiteInfo]
    notes: tuple[str, ...] = ()
    """Assumptions, and facts that could not be determined."""


def number_across_ranks(run: Run, given: Sequence[tuple[Glob, str]] = ()) -> NumberedRecords:
    """Return the records of a run with global numbers; unchanged if no rank restarts them.

    ``given`` are (glob, dims) pairs that override the recorded dims.
    """
    numbered = _without_virtual_stages(run, NumberedRecords(run.records, run.sites))
    for kind in KINDS:
        if run.mesh.get(kind.axis, 1) > 1:
            numbered = _renumbered(run, kind, numbered, _replicated(numbered.records, kind.axis, given))
    if run.mesh.get("pp", 1) > 1:
        stage = {rank: run.coords(rank).get("pp", 0) for rank in run.ranks}
        numbered = structs.replace(
            numbered,
            records=Records(
                name_stage_boundaries(numbered.records, lambda key: stage[key.rank], _holders(numbered.records))
            ),
        )
    return numbered


def _without_virtual_stages(run: Run, given: NumberedRecords) -> NumberedRecords:
    """Return the records of virtual stages merged into one model.

    Layers run through the first virtual stage of all ranks, then through the second, and so on. Of a value that all
    virtual stages have, such as a rotary embedding, each rank contributes one record.
    """
    number = virtual_stages(kind.model for kind in given.records.kinds)
    if not number:
        return given
    size = run.mesh.get("pp", 1)
    stage = {
        (rank, model): i * size + run.coords(rank).get("pp", 0) for rank in run.ranks for model, i in number.items()
    }
    layers: dict[int, int] = {}
    held = set[str]()
    for key in (record.key for record in given.records):
        if (match := KINDS[0].pattern.match(key.site)) is None:
            held.add(module_of(key.site))
        elif layers.setdefault(int(match[2]), stage[key.rank, key.model]) != stage[key.rank, key.model]:
            note = f"{run.name}: its virtual stages have the same layer numbers, and were kept separate"
            return structs.replace(given, notes=(*given.notes, note))
    by_key: dict[Key, Record] = {}
    for record in name_stage_boundaries(given.records, lambda key: stage[key.rank, key.model], held):
        key = record.key._replace(model="")
        by_key.setdefault(key, record._replace(key=key))
    note = f"{run.name}: {len(number)} virtual stages of each rank were put together"
    return NumberedRecords(Records(by_key.values()), given.sites, (*given.notes, note))


def _holders(records: Records) -> set[str]:
    """Return the paths of the ancestors of layers, including the root."""
    lists = {match[1] for site in records.distinct_sites() if (match := KINDS[0].pattern.match(site))}
    paths = {path.rstrip(".").rpartition(".")[0] for path in lists}
    return {".".join(path.split(".")[:n]) for path in paths for n in range(path.count(".") + 2)}


def _replicated(records: Iterable[Record], axis: str, given: Sequence[tuple[Glob, str]]) -> set[str]:
    """Return the sites that dims declare equal on all ranks of a mesh axis."""
    dims_of: dict[str, str | None] = {}
    for record in records:
        site = record.key.site
        if record.dtype is not None and site not in dims_of:
            dims_of[site] = next((dims for glob, dims in given if glob.matches(site)), record.dims)
    return {site for site, dims in dims_of.items() if dims and axis in _replicas(dims)}


@lru_cache(maxsize=256)
def _replicas(dims: str) -> tuple[str, ...]:
    try:
        return parse(dims).replicated
    except DimsError:  # reported when the records are assembled
        return ()


def _renumbered(run: Run, kind: NumberedModules, given: NumberedRecords, replicated: set[str]) -> NumberedRecords:
    stage = {rank: run.coords(rank).get(kind.axis, 0) for rank in run.ranks}
    seen: dict[int, set[int]] = {}
    for site, rank in {(r.key.site, r.key.rank) for r in given.records}:
        if site not in replicated and (match := kind.pattern.match(site)):
            seen.setdefault(stage[rank], set()).add(int(match[2]))
    if len(seen) < 2 or len(set.union(*seen.values())) == sum(map(len, seen.values())):
        return given  # no number occurs on two stages: the numbers are already global
    if len({r.key.model for r in given.records}) > 1:
        note = f"{run.name} restarts its {kind.noun} numbers in every chunk and stage; they were kept as recorded"
        return structs.replace(given, notes=(*given.notes, note))
    sizes, doubt = _sizes(run, kind, seen)
    if not sizes:
        note = (
            f"{run.name} restarts its {kind.noun} numbers on every rank of {kind.axis}, and {doubt}: kept as recorded"
        )
        return structs.replace(given, notes=(*given.notes, note))
    note = f"{run.name}: {kind.noun} numbers were made global across the ranks of {kind.axis}" + (
        f"; {doubt}" if doubt else ""
    )
    starts = [0, *accumulate(sizes)]
    sites = dict(given.sites)
    records = []
    for record in given.records:
        start = 0 if record.key.site in replicated else starts[stage[record.key.rank]]
        name = _shifted(record.key.site, kind, start)
        if name != record.key.site:
            if record.key.site in given.sites:
                sites.setdefault(name, given.sites[record.key.site])
            record = record._replace(key=record.key._replace(site=name))
        records.append(record)
    return NumberedRecords(Records(records), sites, (*given.notes, note))


def _shifted(site: str, kind: NumberedModules, start: int) -> str:
    match = kind.pattern.match(site) if start else None
    return site if match is None else f"{match[1]}{int(match[2]) + start}{site[match.end() :]}"


def _sizes(run: Run, kind: NumberedModules, seen: Mapping[int, set[int]]) -> tuple[list[int], str]:
    """Return (number of modules on each rank of the axis, doubt about these numbers); an empty list if they are
    unknown."""
    num_stages = run.mesh[kind.axis]
    config = run.manifest.get("model_config") or {}
    total = next((int(config[name]) for name in kind.totals if config.get(name)), None)
    least = [max(seen.get(s, {-1})) + 1 for s in range(num_stages)]
    if total is None:
        return least, f"the number on each is taken from what was recorded ({', '.join(map(str, least))})"
    if sum(least) == total:
        return least, ""
    share, rest = divmod(total, num_stages)
    if not rest and max(least) <= share:
        return [share] * num_stages, f"{share} each, as the model has {total}"
    return [], f"{total} cannot be divided into what was recorded ({', '.join(map(str, least))})"


def name_stage_boundaries(records: Sequence[Record], stage: Callable[[Key], int], holders: set[str]) -> list[Record]:
    """Return the records, renaming inputs and outputs of layer ancestors that differ between stages.

    ``holders`` are the paths of the ancestors of layers. A stage whose value is not that of the whole model gets names
    such as ``out[stage0]`` and ``in[hidden_states.stage1]``.
    """
    stages_of = _differing_sites(records, stage, holders)
    return [_named(record, stage, stages_of) for record in records]


def _differing_sites(
    records: Sequence[Record], stage: Callable[[Key], int], holders: set[str]
) -> dict[str, tuple[int, int]]:
    """Return (first, last stage) of each site whose values differ between stages."""
    seen: dict[str, set[int]] = {}
    values: dict[tuple[str, int, int, int, str], set[str | None]] = {}
    for record in records:
        key = record.key
        if module_of(key.site) in holders and record.dtype is not None:
            seen.setdefault(key.site, set()).add(stage(key))
            firing = (key.site, key.step, key.micro, key.occurrence, key.pass_)
            values.setdefault(firing, set()).add(record.hash)
    differ = {firing[0] for firing, hashes in values.items() if len(hashes) > 1}
    return {site: (min(stages), max(stages)) for site, stages in seen.items() if len(stages) > 1 and site in differ}


def _named(record: Record, stage: Callable[[Key], int], stages_of: Mapping[str, tuple[int, int]]) -> Record:
    site, here = record.key.site, stage(record.key)
    stages = stages_of.get(site.removesuffix(".grad")) or stages_of.get(
        site
    )  # the first stage's input may have no gradient
    if stages is None:
        return record
    path, _, port = site.rpartition(":")
    if here == stages[0 if port.startswith("in[") else 1]:
        return record
    bare, grad = port.removesuffix(".grad"), ".grad" if port.endswith(".grad") else ""
    named = f"{bare[:-1]}.stage{here}]" if bare.endswith("]") else f"{bare}[stage{here}]"
    return record._replace(key=record.key._replace(site=f"{path}:{named}{grad}"))
