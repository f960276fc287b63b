"""Norms: another epsilon, or a weight that is missing, or w used in place of 1 + w.

RMSNorm: Zhang and Sennrich 2019 (arXiv 1910.07467); LayerNorm: Ba et al. 2016 (arXiv 1607.06450).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.comparator.explain.related_sites import MIN_DIVISOR, RelatedSite
from tapscope.core.site import module_of

Array = np.ndarray[Any, Any]

MIN_WEIGHT_DEVIATION = 0.01
"""Weights whose rms deviation from 1 is smaller than this are ambiguous: an epsilon has the same effect."""


def norms(
    region: ErrorRegion, others: Iterable[RelatedSite], cls: str = "", epsilon: float = 0.0
) -> Iterator[Hypothesis]:
    """Yield hypotheses that treat the module's own input as the input of a norm.

    ``cls`` is the module's class, if known; ``epsilon`` is the epsilon in the baseline's model config, or 0.
    """
    for one in others:
        if not one.is_input or not np.isfinite(one.values).all():
            continue
        values = one.values[region.rows]
        if is_norm(region.sample.site, cls):
            yield from _epsilons(region, values, epsilon)
            yield from _epsilons_of_heads(region, values, epsilon)
        yield from _over_heads(region, values)
        centred = values - values.mean(axis=1, keepdims=True)
        for name, x in (("RMSNorm", values), ("LayerNorm", centred)):
            plain = x / np.sqrt(np.maximum((x * x).mean(axis=1, keepdims=True) + epsilon, MIN_DIVISOR))
            plain = plain[:, region.columns]
            if not _is_weighted(region, plain):
                continue
            yield Hypothesis("norm weight", f"target = {name} of its input without a weight", plain)
            if not region.after.any():
                continue  # zeros reveal no weight
            small = f"the weight is too small by 1 (w where 1 + w is meant, {name})"
            yield Hypothesis("norm weight", small, region.before - plain)
            large = f"the weight is too large by 1 (1 + w where w is meant, {name})"
            yield Hypothesis("norm weight", large, region.before + plain)


def is_norm(site: str, cls: str = "") -> bool:
    """Return whether the module is a norm, by its class or, if that is unknown, by its name."""
    if cls:
        return "norm" in cls.lower()
    name = module_of(site).rpartition(".")[2].lower()
    return "norm" in name or re.match(r"ln(_|\d|$)", name) is not None


def _is_weighted(region: ErrorRegion, plain: Array) -> bool:
    """Return whether the baseline's weight is not all ones, and the error region could be due to a weight."""
    if not region.is_everywhere_in_rows or 2 * len(region.columns) < region.sample.baseline.shape[1]:
        return False
    energy = (plain * plain).sum(axis=0)
    weight = np.divide(
        (plain * region.before).sum(axis=0), energy, out=np.ones_like(energy), where=energy > MIN_DIVISOR
    )
    return bool(np.sqrt(((weight - 1.0) ** 2).mean()) > MIN_WEIGHT_DEVIATION)


def _over_heads(region: ErrorRegion, values: Array) -> Iterator[Hypothesis]:
    """Yield a norm over all heads of a token jointly instead of per head, and the reverse."""
    width = values.shape[1]
    for size in [n for n in region.head_dims if width % n == 0 and width > n]:
        heads = np.sqrt((values.reshape(len(values), -1, size) ** 2).mean(axis=2) + MIN_DIVISOR)
        factor = np.repeat(heads / np.sqrt((values**2).mean(axis=1, keepdims=True) + MIN_DIVISOR), size, axis=1)
        factor = factor[:, region.columns]
        text = f"target normalizes all heads of a token together, baseline each of {size} channels"
        yield Hypothesis("norm heads", text, region.before * factor)
        text = f"target normalizes each head of {size} channels, baseline all heads of a token together"
        yield Hypothesis("norm heads", text, region.before / factor)


def _epsilons_of_heads(region: ErrorRegion, values: Array, epsilon: float) -> Iterator[Hypothesis]:
    """Yield another epsilon of a norm over the channels of each head."""
    width = region.sample.baseline.shape[1]
    for size in [n for n in region.head_dims if width % n == 0 and width > n and values.shape[1] == width]:
        shape = (-1, size)
        sample = replace(
            region.sample,
            baseline=region.sample.baseline[region.rows].reshape(shape),
            target=region.sample.target[region.rows].reshape(shape),
        )
        rows = np.arange(len(sample.baseline))
        each = replace(region, sample=sample, rows=rows, columns=np.arange(size))
        for hypothesis in _epsilons(each, values.reshape(shape), epsilon):
            made = hypothesis.values.reshape(-1, width)[:, region.columns]
            yield hypothesis._replace(values=made, sentence=hypothesis.sentence.replace("of its input", "of each head"))


def _epsilons(region: ErrorRegion, values: Array, epsilon: float) -> Iterator[Hypothesis]:
    """Yield another epsilon: target / baseline = sqrt(m / (m + delta)) for each token.

    m is the mean square (or variance) of the token's input plus the baseline's ``epsilon``.
    """
    before, after = np.nan_to_num(region.before), np.nan_to_num(region.after)
    energy = (before * before).sum(axis=1)
    factor = np.divide((before * after).sum(axis=1), energy, out=np.zeros_like(energy), where=energy > MIN_DIVISOR)
    known = factor > 1e-6
    if known.sum() < 4:
        return
    for what, mean in (("mean square", (values * values).mean(axis=1)), ("variance", values.var(axis=1))):
        # 1 / factor^2 = 1 + delta / m: delta is the slope over 1 / m, fitted on one half and tested on the other.
        slope = np.where(known, factor, 1.0) ** -2.0 - 1.0
        x = np.where(known, 1.0 / np.maximum(mean + epsilon, MIN_DIVISOR), 0.0)
        parts = [(float((slope[i::2] * x[i::2]).sum()), float((x[i::2] ** 2).sum())) for i in (1, 0)]
        if min(square for _, square in parts) <= 0.0:
            continue
        deltas = [product / square for product, square in parts]
        ratio = 1.0 + np.where(np.arange(len(x)) % 2 == 0, deltas[0], deltas[1]) * x
        if not (ratio > 0).all():
            continue
        delta = sum(product for product, _ in parts) / sum(square for _, square in parts)
        more = "larger" if delta > 0 else "smaller"
        sentence = f"the norm's epsilon is {more} by {abs(delta):.2g} (from the {what} of its input)"
        yield Hypothesis("epsilon", sentence, region.before * (ratio**-0.5)[:, None], 1)
