"""Recomputed attention: check whether each run's attention output follows from its own queries, keys and values.

If the inputs reproduce both outputs, the module works correctly, and its outputs differ because its inputs do. A sharp
softmax turns small score errors into large weight errors, and a fused kernel never writes the weights that would show
how sharp it is. If they reproduce the output of only one run, the other run has a wrong mask, scale, RoPE or cache,
however few rows are affected.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.explain.attention import PADDED, Tokens, Variant, attend
from tapscope.comparator.explain.attention_output import path_of, recomputed_rows, tokens_of, with_rounding
from tapscope.comparator.explain.context import model_configs, rope_thetas
from tapscope.comparator.explain.error_region import MIN_NOISE_RATIO, rounding_noise
from tapscope.comparator.explain.recorded_attention import SiteReader, read_attention
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict

Array = np.ndarray[Any, Any]

_NUM_DRAWS = 3
"""Number of random roundings of queries and keys drawn to estimate how far rounding moves each output row."""
NOTE = "each run's values are the attention of its own queries, keys and values: their difference is inherited"


class Recomputed(NamedTuple):
    """Errors of recomputing rows of one run's attention output from the run's own queries, keys and values."""

    errors: Array
    """[rows] distance between recorded and recomputed output, relative to the row."""
    noise: Array
    """[rows] expected distance from one rounding of the inputs and the output."""

    @property
    def worst(self) -> int:
        """Index of the row with the largest error relative to its noise."""
        return int(np.argmax(np.nan_to_num(self.errors / self.noise, nan=np.inf)))

    @property
    def ratio(self) -> float:
        """Error / noise of the worst row; inf for a row that attends to no key."""
        return float(np.nan_to_num(self.errors[self.worst] / self.noise[self.worst], nan=np.inf))


def inherited_error(
    findings: Sequence[Finding], judged: Sequence[PairResult], preparer: PairPreparer
) -> tuple[str, float] | None:
    """Return (site, error of its worst row) if the first failing finding is an attention output that both runs' inputs
    reproduce.

    Otherwise None. Findings after another failure are not considered, because they may inherit its error.
    """
    finding = next((finding for finding in findings if finding.verdict.is_bad), None)
    if finding is None or finding.verdict is not Verdict.DIFFERS or finding.judged_by != "rounding":
        return None
    one = judged[finding.order]
    if one.distribution is None:
        return None
    sides = recomputed(one, SiteReader(preparer, judged), preparer)
    is_inherited = sides is not None and all(side.ratio <= MIN_NOISE_RATIO for side in sides)
    return (one.site, one.distribution.errors[-1]) if is_inherited else None


def recomputed(
    result: PairResult, sites: SiteReader, preparer: PairPreparer, *, searches: bool = True, caps: Sequence[Any] = ()
) -> tuple[Recomputed, Recomputed] | None:
    """Return the recomputation of both runs' attention output at a site, for the worst rows and some others with
    complete keys.

    ``caps``: soft caps of scores used in place of the best fit to the baseline; for each run, the result with the
    smallest ratio counts. See :func:`.read_attention` for ``searches``. None if the site is not an attention output, or
    is the output of the projection after attention, or if no formula reproduces the baseline.
    """
    if not (path := path_of(result.site)):
        return None
    runs = preparer.baseline, preparer.target
    heads = read_attention(path, sites, model_configs(runs), rope_thetas(runs), searches=searches)
    if heads is None or result.site != heads.site or (chosen := recomputed_rows(heads)) is None:
        return None
    own = [tokens_of(heads, side, rows) for side, rows in enumerate(chosen[0])]
    whole = np.logical_and(*(_have_all_keys(heads.sides[side], tokens) for side, tokens in enumerate(own)))
    if not whole.any():
        return None
    variants = [replace(heads.variant, cap=cap) for cap in caps] or [heads.variant]
    one_side, other_side = (
        min(
            (
                _recomputed(heads.sides[side], own[side][whole], each, heads.given[side].values[rows[whole]], name)
                for each in variants
            ),
            key=lambda made: made.ratio,
        )
        for side, (rows, name) in enumerate(zip(chosen[0], result.dtypes, strict=True))
    )
    return one_side, other_side


def _have_all_keys(tokens: Tokens, rows: Array) -> Array:
    """Return whether every earlier token of each row's request is recorded, as [rows]; tokens of a shared prefix may
    not be."""
    is_complete = np.zeros(len(rows), bool)
    for request in np.unique(tokens.request[rows]):
        at = np.unique(tokens.position[(tokens.request == request) & (tokens.position != PADDED)])
        here = tokens.request[rows] == request
        position = tokens.position[rows[here]]
        is_complete[here] = np.searchsorted(at, position, side="right") == position + 1
    return is_complete


def _recomputed(tokens: Tokens, rows: Array, variant: Variant, values: Array, name: str) -> Recomputed:
    """Compare ``values`` [rows, width], the recorded output, with the recomputed output."""
    made = attend(tokens, rows, variant)
    size = np.sqrt((values**2).sum(axis=1))
    size = np.maximum(size, 0.25 * float(np.median(size)) or 1.0)
    off = np.sqrt(((made - values) ** 2).sum(axis=1)) / size
    rng, moved = np.random.default_rng(0), np.zeros(len(rows))
    for _ in range(_NUM_DRAWS):
        again = attend(with_rounding(tokens, name, rng), rows, variant)
        moved = np.maximum(moved, np.sqrt(((again - made) ** 2).sum(axis=1)) / size)
    name = name or "float32"
    return Recomputed(off, np.hypot(rounding_noise((name, name)), moved))
