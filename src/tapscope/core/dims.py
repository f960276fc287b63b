"""Dims: names of a tensor's axes and how each is sharded over the mesh.

The grammar is SGLang's, so annotations written for it keep working, with extensions::

    dims   = dim { " " dim } [ "#" declaration { " " declaration } ]
    dim    = "1" | name [ size ] [ mods ]
           | "(" name { "*" name } ")" [ size ] [ mods ]              axes that were flattened into one
           | "(" name [ size ] { "+" name [ size ] } ")" [ "/" groups ] [ mods ]    tensors concatenated along one axis
    size   = "=" whole [ "x" copies ]
    mods   = "[" mod { "," mod } "]"                                  outermost shard first
    mod    = axis [ ":" qualifier { "+" qualifier } ]
    qualifier   = "zigzag" | "natural" | "partial" | "sharded"
    declaration = axis ":replicated" | "dp:=" axis | "rows:=" port

    t h[tp]      s[cp:zigzag,sp] b h # tp:replicated      t (num_heads*head_dim)[tp]      t h[tp:partial]
    t v=50257[tp]                       50257 columns in the whole tensor; further columns of the shards are padding
    t kv=2x4[tp] d                      2 heads, each replicated on 4 adjacent ranks (GQA with fewer heads than ranks)
    t (gate+up)[tp]                     rank r holds [gate_r | up_r]; the whole is [gate | up]
    t (q=4096+k=1024+v=1024)[tp]        sections of unequal size; sizes are of the whole
    t (q=4096+k=256x4+v=256x4)[tp]      k and v additionally replicated
    s b (q=2048+k=512+v=512)/8[tp]      8 groups [q_g | k_g | v_g], as in Megatron; the whole is [q | k | v]
    t[dp] h                             ranks along dp hold different requests of one batch
    t[ep] h # rows:=tap[token_ids]      an integer port of the same module maps rows to token rows; -1: no token row

``t`` is the axis of packed tokens, ``b`` and ``s`` are batch and sequence; other names are arbitrary.
"""

import re
from functools import lru_cache

from tapscope.core.axes import AXES as AXES
from tapscope.core.axes import STAGES as STAGES
from tapscope.core.axes import Dim as Dim
from tapscope.core.axes import Dims as Dims
from tapscope.core.axes import Section as Section
from tapscope.core.axes import Shard as Shard
from tapscope.core.axes import Size as Size
from tapscope.core.errors import DimsError

MAX_LENGTH = 1000
"""Maximum number of characters of an annotation."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SIZE = r"=[0-9]{1,18}(?:x[0-9]{1,6})?"
_DIM = re.compile(
    rf"(?P<name>1|{_NAME}|\({_NAME}(?:\*{_NAME})+\))(?P<size>{_SIZE})?(?:\[(?P<mods>[^\[\]]*)\])?"
    rf"|\((?P<sections>{_NAME}(?:{_SIZE})?(?:\+{_NAME}(?:{_SIZE})?)+)\)(?:/(?P<groups>[0-9]{{1,9}}))?"
    r"(?:\[(?P<mods2>[^\[\]]*)\])?"
)


@lru_cache(maxsize=4096)
def parse(text: str) -> Dims:
    """Parse a dims annotation; raises DimsError that names the offending part."""
    if len(text) > MAX_LENGTH:
        raise DimsError(f"dims {text[:40]!r}... have {len(text)} characters; at most {MAX_LENGTH} are allowed")
    shape, _, declarations = text.partition("#")
    dims = tuple(_parse_dim(token, text) for token in shape.split())
    if not dims:
        raise DimsError(f"dims {text!r} name no axis; write e.g. 't h[tp]'")
    parsed = Dims(dims, *_parse_declarations(declarations.split(), text))
    _check_unique(parsed, text)
    return parsed


def _parse_dim(token: str, text: str) -> Dim:
    match = _DIM.fullmatch(token)
    if match is None:
        raise DimsError(
            f"{token!r} in dims {text!r} is not an axis; write NAME, NAME[tp], NAME=SIZE[tp], (A*B)[tp], (A+B)[tp] or 1"
        )
    sections = tuple(_parse_section(part, text) for part in (match["sections"] or "").split("+") if part)
    names = tuple(s.name for s in sections) or tuple(match["name"].strip("()").split("*"))
    size = _parse_size(match["size"], text)
    mods = match["mods"] if match["mods"] is not None else match["mods2"]
    if names == ("1",) and (mods is not None or size):
        raise DimsError(f"{token!r} in dims {text!r}: an axis of size 1 cannot be sharded or have another size")
    shards = () if mods is None else tuple(_parse_shard(mod, text) for mod in mods.split(","))
    groups = int(match["groups"] or 0)
    if match["groups"] and not groups:
        raise DimsError(f"{token!r} in dims {text!r}: the number of groups must be at least 1")
    dim = Dim(names, shards, size, sections, groups)
    _check_dim(dim, token, text)
    return dim


def _check_dim(dim: Dim, token: str, text: str) -> None:
    axes = [shard.axis for shard in dim.shards]
    if len(set(axes)) < len(axes):
        raise DimsError(f"{token!r} in dims {text!r} names a mesh axis twice")
    known = [s.size is not None for s in dim.sections]
    if any(known) and not all(known):
        raise DimsError(f"{token!r} in dims {text!r}: give the size of every section, or of none if all are equal")
    sizes = [dim.size, *(s.size for s in dim.sections)]
    copies = any(size is not None and size.copies > 1 for size in sizes)
    if copies and (not dim.shards or dim.shards[-1].partial or dim.groups):
        raise DimsError(f"{token!r} in dims {text!r}: copies need shards without groups; write e.g. kv=2x4[tp]")


def _parse_section(part: str, text: str) -> Section:
    name, equals, size = part.partition("=")
    return Section(name, _parse_size(equals + size or None, text))


def _parse_size(part: str | None, text: str) -> Size | None:
    if part is None:
        return None
    whole, _, copies = part.removeprefix("=").partition("x")
    if int(whole) == 0 or int(copies or 1) == 0:
        raise DimsError(f"invalid size {part!r} in dims {text!r}: expected an integer ≥ 1")
    return Size(int(whole), int(copies or 1))


def _parse_shard(mod: str, text: str) -> Shard:
    axis, colon, rest = mod.partition(":")
    _check_axis(axis, text)
    qualifiers = rest.split("+") if colon else []
    unknown = [q for q in qualifiers if q not in ("zigzag", "natural", "partial", "sharded")]
    if unknown:
        raise DimsError(f"unknown qualifier {unknown[0]!r} in dims {text!r}; use zigzag, natural, partial or sharded")
    orders = [q for q in qualifiers if q in ("zigzag", "natural")]
    reductions = [q for q in qualifiers if q in ("partial", "sharded")]
    if len(orders) > 1 or len(reductions) > 1:
        raise DimsError(f"{mod!r} in dims {text!r} contradicts itself: one order and one of partial/sharded at most")
    return Shard(axis, orders[0] if orders else None, "partial" in reductions)


def _parse_declarations(words: list[str], text: str) -> tuple[tuple[str, ...], str | None, str | None]:
    """Parse the part after ``#``: (replicated axes, data-parallel axis, port of the row numbers)."""
    replicated: list[str] = []
    named: dict[str, str] = {}
    for word in words:
        key, given, value = word.partition(":=")
        if given and key in ("dp", "rows"):
            if key in named:
                raise DimsError(f"dims {text!r} declare {key} twice")
            if not value:
                raise DimsError(f"{word!r} in dims {text!r} has nothing after :=")
            named[key] = value
            continue
        axis, _, what = word.partition(":")
        if what != "replicated":
            raise DimsError(
                f"invalid declaration {word!r} in dims {text!r}; use AXIS:replicated, dp:=AXIS or rows:=PORT"
            )
        _check_axis(axis, text, (*AXES, *STAGES))
        if axis in replicated:
            raise DimsError(f"dims {text!r} declare {axis} replicated twice")
        replicated.append(axis)
    if "dp" in named:
        _check_axis(named["dp"], text)
    return tuple(replicated), named.get("dp"), named.get("rows")


def _check_axis(axis: str, text: str, known: tuple[str, ...] = AXES) -> None:
    if axis in STAGES and axis not in known:
        raise DimsError(f"{axis!r} in dims {text!r}: stages hold different layers, not shards; use {axis}:replicated")
    if axis not in known:
        raise DimsError(f"unknown mesh axis {axis!r} in dims {text!r}; known axes: {', '.join(known)}")


def _check_unique(dims: Dims, text: str) -> None:
    names = dims.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise DimsError(f"dims {text!r} use the name {twice!r} twice")
    both = {shard.axis for _, shard in dims.shards()} & set(dims.replicated)
    if both:
        raise DimsError(f"dims {text!r} call {min(both)} both sharded and replicated")
