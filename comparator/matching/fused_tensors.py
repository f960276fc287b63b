"""Fused tensors (qkv and gate_up), and how to relate them to a run that records the parts.

Storage orders, as in the frameworks' own weight loaders:

- plain: all of q, then k, then v. vLLM's and SGLang's ``qkv_proj``, GPT-2's ``c_attn``, Phi's ``qkv_proj``; under
  tensor parallelism every rank holds its own [q_r | k_r | v_r].
- grouped: for each key/value head its query heads, its key, its value. Megatron's ``linear_qkv``, the
  ``query_key_value`` of GPT-NeoX, BLOOM and Falcon, InternLM2's ``wqkv``; ranks hold whole groups.
- gate before up: ``gate_up_proj``, Megatron's gated ``linear_fc1``; every rank holds its own [gate_r | up_r].
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, structs

from tapscope.comparator.runs.derived_tensor import FusedLayout
from tapscope.comparator.runs.hints import Hints, sections_of
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series
from tapscope.core import dims as dims_grammar
from tapscope.core.dims import Dim
from tapscope.core.errors import DimsError
from tapscope.core.site import module_of

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Last path component of a fused module in the common spelling -> the modules that it combines."""
_SPLIT = re.compile(r"(?:out|param\[(?:weight|bias)\])(?:\.grad)?")
_NAMES = frozenset({*PARTS, "linear_qkv", "linear_fc1", "c_attn", "c_fc", "query_key_value", "dense_h_to_4h", "wqkv"})
"""Names of fused modules in any model family; a quick first check, because most modules are not fused."""
_GROUPED_NAMES = ("linear_qkv", "wqkv")
_GROUPED_CLASSES = ("GPTNeoX", "Bloom", "Falcon", "ParallelAttention")
_PLAIN_CLASSES = ("QKVParallelLinear", "Conv1D")


class FusedSite(Struct, frozen=True):
    """A site that may be a fused tensor, judging by its name in the common spelling."""

    path: str
    """Path of the parent module in the common spelling, with a trailing dot."""
    kind: str
    """A key of :data:`PARTS`."""
    port: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return PARTS[self.kind]

    def part(self, index: int) -> str:
        """Return the site of the part ``index`` in the common spelling."""
        return f"{self.path}{self.parts[index]}:{self.port}"


def fused_site(name: str) -> FusedSite | None:
    """Return the fused site with this name; None if the module is not fused."""
    if module_of(name).rpartition(".")[2] not in _NAMES:
        return None
    path, _, port = canonical_name(name).rpartition(":")
    holder, dot, last = path.rpartition(".")
    return FusedSite(f"{holder}{dot}", last, port) if last in PARTS else None


def is_split(port: str) -> bool:
    """Return whether the values of a port are the concatenated values of the parts: outputs, weights, biases and their
    gradients."""
    return _SPLIT.fullmatch(port) is not None


def axis_of(series: Series, hints: Hints) -> int:
    """Return the axis along which the parts are concatenated."""
    if ":param[" not in series.site:
        return -1
    return 1 if hints.class_of(series.site) == "Conv1D" and len(series.first.shape) == 2 else 0


def width_of(series: Series, hints: Hints, axis: int) -> int:
    """Return the number of features along ``axis``, summed over all ranks."""
    return series.first.shape[axis] * hints.num_shards(series, axis) if series.first.shape else 0


class FusedLayouts(Struct, frozen=True):
    """Determines the layouts of fused series from the model facts that both runs recorded."""

    hints: tuple[Hints, Hints]

    def fused(self, side: int, series: Series, site: FusedSite, sizes: tuple[int, ...]) -> FusedLayout:
        """Return the layout of one side's fused series; ``sizes`` are the widths of the other side's parts, or
        empty."""
        own = self.hints[side]
        axis = axis_of(series, own)
        if site.kind != "qkv_proj":
            return FusedLayout(site.parts, axis, sizes)
        known = self.heads(side)
        options = [tuple(known[i] * known[2] for i in (0, 1, 1))] if known is not None else []
        options += [sizes] if sizes else []
        width = width_of(series, own, axis)
        sizes = next((option for option in options if sum(option) == width), options[0] if options else ())
        return self.ordered(FusedLayout(site.parts, axis, sizes), self.order(side, series), series, known)

    def ordered(self, fused: FusedLayout, order: str, series: Series, known: Sequence[int] | None) -> FusedLayout:
        """Return the layout with its number of groups, or with a problem if the order, a size or the number of heads is
        unknown."""
        if not order:
            return structs.replace(fused, problem=_unknown_order(series))
        if not fused.sizes:
            return structs.replace(fused, problem=_unknown_sizes(series))
        if order == "plain":
            return fused
        fits = known is not None and fused.sizes[0] * known[1] == fused.sizes[1] * known[0]
        if known is None or not fits or fused.sizes[1] % known[1]:
            return structs.replace(fused, problem=_unknown_groups(series))
        return structs.replace(fused, groups=known[1])

    def order(self, side: int, series: Series) -> str:
        """Return ``plain`` or ``grouped``, judging by name and class; empty if frameworks use the name for both
        orders."""
        last = module_of(series.site).rpartition(".")[2]
        if self.hints[side].class_of(series.site) in _PLAIN_CLASSES:
            return "plain"
        if last in _GROUPED_NAMES:
            return "grouped"
        if last != "query_key_value":
            return "plain"
        holder = self.hints[side].parent_of(series.site)
        return "grouped" if any(name in holder for name in _GROUPED_CLASSES) else ""

    def heads(self, side: int) -> tuple[int, int, int] | None:
        """Return (attention heads, key/value heads, head dim) from the config of this run, or else of the other run."""
        for hints in (self.hints[side], self.hints[1 - side]):
            heads, head_dim = hints.count("num_attention_heads"), hints.count("head_dim")
            if heads is None:
                continue
            width = hints.count("hidden_size")
            head_dim = head_dim or (width // heads if width else None)
            if head_dim is not None:
                return heads, hints.count("num_key_value_heads") or heads, head_dim
        return None


def storage_order(series: Series, fused: FusedLayout, hints: Hints) -> tuple[int, int]:
    """Return (groups, shards that each hold all parts) of the joined tensor; equal results mean equal orders."""
    dim = _dim(series, fused.axis)
    if dim is not None and sections_of(dim):
        return 1, 1  # the dims state the sections, so the assembled tensor is in plain order
    return fused.groups, hints.num_shards(series, fused.axis) if fused.groups == 1 else 1


def annotate_parts(series: Series, fused: FusedLayout, hints: Hints) -> Series:
    """Return the series with dims that state the sections of each shard, so that shards are split into sections before
    joining.

    Unchanged if one shard or group holds everything, or if the dims already state the sections.
    """
    dim = _dim(series, fused.axis)
    shards = hints.num_shards(series, fused.axis)
    if dim is None or sections_of(dim) or fused.problem or fused.groups > 1 or shards == 1:
        return series
    copies = _copies(series.first.shape[fused.axis], fused.sizes, shards)
    sizes = [f"={size}x{n}" for size, n in zip(fused.sizes, copies, strict=True)] or [""] * len(fused.parts)
    text = f"({'+'.join(map(''.join, zip(fused.parts, sizes, strict=True)))})"
    text += f"[{','.join(map(str, dim.shards))}]"
    return _with_dims(series, fused.axis, text.replace("x1+", "+").replace("x1)", ")"))


def _dim(series: Series, axis: int) -> Dim | None:
    try:
        parsed = dims_grammar.parse(series.first.dims) if series.first.dims else None
    except DimsError:
        return None
    return parsed.dims[axis] if parsed is not None and parsed.ndim == len(series.first.shape) else None


def _copies(local: int, sizes: Sequence[int], shards: int) -> list[int]:
    """Return how many adjacent ranks hold each part's shard: more than one for k and v if ranks outnumber key/value
    heads."""
    rest = shards * local - sum(sizes[:1])
    many = rest // sum(sizes[1:]) if len(sizes) == 3 and rest % sum(sizes[1:]) == 0 else 1
    return [1, *[max(many, 1)] * (len(sizes) - 1)] if sizes else []


def _with_dims(series: Series, axis: int, text: str) -> Series:
    assert series.first.dims is not None
    shape, hash_, declared = series.first.dims.partition("#")
    words = shape.split()
    words[axis] = text
    dims = " ".join(words) + (f" {hash_}{declared}" if hash_ else "")
    firings = tuple(
        structs.replace(
            f, records=tuple(r._replace(dims=dims if r.dims == series.first.dims else r.dims) for r in f.records)
        )
        for f in series.firings
    )
    return structs.replace(series, firings=firings)


def fused_names(series: Mapping[str, Series]) -> Iterator[tuple[str, FusedSite]]:
    """Yield (name, fused site) of the fused modules among the sites of one side."""
    for name in list(series):
        site = fused_site(name)
        if site is not None:
            yield name, site


def _unknown_order(series: Series) -> str:
    return (
        f"{series.site} holds q, k and v in an unknown order (concatenated or by head): state it in "
        f"{_split_option(series, 'order: plain or grouped')}"
    )


def _unknown_sizes(series: Series) -> str:
    return (
        f"{series.site} holds q, k and v of unknown sizes: run.json has no model_config, and the other run lacks "
        f"some of them; state it in {_split_option(series, 'heads: [.., ..]')}"
    )


def _unknown_groups(series: Series) -> str:
    return (
        f"{series.site} holds q, k and v by head, but the number of heads is unknown: no matching model_config in "
        f"run.json; state it in {_split_option(series, 'order: grouped, heads: [.., ..]')}"
    )


def _split_option(series: Series, layout: str) -> str:
    return f"--map, split: {{'{module_of(series.site)}': {{into: [...], {layout}}}}}"
