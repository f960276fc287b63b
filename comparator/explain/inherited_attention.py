"""Inherited attention: whether each run's attention output is what its own queries, keys and values give.

A sharp softmax turns small errors of scores into large ones of weights, and a fused kernel never writes the weights
that would show how sharp it is. Where the recorded inputs of both runs reproduce both outputs, the module computed what
it should: its outputs differ because its inputs do.
"""

from collections.abc import Sequence

import numpy as np

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.explain.attention import Array, Tokens, Variant, attend
from tapscope.comparator.explain.attention_output import path_of, recomputed_rows, tokens_of, with_rounding
from tapscope.comparator.explain.context import model_configs, rope_thetas
from tapscope.comparator.explain.error_region import BEYOND, rounding_noise
from tapscope.comparator.explain.recorded_attention import RecordedAttention, SiteReader, read_attention
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict

_DRAWS = 3
"""Roundings of queries and keys that are drawn to see how far they move each row of the output."""
NOTE = "each run's values are the attention of its own queries, keys and values: their difference is inherited"


def inherited_error(
    findings: Sequence[Finding], judged: Sequence[PairResult], preparer: PairPreparer
) -> tuple[str, float] | None:
    """(site, error of its worst row) of the first finding that fails the target, where that is an attention output
    which the inputs of both runs reproduce; else None. What follows another failure inherits from that."""
    finding = next((finding for finding in findings if finding.verdict.is_bad), None)
    if finding is None or finding.verdict is not Verdict.DIFFERS or finding.judged_by != "rounding":
        return None
    one, path = judged[finding.order], path_of(finding.site)
    if not path or one.distribution is None:
        return None
    runs = preparer.baseline, preparer.target
    heads = read_attention(path, SiteReader(preparer, judged), model_configs(runs), rope_thetas(runs))
    if heads is None or one.site != heads.site:
        return None  # the output of the projection after attention: its values were not reproduced
    return (one.site, one.distribution.errors[-1]) if _reproduces(heads, one.dtypes) else None


def _reproduces(heads: RecordedAttention, names: tuple[str, str]) -> bool:
    """Whether one formula makes both recorded outputs, up to rounding."""
    found = recomputed_rows(heads)
    if found is None:
        return False
    return all(
        _is_attention(
            heads.sides[side], tokens_of(heads, side, rows), heads.variant, heads.given[side].values[rows], name
        )
        for side, (rows, name) in enumerate(zip(found[0], names, strict=True))
    )


def _is_attention(tokens: Tokens, rows: Array, variant: Variant, values: Array, name: str) -> bool:
    """Whether the values [rows, width] are the attention of the tokens, up to rounding of inputs and outputs."""
    made = attend(tokens, rows, variant)
    size = np.sqrt((values**2).sum(axis=1))
    size = np.maximum(size, 0.25 * float(np.median(size)) or 1.0)
    off = np.sqrt(((made - values) ** 2).sum(axis=1)) / size
    rng, moved = np.random.default_rng(0), np.zeros(len(rows))
    for _ in range(_DRAWS):
        again = attend(with_rounding(tokens, name, rng), rows, variant)
        moved = np.maximum(moved, np.sqrt(((again - made) ** 2).sum(axis=1)) / size)
    name = name or "float32"
    return bool((off <= BEYOND * np.hypot(rounding_noise((name, name)), moved)).all())
