"""Mesh coordinates of the ranks, and the mesh axes on which ranks differ."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from tapscope.run_format.record import Key, Record
from tapscope.run_format.run import Run

Coords = Mapping[str, int]
"""Mesh axis -> coordinate."""


class MeshCoords(Struct, frozen=True):
    """The mesh sizes and rank coordinates of one run."""

    sizes: Mapping[str, int]
    """Mesh axis -> number of ranks along it."""
    coords: Mapping[int, Coords]
    """Rank -> coordinates. A rank without coordinates has the single axis ``rank``."""

    known: dict[tuple[tuple[int, ...], tuple[str, ...]], list[dict[str, int]]] = field(default_factory=dict)
    """Cache: (ranks, axes used by dims) -> coordinates of the ranks projected on those axes."""
    _records: dict[Key, Record] = field(default_factory=dict)

    @property
    def has_axes(self) -> bool:
        """Whether the run has a mesh."""
        return any(axis != "rank" for place in self.coords.values() for axis in place)

    def record(self, run: Run, key: Key) -> Record | None:
        """Return the record of a key, or None. The first call indexes all records of the run."""
        if not self._records:
            self._records.update((r.key, r) for r in run.records)
        return self._records.get(key)

    def size(self, axis: str) -> int:
        """Return the number of ranks along a mesh axis; 1 if the mesh does not have that axis."""
        return self.sizes.get(axis, 1)

    def describe(self) -> str:
        """Return ``a mesh of tp=2, pp=2``, or ``no mesh …`` with advice."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"a mesh of {axes}" if axes else "no mesh (give it with --mesh, e.g. tp=2)"


def mesh_coords_of(run: Run) -> MeshCoords:
    """Return the mesh of a run; the size of an axis that only coordinates mention is the largest coordinate plus 1."""
    coords = {rank: run.coords(rank) or {"rank": rank} for rank in run.ranks}
    sizes = dict(run.mesh)
    for place in coords.values():
        for axis, at in place.items():
            if axis not in run.mesh and axis != "rank":
                sizes[axis] = max(sizes.get(axis, 1), at + 1)
    return MeshCoords(sizes, coords)


def varying_axes(places: Iterable[Coords]) -> list[str]:
    """Return the mesh axes on which the places differ, sorted."""
    places = list(places)
    axes = sorted({axis for place in places for axis in place})
    return [axis for axis in axes if len({place.get(axis) for place in places}) > 1]


def project_coords(places: Sequence[Coords], axes: Iterable[str]) -> list[dict[str, int]]:
    """Return the coordinates on the axes that dims use, and on axes that do not follow from those.

    For example, ``tp`` follows from ``attn_tp`` and ``attn_dp``. Axes on which no places differ are left out.
    """
    kept = [axis for axis in dict.fromkeys(axes) if any(axis in place for place in places)]
    keys = [tuple(place.get(axis) for axis in kept) for place in places]
    for axis in varying_axes(places):
        values: dict[tuple[int | None, ...], set[int | None]] = {}
        for key, place in zip(keys, places, strict=True):
            values.setdefault(key, set()).add(place.get(axis))
        if axis not in kept and any(len(coords_of) > 1 for coords_of in values.values()):
            kept.append(axis)
    return [{axis: place[axis] for axis in kept if axis in place} for place in places]
