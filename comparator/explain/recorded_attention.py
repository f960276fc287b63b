"""Recorded attention: read the inputs of one attention module as :class:`.attention.Tokens` from the sites around
it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.read import read
from tapscope.comparator.detectors.chosen_scores import vectors_of
from tapscope.comparator.explain.attention import PADDED, Tokens, Variant, attend, with_theta, within
from tapscope.comparator.explain.rope import THETAS
from tapscope.comparator.explain.search import searched
from tapscope.comparator.explain.token_slots import MAX_VALUES, TokenSlots, read_token_slots
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

_OUTPUTS = (
    *(".attn:out", ".core_attention:out", ".o_proj:in[input]", ".linear_proj:in[input_]"),
    *(".dense:in[input]", ".c_proj:in[x]", ".out_proj:in[input]"),
)
_TRIPLES = (
    (".attn:in[query]", ".attn:in[key]", ".attn:in[value]"),
    (".core_attention:in[query]", ".core_attention:in[key]", ".core_attention:in[value]"),
    (".q_norm:out", ".k_norm:out", ".v_proj:out"),
    (".q_proj:out", ".k_proj:out", ".v_proj:out"),
)
_RECORDED_AFTER_ROPE = 2
"""Number of leading entries of ``_TRIPLES`` that are recorded after RoPE."""
_FUSED = ".qkv_proj:out"
_LATENT = (".q_b_proj:out", ".q_proj:out"), ".kv_a_proj_with_mqa:out", ".kv_b_proj:out"
SOFT_CAPS = (None, 50.0, 30.0)
"""Soft caps of scores that are tried: none, Gemma 2's, and a smaller one."""
_NUM_SEARCHED_ROWS = 24
"""Number of rows from which the baseline's formula is determined."""
_EARLY_POSITIONS = (1, 2, 3, 4)
"""Positions from which the scale of scores is determined."""
_SCALE_RTOL = 0.02
"""Relative tolerance at which a scale counts as 1 / √n for an integer n."""
_MAX_OFF = 0.02
"""Maximum relative error at which a formula reproduces the baseline's output."""
_MAX_SEARCHED_OFF = 2.0
"""Relative error beyond which no other scales or windows are tried."""
_MAX_NARROW_WINDOW = 64
"""Largest window up to which all sizes are tried."""


@dataclass(frozen=True)
class RecordedAttention:
    """One attention module in both runs, with the formula that reproduces the baseline."""

    sides: tuple[Tokens, Tokens]
    site: str
    """Site of the recorded output: the output of the attention kernel, or the input of the output projection."""
    given: tuple[TokenSlots, TokenSlots]
    """Recorded output of (baseline, target)."""
    variant: Variant
    off: float
    """Relative error of the baseline's output recomputed with ``variant``."""
    window: int | None


class SiteReader:
    """Looks up compared sites by name, and reads their values."""

    def __init__(self, preparer: PairPreparer, examined: Sequence[PairResult]) -> None:
        self._preparer = preparer
        self._at = {one.site: one for one in examined if one.baseline is not None and one.target is not None}

    def slots(self, site: str) -> tuple[TokenSlots, TokenSlots] | None:
        """Return the rows of a site as (baseline, target); None if either is missing."""
        one = self.resolved(site)
        if one is None or one.problem:
            return None
        ready = self._preparer.prepare(one.pair)
        try:
            slots = (
                read_token_slots(ready, self._preparer.row_map, 0),
                read_token_slots(ready, self._preparer.row_map, 1),
            )
        except DataError:
            return None
        return None if slots[0] is None or slots[1] is None else (slots[0], slots[1])

    def resolved(self, site: str) -> PairResult | None:
        """Return the result of a site, falling back from ``out`` to ``out[0]`` for modules that return several
        values."""
        return self._at.get(site) or self._at.get(site.replace(":out", ":out[0]"))

    def one(self, site: str) -> PairResult | None:
        """Return the comparison result of a site; None unless both runs have the site."""
        return self._at.get(site)

    def vector(self, site: str, side: int) -> Array | None:
        """Return the first recorded values of a vector on one side."""
        one = self._at.get(site)
        return None if one is None or one.problem else vectors_of(self._preparer, one)[side]

    def parameters(self, path: str) -> list[str]:
        """Return the names of the recorded parameters of a module that both runs have."""
        begin, end = f"{path}:param[", "]"
        return [name[len(begin) : -1] for name in self._at if name.startswith(begin) and name.endswith(end)]

    def stored(self, site: str) -> tuple[Array, Array] | None:
        """Return the first recorded tensors of a site as (baseline, target); None if either is missing or too large."""
        one = self._at.get(site)
        if one is None or one.problem:
            return None
        ready = self._preparer.prepare(one.pair)
        values = []
        for whole in (ready.left[0], ready.right[0]):
            if whole.piece is None or not whole.has_values or math.prod(whole.piece.shape) > MAX_VALUES:
                return None
            try:
                values.append(np.asarray(read(whole.piece, whole.run), np.float64))
            except DataError:
                return None
        return values[0], values[1]

    def ending(self, end: str) -> Iterator[str]:
        """Return the names of the sites with this suffix."""
        return (name for name in self._at if name.endswith(end))


def read_attention(
    path: str,
    sites: SiteReader,
    config: Sequence[Mapping[str, Any]],
    thetas: Sequence[float],
    *,
    searches: bool = True,
) -> RecordedAttention | None:
    """Return the attention at ``path``; None if it was not recorded, or if no formula reproduces the baseline's output.

    ``searches``: also try windows, and scales of scores other than 1 / √d.
    """
    outputs = [one.site for end in _OUTPUTS if (one := sites.resolved(path + end)) is not None]
    site, given = next(((site, slots) for site in outputs if (slots := sites.slots(site)) is not None), ("", None))
    if given is None:
        return None
    sizes = _sizes(config)
    for tokens in chain(_plain(path, sites, sizes, thetas), _fused(path, sites, sizes), _latent(path, sites, sizes)):
        if (formula := _fitted(tokens[0], given[0], searches)) is not None:
            return RecordedAttention(tokens, site, given, *formula)
    return None


def _sizes(configs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    sizes: dict[str, int] = {}
    for config in configs:
        sizes |= {name: config[name] for name in names if isinstance(config.get(name), int) and name not in sizes}
    return sizes


def _plain(
    path: str, sites: SiteReader, sizes: dict[str, int], thetas: Sequence[float]
) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield tokens from separate queries, keys and values of every head, recorded before or after RoPE."""
    heads = sizes.get("num_attention_heads", 0)
    for number, ends in enumerate(_TRIPLES):
        parts = [sites.slots(path + end) for end in ends]
        if None in parts or not heads:
            continue
        recorded = None if number < _RECORDED_AFTER_ROPE else _tables(path, sites)
        sides = [_tokens([part[side] for part in parts if part is not None], recorded, side, heads) for side in (0, 1)]
        if sides[0] is None or sides[1] is None:
            continue
        yield sides[0], sides[1]
        if number >= _RECORDED_AFTER_ROPE and recorded is None:
            for theta in dict.fromkeys((*thetas, *THETAS)):
                yield with_theta(sides[0], theta), with_theta(sides[1], theta)


def _fused(path: str, sites: SiteReader, sizes: dict[str, int]) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield tokens from one projection whose output is queries, keys and values, in this order."""
    both, recorded = sites.slots(path + _FUSED), _tables(path, sites)
    heads = sizes.get("num_attention_heads", 0)
    groups = sizes.get("num_key_value_heads", heads)
    if both is None or recorded is None or not heads or both[0].values.shape[1] % (heads + 2 * groups):
        return
    width = both[0].values.shape[1] // (heads + 2 * groups)
    ends = np.array([0, heads, heads + groups, heads + 2 * groups]) * width
    sides = []
    for side in (0, 1):
        parts = [structs.replace(both[side], values=both[side].values[:, a:b]) for a, b in pairwise(ends)]
        tokens = _tokens(parts, recorded, side, heads)
        if tokens is None:
            return
        sides.append(tokens)
    yield sides[0], sides[1]


def _tables(path: str, sites: SiteReader) -> tuple[tuple[TokenSlots, TokenSlots], tuple[TokenSlots, TokenSlots]] | None:
    names = [[path + ":in[position_embeddings.0]"], [path + ":in[position_embeddings.1]"]]
    for i in (0, 1):
        names[i] += list(sites.ending(f"rotary_emb:out[{i}]"))
    for one, two in zip(*names, strict=False):
        tables = sites.slots(one), sites.slots(two)
        if tables[0] is not None and tables[1] is not None:
            return tables[0], tables[1]
    return None


def _tokens(parts: Sequence[TokenSlots], tables: Any, side: int, heads: int) -> Tokens | None:
    """Return the queries, keys and values of one side; None if their rows or widths are inconsistent."""
    query, key, value = parts
    width = query.values.shape[1] // heads
    if query.values.shape[1] % heads or key.values.shape[1] % width or not key.values.shape[1]:
        return None
    groups = key.values.shape[1] // width
    if heads % groups or value.values.shape[1] % groups or not _same_rows(parts):
        return None
    cos = sin = None
    if tables is not None:
        cos, sin = (_in_query_order(table[side], query) for table in tables)
        if cos is None or sin is None or cos.shape[1] > width:
            return None
    queries, keys, values = (
        part.values.reshape(len(part.values), n, -1) for part, n in ((query, heads), (key, groups), (value, groups))
    )
    return Tokens(query.request, query.position, query.step, query.slot, queries, keys, values, cos, sin)


def _latent(path: str, sites: SiteReader, sizes: dict[str, int]) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield tokens of DeepSeek's multi-head latent attention (arXiv 2405.04434).

    Keys consist of a part without RoPE for each head and a common part with RoPE.
    """
    queries, shared, made = _LATENT
    parts = next((p for q in queries if (p := sites.slots(path + q)) is not None), None), sites.slots(path + shared)
    both, tables, heads = sites.slots(path + made), _tables(path, sites), sizes.get("num_attention_heads", 0)
    if parts[0] is None or parts[1] is None or both is None or tables is None or not heads:
        return
    sides = []
    for side in (0, 1):
        query, low, high = parts[0][side], parts[1][side], both[side]
        cos, sin = (_in_query_order(table[side], query) for table in tables)
        if cos is None or sin is None or not _same_rows((query, low, high)) or query.values.shape[1] % heads:
            return
        rotary_dim, count = cos.shape[1], len(query.values)
        split = query.values.reshape(count, heads, -1)
        plain = split.shape[2] - rotary_dim
        inner = high.values.reshape(count, heads, -1)
        if plain <= 0 or inner.shape[2] <= plain:
            return
        common = np.broadcast_to(low.values[:, None, -rotary_dim:], (count, heads, rotary_dim))
        key = np.concatenate([inner[..., :plain], common], axis=2)
        places = query.request, query.position, query.step, query.slot
        sides.append(Tokens(*places, split, key, inner[..., plain:], cos, sin, first=plain))
    yield sides[0], sides[1]


def _same_rows(parts: Sequence[TokenSlots]) -> bool:
    first = parts[0]
    return all(
        len(part.pair) == len(first.pair)
        and np.array_equal(part.pair, first.pair)
        and np.array_equal(part.step, first.step)
        for part in parts[1:]
    )


def _in_query_order(table: TokenSlots, query: TokenSlots) -> Array | None:
    """Return the rows of the table in the order of the query rows, arbitrary for padding; None if a row is missing."""
    at = table.place()
    keys = list(zip(query.step.tolist(), query.request.tolist(), query.position.tolist(), strict=True))
    if _same_rows((query, table)):
        return table.values
    indices = [at.get(key, -1) for key in keys]
    if any(i < 0 and key[2] != PADDED for i, key in zip(indices, keys, strict=True)):
        return None
    return table.values[np.maximum(indices, 0)]


def rows_of(given: TokenSlots, tokens: Tokens) -> tuple[Array, Array]:
    """Return (rows of the output, token of each row), without padding."""
    keys = zip(tokens.step.tolist(), tokens.request.tolist(), tokens.position.tolist(), strict=True)
    at = {key: i for i, key in enumerate(keys) if key[2] != PADDED}
    pairs = [(row, at[key]) for key, row in given.place().items() if key in at]
    rows = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _fitted(tokens: Tokens, given: TokenSlots, searches: bool) -> tuple[Variant, float, int | None] | None:
    """Return (formula that reproduces the baseline's output, its relative error, its window); None if no formula
    does."""
    rows, own = rows_of(given, tokens)
    width = tokens.query.shape[1] * tokens.value.shape[2]
    if not len(rows) or given.values.shape[1] != width:
        return None
    pick = np.unique(np.linspace(0, len(rows) - 1, _NUM_SEARCHED_ROWS).astype(np.int64))
    wanted, some = given.values[rows[pick]], own[pick]
    size = float((wanted**2).sum())
    d = tokens.query.shape[2]
    layouts = ("half", "interleaved") if tokens.cos is not None else ("half",)
    longest = int(tokens.position.max()) + 1
    windows = [*range(1, min(_MAX_NARROW_WINDOW, longest)), *(n for n in (128, 256, 512, 1024, 4096) if n < longest)]

    def fit(variant: Variant, window: int | None = None) -> tuple[Variant, float, int | None]:
        return variant, _off(attend(tokens, some, variant), wanted, size), window

    scale = d**-0.5
    fits = [fit(Variant(scale, cap, layout)) for layout, cap in product(layouts, SOFT_CAPS)]
    if searches and _MAX_OFF < min(off for _, off, _ in fits) < _MAX_SEARCHED_OFF:
        near = np.flatnonzero(np.isin(tokens.position[own], _EARLY_POSITIONS))[:_NUM_SEARCHED_ROWS]
        layout, scale = _scale_of(tokens, own[near], given.values[rows[near]], layouts, scale)
        fits += [fit(Variant(scale, cap, layout)) for cap in SOFT_CAPS]
    if searches and _MAX_OFF < min(off for _, off, _ in fits) < _MAX_SEARCHED_OFF:
        for layout, window, cap in product(layouts, windows, SOFT_CAPS[:2]):
            fits.append(fit(Variant(scale, cap, layout, sees=within(window)), window))
    best = min(fits, key=lambda one: one[1])
    return best if best[1] < _MAX_OFF else None


def _scale_of(tokens: Tokens, rows: Array, wanted: Array, layouts: Sequence[str], usual: float) -> tuple[str, float]:
    """Return the (layout, scale of scores) that fits the first tokens best, rounded to 1 / √n if close.

    The first tokens are inside every window, and a soft cap hardly affects them.
    """
    best = float("inf"), layouts[0], usual
    for layout in layouts if len(rows) else ():

        def off(scale: float, layout: str = layout) -> float:
            return float(((attend(tokens, rows, Variant(scale, None, layout)) - wanted) ** 2).sum())

        scale, error = searched(off, usual / 64.0, usual * 64.0)
        best = min(best, (error, layout, scale))
    _, layout, scale = best
    whole = round(scale**-2.0)
    return layout, whole**-0.5 if whole and abs(scale**-2.0 / whole - 1.0) < _SCALE_RTOL else scale


def _off(made: Array, wanted: Array, size: float) -> float:
    off = float(((made - wanted) ** 2).sum())
    return (off / size) ** 0.5 if size > 0 and np.isfinite(off) else float("inf")
