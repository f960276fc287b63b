"""Mesh coordinates of the ranks, and the axes along which ranks differ."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from tapscope.run_format.record import Key, Record
from tapscope.run_format.run import Run

Coords = Mapping[str, int]
"""Mesh axis -> coordinate."""


class MeshCoords(Struct, frozen=True):
    """The mesh of one run."""

    sizes: Mapping[str, int]
    """Mesh axis -> number of ranks along it."""
    coords: Mapping[int, Coords]
    """Rank -> its coordinates. A rank without coordinates has only the axis ``rank``."""

    known: dict[tuple[tuple[int, ...], tuple[str, ...]], list[dict[str, int]]] = field(default_factory=dict)
    """(ranks, axes used by dims) -> their coordinates on these, cached."""
    _records: dict[Key, Record] = field(default_factory=dict)

    @property
    def has_axes(self) -> bool:
        """Whether the run has a mesh."""
        return any(axis != "rank" for place in self.coords.values() for axis in place)

    def record(self, run: Run, key: Key) -> Record | None:
        """Return the record of a key, or None; the index of the run's records is built on first use."""
        if not self._records:
            self._records.update((r.key, r) for r in run.records)
        return self._records.get(key)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 if the mesh does not have it."""
        return self.sizes.get(axis, 1)

    def describe(self) -> str:
        """``a mesh of tp=2, pp=2``, or ``no mesh …``."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"a mesh of {axes}" if axes else "no mesh (give it with --mesh, e.g. tp=2)"


def mesh_coords_of(run: Run) -> MeshCoords:
    """Return the coordinates of a run's ranks; the size of an axis known from coordinates only is their range."""
    coords = {rank: run.coords(rank) or {"rank": rank} for rank in run.ranks}
    sizes = dict(run.mesh)
    for place in coords.values():
        for axis, at in place.items():
            if axis not in run.mesh and axis != "rank":
                sizes[axis] = max(sizes.get(axis, 1), at + 1)
    return MeshCoords(sizes, coords)


def varying_axes(places: Iterable[Coords]) -> list[str]:
    """Mesh axes along which ranks differ, sorted."""
    places = list(places)
    axes = sorted({axis for place in places for axis in place})
    return [axis for axis in axes if len({place.get(axis) for place in places}) > 1]


def project_coords(places: Sequence[Coords], axes: Iterable[str]) -> list[dict[str, int]]:
    """Return the coordinates on the axes that dims use, and on those that do not follow from them (``tp`` follows from
    ``attn_tp`` and ``attn_dp``); axes along which nothing differs are left out."""
    kept = [axis for axis in dict.fromkeys(axes) if any(axis in place for place in places)]
    keys = [tuple(place.get(axis) for axis in kept) for place in places]
    for axis in varying_axes(places):
        values: dict[tuple[int | None, ...], set[int | None]] = {}
        for key, place in zip(keys, places, strict=True):
            values.setdefault(key, set()).add(place.get(axis))
        if axis not in kept and any(len(coords_of) > 1 for coords_of in values.values()):
            kept.append(axis)
    return [{axis: place[axis] for axis in kept if axis in place} for place in places]
