"""Attention output: explain why an attention module's output differs, from its recorded queries, keys and values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tapscope.comparator.explain.attention import Tokens, attend
from tapscope.comparator.explain.attention_variants import Candidate, candidates
from tapscope.comparator.explain.context import SiteContext
from tapscope.comparator.explain.dropout import explain_dropout
from tapscope.comparator.explain.error_region import MIN_NOISE_RATIO, ErrorRegion, find_error_region
from tapscope.comparator.explain.predictions import Prediction, select_prediction
from tapscope.comparator.explain.recorded_attention import RecordedAttention, SiteReader, read_attention, rows_of
from tapscope.comparator.explain.region_text import describe
from tapscope.comparator.explain.sample import Sample
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

MAX_ROWS = 96
"""Maximum number of recomputed rows: two thirds are the worst rows, the rest are evenly spaced."""
MAX_PRODUCTS = 1 << 24
"""Limit on query-key products in one computation; larger attention is not recomputed."""
_PATHS = (".attn", ".core_attention", ".o_proj", ".linear_proj", ".dense", ".c_proj", ".out_proj")


def explain_attention(result: PairResult, sites: SiteReader, context: SiteContext) -> Explanation | None:
    """Return the explanation of a difference in attention output; None if the site is not an attention output or no
    candidate fits."""
    path = path_of(result.site)
    heads = read_attention(path, sites, context.configs, context.thetas) if path else None
    if heads is None:
        return None
    sampled = _sample(heads, result.dtypes)
    if sampled is None:
        return None
    sample, own = sampled
    tokens = heads.sides[1]
    inherited = float(np.hypot(2.0 * heads.off, _rough(tokens, own, heads, result.dtypes[1])))
    region = find_error_region(sample, inherited, {}, ())
    if region is None:
        return None
    rows, columns, noise = own[region.rows], region.columns, region.noise
    wanted = sample.target[region.rows]

    found_by: dict[str, Candidate] = {}

    def predictions() -> Iterator[Prediction]:
        for candidate in candidates(tokens, rows, wanted, heads.variant, heads.window, noise):
            if candidate.variant.zeroed is not None and len(columns) < sample.width:
                continue  # a lost value affects every channel
            found_by[candidate.sentence] = candidate
            made = attend(candidate.tokens or tokens, rows, candidate.variant)[:, columns]
            yield Prediction(candidate.name, candidate.sentence, made, candidate.cost)

    selected = select_prediction(region, predictions(), region.noise)
    if selected is None:
        return explain_dropout(context.preparer, sites.one(f"{path}:out[1]"))
    candidate = found_by[selected.sentence]
    if _holds_everywhere(region, attend(candidate.tokens or tokens, own, candidate.variant)):
        region = replace(region, rows=np.arange(len(own)))
    extent = describe(region, context.requests, context.padded)
    name = selected.name.partition(":")[0]
    return Explanation(name, selected.sentence, selected.share, extent, num_rows=len(sample.baseline))


def _holds_everywhere(region: ErrorRegion, made: Array) -> bool:
    """Return whether the prediction also holds in the unaffected rows."""
    sample = region.sample
    spared = np.setdiff1d(np.arange(len(made)), region.rows)
    off = np.nan_to_num(made[spared] - sample.target[spared]) / sample.size[spared]
    return bool(np.sqrt((off**2).sum(axis=1)).max(initial=0.0) <= MIN_NOISE_RATIO * region.noise)


def path_of(site: str) -> str:
    """Return the path of the attention module whose output a site records; empty if the site records none."""
    path, _, port = site.rpartition(":")
    if port.endswith(".grad") or "mask" in port:
        return ""
    head, dot, last = path.rpartition(".")
    if "core_attention" in path:
        return path.partition(".core_attention")[0]
    if last == "attn" and port.startswith("out"):
        return head if head.endswith(("self_attn", "attention")) else path
    if f".{last}" in _PATHS and port.startswith("in["):
        return head
    return path if dot and "attn" in last and port.startswith("out") else ""


def _sample(heads: RecordedAttention, names: tuple[str, str]) -> tuple[Sample, Array] | None:
    """Return (sample of output rows, token index of each row); None if rows cannot be recomputed.

    The sample compares the target's recorded output with the baseline's formula applied to the target's own queries,
    keys and values.
    """
    both = recomputed_rows(heads)
    if both is None:
        return None
    (_, right), num_rows = both
    tokens, own = heads.sides[1], tokens_of(heads, 1, right)
    some = heads.given[1]
    width = some.values.shape[1]
    return Sample(
        baseline=attend(tokens, own, heads.variant),
        target=some.values[right],
        request=some.request[right],
        position=some.position[right],
        step=some.step[right],
        first_column=0,
        width=width,
        num_rows=num_rows,
        ranks=np.full(width, -1),
        dtypes=names if all(names) else ("float32", "float32"),
        is_integer=False,
    ), own


def recomputed_rows(heads: RecordedAttention) -> tuple[tuple[Array, Array], int] | None:
    """Return ((baseline rows, target rows) of the recorded outputs, number of all paired rows).

    Selects the worst rows and some others. None if no rows are paired, or if the attention is too large.
    """
    given, tokens = heads.given, heads.sides[1]
    paired = rows_of(given[0], heads.sides[0])[0].tolist()
    of_pair = {pair: row for row in paired if (pair := int(given[0].pair[row])) >= 0}
    rows = rows_of(given[1], tokens)[0].tolist()
    known = [(of_pair[pair], row) for row in rows if (pair := int(given[1].pair[row])) in of_pair]
    if not known:
        return None
    left, right = np.array(known).T
    off = ((given[0].values[left] - given[1].values[right]) ** 2).sum(axis=1)
    off = off / np.maximum((given[0].values[left] ** 2).sum(axis=1), 1e-300)
    worst = np.argsort(-np.nan_to_num(off))[: 2 * MAX_ROWS // 3]
    pick = np.union1d(worst, np.linspace(0, len(known) - 1, MAX_ROWS // 3).astype(np.int64))
    longest = int(tokens.position.max()) + 1
    if len(pick) * longest * tokens.query.shape[1] * tokens.query.shape[2] > MAX_PRODUCTS * 64:
        return None
    return (left[pick], right[pick]), len(known)


def tokens_of(heads: RecordedAttention, side: int, rows: Array) -> Array:
    """Return the token index of each given row of one side's recorded output."""
    at = dict(zip(*(column.tolist() for column in rows_of(heads.given[side], heads.sides[side])), strict=True))
    return np.array([at[row] for row in rows.tolist()])


def _rough(tokens: Tokens, rows: Array, heads: RecordedAttention, dtype: str) -> float:
    """Return the relative error of the output if queries and keys are rounded to ``dtype`` after RoPE."""
    rounded = with_rounding(tokens, dtype, np.random.default_rng(0))
    one, two = attend(tokens, rows, heads.variant), attend(rounded, rows, heads.variant)
    size = float(np.nansum(one**2))
    return float(np.nansum((one - two) ** 2) / size) ** 0.5 if size > 0 else 0.0


def with_rounding(tokens: Tokens, dtype: str, rng: np.random.Generator) -> Tokens:
    """Return the tokens with random rounding errors of ``dtype`` applied to queries and keys."""
    epsilon = dtypes.epsilon(dtype) if dtype else 2.0**-24
    query, key = (1.0 + epsilon * rng.uniform(-0.5, 0.5, values.shape) for values in (tokens.query, tokens.key))
    return replace(tokens, query=tokens.query * query, key=tokens.key * key)
