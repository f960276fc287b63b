"""Dims: names of a tensor's axes and how each is sharded over the mesh.

Grammar (SGLang's, so that annotations written for it keep working)::

    dims  = dim { " " dim } [ "#" declaration { " " declaration } ]
    dim   = "1" | name [ mods ] | "(" name "*" name { "*" name } ")" [ mods ]
    mods  = "[" mod { "," mod } "]"                        outermost shard first
    mod   = axis [ ":" qualifier { "+" qualifier } ]
    qualifier   = "zigzag" | "natural" | "partial" | "sharded"
    declaration = axis ":replicated" | "dp:=" axis

    t h[tp]      s[cp:zigzag,sp] b h # tp:replicated      t (num_heads*head_dim)[tp]      t h[tp:partial]
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from tapscope.errors import DimsError

AXES = (
    *("tp", "cp", "ep", "sp", "dp", "etp", "edp"),
    *("attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp", "moe_cp"),
    "recompute_pseudo",
)
"""The mesh axes SGLang and Megatron shard tensors over."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DIM = re.compile(rf"(?P<name>1|{_NAME}|\({_NAME}(?:\*{_NAME})+\))(?:\[(?P<mods>[^\[\]]*)\])?")


@dataclass(frozen=True, slots=True)
class Shard:
    """How one dim is spread over one mesh axis."""

    axis: str
    order: str | None = None
    """``zigzag``, ``natural`` or None."""
    partial: bool = False
    """Every rank holds a summand of the whole, not a piece of it."""

    def __str__(self) -> str:
        qualifiers = [q for q in (self.order, "partial" if self.partial else None) if q]
        return self.axis + (":" + "+".join(qualifiers) if qualifiers else "")


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis of a tensor."""

    names: tuple[str, ...]
    """One name; several when fused; ``("1",)`` for a singleton."""
    shards: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        name = self.names[0] if len(self.names) == 1 else f"({'*'.join(self.names)})"
        return name + (f"[{','.join(map(str, self.shards))}]" if self.shards else "")


@dataclass(frozen=True, slots=True)
class Dims:
    """A parsed annotation; ``str(dims)`` prints it in canonical form."""

    dims: tuple[Dim, ...]
    replicated: tuple[str, ...] = ()
    """Mesh axes whose ranks all hold the same values."""
    dp: str | None = None
    """The axis that plays the role of data parallelism, where it is not ``dp``."""

    def __str__(self) -> str:
        declared = [f"{axis}:replicated" for axis in self.replicated] + ([f"dp:={self.dp}"] if self.dp else [])
        return " ".join(map(str, self.dims)) + (f" # {' '.join(declared)}" if declared else "")

    @property
    def ndim(self) -> int:
        """Number of tensor axes described."""
        return len(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names with fused ones spread out and singletons left out."""
        return tuple(name for dim in self.dims for name in dim.names if name != "1")

    def index(self, name: str) -> int | None:
        """Tensor axis whose only name is ``name``, or None."""
        return next((i for i, dim in enumerate(self.dims) if dim.names == (name,)), None)

    def shards(self) -> tuple[tuple[int, Shard], ...]:
        """Every (tensor axis, shard), dims left to right, outermost shard first."""
        return tuple((i, shard) for i, dim in enumerate(self.dims) for shard in dim.shards)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise DimsError when ``shape`` has another number of axes, or a ``1`` axis of another size."""
        if len(shape) != self.ndim:
            raise DimsError(f"dims '{self}' name {self.ndim} axes but the tensor has {len(shape)}: {tuple(shape)}")
        for dim, size in zip(self.dims, shape, strict=True):
            if dim.names == ("1",) and size != 1:
                raise DimsError(f"dims '{self}' say 1 where the tensor of shape {tuple(shape)} has {size}")


@lru_cache(maxsize=4096)
def parse(text: str) -> Dims:
    """Parse an annotation; raises DimsError that names the offending part."""
    shape, _, declarations = text.partition("#")
    dims = tuple(_parse_dim(token, text) for token in shape.split())
    if not dims:
        raise DimsError(f"dims {text!r} name no axis; write e.g. 't h[tp]'")
    replicated, dp = _parse_declarations(declarations.split(), text)
    parsed = Dims(dims, replicated, dp)
    _check_unique(parsed, text)
    return parsed


def _parse_dim(token: str, text: str) -> Dim:
    match = _DIM.fullmatch(token)
    if match is None:
        raise DimsError(f"{token!r} in dims {text!r} is not an axis; write NAME, NAME[tp], (A*B)[tp] or 1")
    names = tuple(match["name"].strip("()").split("*"))
    if match["mods"] is None:
        return Dim(names)
    if names == ("1",):
        raise DimsError(f"{token!r} in dims {text!r}: an axis of size 1 cannot be sharded")
    shards = tuple(_parse_shard(mod, text) for mod in match["mods"].split(","))
    axes = [shard.axis for shard in shards]
    if len(set(axes)) < len(axes):
        raise DimsError(f"{token!r} in dims {text!r} names a mesh axis twice")
    return Dim(names, shards)


def _parse_shard(mod: str, text: str) -> Shard:
    axis, colon, rest = mod.partition(":")
    _check_axis(axis, text)
    qualifiers = rest.split("+") if colon else []
    unknown = [q for q in qualifiers if q not in ("zigzag", "natural", "partial", "sharded")]
    if unknown:
        raise DimsError(f"{unknown[0]!r} in dims {text!r} is no qualifier; use zigzag, natural, partial or sharded")
    orders = [q for q in qualifiers if q in ("zigzag", "natural")]
    reductions = [q for q in qualifiers if q in ("partial", "sharded")]
    if len(orders) > 1 or len(reductions) > 1:
        raise DimsError(f"{mod!r} in dims {text!r} contradicts itself: one order and one of partial/sharded at most")
    return Shard(axis, orders[0] if orders else None, "partial" in reductions)


def _parse_declarations(words: list[str], text: str) -> tuple[tuple[str, ...], str | None]:
    replicated: list[str] = []
    dp: str | None = None
    for word in words:
        if word.startswith("dp:="):
            if dp is not None:
                raise DimsError(f"dims {text!r} declare dp twice")
            dp = word.removeprefix("dp:=")
            _check_axis(dp, text)
            continue
        axis, _, what = word.partition(":")
        if what != "replicated":
            raise DimsError(f"{word!r} in dims {text!r} is no declaration; write AXIS:replicated or dp:=AXIS")
        _check_axis(axis, text)
        if axis in replicated:
            raise DimsError(f"dims {text!r} declare {axis} replicated twice")
        replicated.append(axis)
    return tuple(replicated), dp


def _check_axis(axis: str, text: str) -> None:
    if axis not in AXES:
        raise DimsError(f"{axis!r} in dims {text!r} is no mesh axis; known: {', '.join(AXES)}")


def _check_unique(dims: Dims, text: str) -> None:
    names = dims.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise DimsError(f"dims {text!r} use the name {twice!r} twice")
    both = {shard.axis for _, shard in dims.shards()} & set(dims.replicated)
    if both:
        raise DimsError(f"dims {text!r} call {min(both)} both sharded and replicated")
