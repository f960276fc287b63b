"""Convert the placements of a DTensor to dims."""

from typing import Any, NamedTuple

from msgspec.structs import replace

from tapscope.core import dims
from tapscope.core.dims import Dim, Dims, Shard
from tapscope.core.errors import DimsError
from tapscope.dumper.job.device_meshes import axis_names


class MeshAxis(NamedTuple):
    """Placement along one mesh axis with more than one rank."""

    name: str | None
    """Name of the mesh axis; None if it has no name."""
    kind: str
    """``shard``, ``inner`` (a shard inside the shards of later mesh axes), ``partial``, ``replicate``, or another
    placement that dims cannot express."""
    at: int = 0
    """Index of the sharded tensor axis."""


Placement = tuple[MeshAxis, ...]


def placement_of(tensor: Any) -> Placement:
    """Return the placements of a DTensor along the mesh axes with more than one rank."""
    mesh = tensor.device_mesh
    each = zip(axis_names(mesh), tensor.placements, mesh.shape, strict=True)
    return tuple(_axis(name, placement, tensor.ndim) for name, placement, size in each if size > 1)


def _axis(name: str | None, placement: Any, ndim: int) -> MeshAxis:
    if placement.is_replicate():
        return MeshAxis(name, "replicate")
    if placement.is_partial():
        reduction = getattr(placement, "reduce_op", "sum")
        return MeshAxis(name, "partial" if reduction == "sum" else f"partial by {reduction}")
    if hasattr(placement, "dim"):
        kind = "inner" if hasattr(placement, "split_factor") else "shard"
        return MeshAxis(name, kind, int(placement.dim) % max(ndim, 1))
    return MeshAxis(name, type(placement).__name__)


def dims_of(annotation: str | None, shape: tuple[int, ...], placement: Placement, *, flattened: bool = False) -> str:
    """Combine a dims annotation with the placements; without an annotation, the axes are named ``d0 d1 ...``.

    For mesh axes that it mentions, the annotation takes precedence. With ``flattened``, the first two axes of the
    annotation may be combined into one (rows of a padded grid). Raises DimsError if the annotation does not match
    ``shape``, and for placements that dims cannot express.
    """
    ndim = len(shape)
    if not ndim and annotation is None:
        raise DimsError("dims cannot describe the placement of a tensor without axes")
    stated = dims.parse(annotation or " ".join(f"d{i}" for i in range(ndim)))
    if flattened and stated.ndim == ndim + 1:
        stated = _flattened(stated)
    stated.check(shape)
    known = {shard.axis for _, shard in stated.shards()} | set(stated.replicated)
    new = [axis for axis in placement if axis.name not in known]
    shards: list[list[Shard]] = [list(dim.shards) for dim in stated.dims]
    for axis in sorted(new, key=lambda axis: axis.kind == "inner"):
        _place(axis, shards)
    replicated = tuple(str(axis.name) for axis in new if axis.kind == "replicate")
    whole = tuple(
        replace(dim, shards=tuple(shards_of_dim)) for dim, shards_of_dim in zip(stated.dims, shards, strict=True)
    )
    text = str(replace(stated, dims=whole, replicated=stated.replicated + replicated))
    dims.parse(text)
    return text


def _flattened(stated: Dims) -> Dims:
    first, second, *rest = stated.dims
    is_annotated = any(dim.shards or dim.size or dim.sections for dim in (first, second))
    if is_annotated or "1" in first.names + second.names:
        raise DimsError(f"dims '{stated}' do not name the axis that combines {first} and {second}")
    return replace(stated, dims=(Dim(first.names + second.names), *rest))


def _place(axis: MeshAxis, shards: list[list[Shard]]) -> None:
    if axis.name is None:
        raise DimsError("the DTensor's mesh has no names for its axes; give mesh_dim_names, e.g. ('tp',)")
    if axis.kind in ("shard", "inner"):
        shards[axis.at].append(Shard(axis.name))
    elif axis.kind == "partial":
        shards[-1].append(Shard(axis.name, partial=True))
    elif axis.kind != "replicate":
        raise DimsError(f"dims cannot express {axis.kind} over {axis.name}")
