"""Hints: what a run says of its model beside the values: hyperparameters, classes, how many ranks share a tensor."""

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
    """Of one run."""

    config: Mapping[str, float] = field(default_factory=dict)
    """Hyperparameters of the whole model as Hugging Face's Llama spells them; empty when nobody said."""
    sites: Mapping[str, SiteInfo] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    framework: str = ""

    def class_of(self, site: str) -> str:
        """Class of the module; empty when unknown."""
        info = self.sites.get(site)
        return info.cls if info else ""

    def parent_of(self, site: str) -> str:
        """Class of the module that holds it; empty when unknown."""
        info = self.sites.get(site)
        return (info.parent or "") if info else ""

    def count(self, name: str) -> int | None:
        """A hyperparameter that is a number of things."""
        value = self.config.get(name)
        return int(value) if value is not None and value == int(value) and value > 0 else None

    def num_shards(self, series: Series, axis: int) -> int:
        """How many shards lie side by side along a tensor axis, by the dims and the mesh; 1 when nobody said."""
        try:
            parsed = dims_grammar.parse(series.first.dims) if series.first.dims else None
        except DimsError:
            return 1
        if parsed is None or not -parsed.ndim <= axis < parsed.ndim:
            return 1
        found = 1
        for shard in parsed.dims[axis].shards:
            found *= 1 if shard.partial else self.mesh.get(shard.axis, 1)
        return found


def sections_of(dim: Dim) -> tuple[Section, ...]:
    """What lies side by side in an axis, by its dims."""
    return dim.sections


def hints_of(run: Run, sites: Mapping[str, SiteInfo]) -> Hints:
    """The hints of a run and its site table."""
    return Hints(
        run.manifest.get("model_config") or {},
        sites,
        mesh_coords_of(run).sizes,
        str(run.manifest.get("framework") or ""),
    )
