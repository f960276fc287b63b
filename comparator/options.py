"""What a comparison is asked for: which records, and by which tolerance."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tapscope.comparator.mapfile import MapFile
from tapscope.errors import ConfigError, RuleError
from tapscope.record import Record
from tapscope.run import Run
from tapscope.site import Glob, compact_ranges, describe_layers, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Selections apply to both runs. Raises ConfigError for a tolerance that cannot be meant."""

    sites: tuple[str, ...] = ()
    """Globs; a record is compared when its site matches any of them. Empty selects every site."""
    skip: tuple[str, ...] = ()
    """Globs of sites to leave out."""
    layers: frozenset[int] | None = None
    """Layers to compare; sites outside every layer are left out then."""
    steps: frozenset[int] | None = None
    """Steps of either run whose records are compared."""
    ranks: frozenset[int] | None = None
    """Ranks whose records are compared."""
    rtol: float | None = None
    """With ``atol``: every element must obey abs(target - baseline) <= atol + rtol * abs(baseline)."""
    atol: float | None = None
    """See ``rtol``; giving either replaces the noise floor, and the other one is then 0."""
    mapping: MapFile = field(default_factory=MapFile)
    """What the user's map files say of names, fused tensors, dims and rules, see :func:`.mapfile.read_maps`."""
    allow_partial: bool = False
    """Let a comparison of partial data pass when everything that could be compared agrees."""

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not (0.0 <= value < math.inf):
                raise ConfigError(f"{name}={value} is no tolerance; give a finite number that is not negative")

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """(atol, rtol) where the user gave either, else None: the noise floor decides."""
        if self.rtol is None and self.atol is None:
            return None
        return self.atol or 0.0, self.rtol or 0.0


def select(baseline: Run, target: Run, options: CompareOptions) -> tuple[list[Record], list[Record]]:
    """The selected records of both runs.

    A glob that matches a site of neither run raises RuleError: a typing error must not look like sameness.
    """
    every = {r.key.site for run in (baseline, target) for r in run.records}
    wanted, unwanted = [Glob(g) for g in options.sites], [Glob(g) for g in options.skip]
    for glob in (*wanted, *unwanted):
        if not any(map(glob.matches, every)):
            raise RuleError(
                f"no site matches {glob.text!r} in {baseline.path} or {target.path}; {describe_layers(every)} "
                f"(see: tapscope ls {baseline.path})"
            )
    chosen = {site for site in every if _keeps(site, wanted, unwanted, options.layers)}
    if not chosen and every:
        raise RuleError(f"the selection leaves no site of {baseline.path} or {target.path}; {describe_layers(every)}")
    for what, wanted_ones, known in (
        ("step", options.steps, {r.key.step for run in (baseline, target) for r in run.records}),
        ("rank", options.ranks, {r.key.rank for run in (baseline, target) for r in run.records}),
    ):
        if wanted_ones is not None and known and not known & set(wanted_ones):
            have, asked = compact_ranges(known), compact_ranges(wanted_ones)
            raise RuleError(f"no {what} {asked} in {baseline.path} or {target.path}; {what}s are {have}")
    return _records(baseline, chosen, options), _records(target, chosen, options)


def _keeps(site: str, wanted: Iterable[Glob], unwanted: Iterable[Glob], layers: frozenset[int] | None) -> bool:
    wanted = list(wanted)
    if wanted and not any(glob.matches(site) for glob in wanted):
        return False
    if layers is not None and layer_of(site.rpartition(":")[0]) not in layers:
        return False
    return not any(glob.matches(site) for glob in unwanted)


def _records(run: Run, chosen: set[str], options: CompareOptions) -> list[Record]:
    return [
        r
        for r in run.records
        if r.key.site in chosen
        and (options.steps is None or r.key.step in options.steps)
        and (options.ranks is None or r.key.rank in options.ranks)
    ]
