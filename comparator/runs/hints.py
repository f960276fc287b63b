"""Hints: facts that a run records about its model in addition to values: hyperparameters, module classes, shard
counts."""

from collections.abc import Mapping

from msgspec import Struct, field

from tapscope.comparator.runs.mesh_coords import mesh_coords_of
from tapscope.comparator.runs.series import Series
from tapscope.core import dims as dims_grammar
from tapscope.core.dims import Dim, Section
from tapscope.core.errors import DimsError
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.run import Run


class Hints(Struct, frozen=True):
    """The hints of one run."""

    config: Mapping[str, float] = field(default_factory=dict)
    """Hyperparameters of the whole model, named as in Hugging Face's Llama config; empty if unknown."""
    sites: Mapping[str, SiteInfo] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    framework: str = ""

    def class_of(self, site: str) -> str:
        """Return the class name of the site's module; empty if unknown."""
        info = self.sites.get(site)
        return info.cls if info else ""

    def parent_of(self, site: str) -> str:
        """Return the class name of the parent of the site's module; empty if unknown."""
        info = self.sites.get(site)
        return (info.parent or "") if info else ""

    def count(self, name: str) -> int | None:
        """Return a hyperparameter that is a positive integer; None if it is missing or not one."""
        value = self.config.get(name)
        return int(value) if value is not None and value == int(value) and value > 0 else None

    def num_shards(self, series: Series, axis: int) -> int:
        """Return the number of shards along a tensor axis, from dims and mesh; 1 if unknown."""
        try:
            parsed = dims_grammar.parse(series.first.dims) if series.first.dims else None
        except DimsError:
            return 1
        if parsed is None or not -parsed.ndim <= axis < parsed.ndim:
            return 1
        count = 1
        for shard in parsed.dims[axis].shards:
            count *= 1 if shard.partial else self.mesh.get(shard.axis, 1)
        return count


def sections_of(dim: Dim) -> tuple[Section, ...]:
    """Return the sections of an axis that its dims state."""
    return dim.sections


def hints_of(run: Run, sites: Mapping[str, SiteInfo]) -> Hints:
    """Return the hints of a run, given its site table."""
    return Hints(
        run.manifest.get("model_config") or {},
        sites,
        mesh_coords_of(run).sizes,
        str(run.manifest.get("framework") or ""),
    )
