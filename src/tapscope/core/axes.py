"""Axes: the parsed dims annotation of each axis of a tensor; the grammar is in :mod:`tapscope.core.dims`."""

from msgspec import Struct

from tapscope.core.errors import DimsError

AXES = (
    *("tp", "cp", "ep", "sp", "dp", "etp", "edp"),
    *("attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp", "moe_cp", "dcp", "pcp"),
    *("dp_shard", "dp_replicate", "fsdp", "recompute_pseudo"),
)
"""The mesh axes that SGLang, Megatron, vLLM and torchtitan shard tensors over."""
STAGES = ("pp", "vpp")
"""Mesh axes whose ranks hold different layers: a tensor may be replicated over them, never sharded."""


class Shard(Struct, frozen=True):
    """The sharding of one tensor axis over one mesh axis."""

    axis: str
    order: str | None = None
    """``zigzag``, ``natural`` or None."""
    partial: bool = False
    """True if every rank holds a partial sum of the whole tensor, not a shard."""

    def __str__(self) -> str:
        qualifiers = [q for q in (self.order, "partial" if self.partial else None) if q]
        return self.axis + (":" + "+".join(qualifiers) if qualifiers else "")


class Size(Struct, frozen=True):
    """The size of an axis, or of a section of one, in the whole tensor."""

    whole: int
    copies: int = 1
    """Number of consecutive ranks that hold the same shard."""

    def __str__(self) -> str:
        return f"={self.whole}" + (f"x{self.copies}" if self.copies > 1 else "")


class Section(Struct, frozen=True):
    """One of several tensors concatenated along an axis, such as ``gate`` in a fused gate-up projection."""

    name: str
    size: Size | None = None
    """None: all sections have the same size."""

    def __str__(self) -> str:
        return self.name + str(self.size or "")


class Dim(Struct, frozen=True):
    """One axis of a tensor."""

    names: tuple[str, ...]
    """A single name; several names for a flattened axis or an axis with sections; ``("1",)`` for a singleton."""
    shards: tuple[Shard, ...] = ()
    size: Size | None = None
    """The size in the whole tensor; None if unknown."""
    sections: tuple[Section, ...] = ()
    groups: int = 0
    """Number of groups in which the sections are interleaved; 0: one group per rank."""

    def __str__(self) -> str:
        name = self.names[0] if len(self.names) == 1 else f"({'*'.join(self.names)})"
        if self.sections:
            name = f"({'+'.join(map(str, self.sections))})" + (f"/{self.groups}" if self.groups else "")
        return name + str(self.size or "") + (f"[{','.join(map(str, self.shards))}]" if self.shards else "")


class Dims(Struct, frozen=True):
    """A parsed annotation; ``str(dims)`` prints it in canonical form."""

    dims: tuple[Dim, ...]
    replicated: tuple[str, ...] = ()
    """Mesh axes over which the tensor is replicated."""
    dp: str | None = None
    """The data-parallel axis, if not ``dp``."""
    rows: str | None = None
    """Port of the same module whose integer values map each row of the tensor to a token row."""

    def __str__(self) -> str:
        declared = [f"{axis}:replicated" for axis in self.replicated]
        declared += [f"{key}:={value}" for key, value in (("dp", self.dp), ("rows", self.rows)) if value]
        return " ".join(map(str, self.dims)) + (f" # {' '.join(declared)}" if declared else "")

    @property
    def ndim(self) -> int:
        """Number of tensor axes in the annotation."""
        return len(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, with fused axes expanded and singletons omitted."""
        return tuple(name for dim in self.dims for name in dim.names if name != "1")

    def index(self, name: str) -> int | None:
        """Return the index of the tensor axis whose only name is ``name``, or None."""
        return next((i for i, dim in enumerate(self.dims) if dim.names == (name,)), None)

    def shards(self) -> tuple[tuple[int, Shard], ...]:
        """Return every (tensor axis, shard): axes from left to right, the outermost shard of an axis first."""
        return tuple((i, shard) for i, dim in enumerate(self.dims) for shard in dim.shards)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise DimsError if ``shape`` has a different number of axes or an axis named ``1`` whose size is not 1."""
        if len(shape) != self.ndim:
            raise DimsError(f"dims '{self}' name {self.ndim} axes but the tensor has {len(shape)}: {tuple(shape)}")
        for dim, size in zip(self.dims, shape, strict=True):
            if dim.names == ("1",) and size != 1:
                raise DimsError(f"dims '{self}' have an axis of size 1 where the shape {tuple(shape)} has {size}")
