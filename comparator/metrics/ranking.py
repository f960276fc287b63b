"""Ranking: the effect of errors on values that are ranked: logits and router scores."""

from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.metrics import chunks

Array = np.ndarray[Any, Any]

TOP = 5
"""Number of top candidates of a token whose agreement is counted."""
MAX_FLIPS = 16
"""Maximum number of listed rows with different choices."""


class LogitsAgreement(Struct, frozen=True):
    """Agreement of two sets of logits rows, as a sampler sees it; rows with NaN on either side are excluded."""

    rows: int
    top1: float
    """Fraction of rows with the same largest logit; among equal logits, the first counts."""
    topk: float
    """Mean fraction of the 5 largest logits that both sides share."""
    kl_mean: float
    """Mean over rows of KL(softmax(baseline) || softmax(target)), in nats."""
    kl_max: float


class RouterAgreement(Struct, frozen=True):
    """Agreement of the expert choices of one router."""

    k: int
    """Experts per token."""
    rows: int
    num_flips: int
    """Rows whose sets of k experts differ."""
    flips: tuple[int, ...]
    """The first of these rows: row pairs of the comparison, or row indices without token rows."""
    margin: float
    """Minimum gap between the last chosen expert and the first one not chosen, over the baseline's rows."""
    margin_error: float
    """Twice the largest error of that row: a choice with a larger gap cannot flip."""
    num_exposed: int
    """Number of rows whose gap is at most twice their largest error."""


def agreement_of(ready: PreparedPair) -> LogitsAgreement | None:
    """Compute the agreement of logits [rows, vocabulary]; None if no row remains."""
    same: list[Array] = []
    shared: list[Array] = []
    divergences: list[Array] = []
    for chunk in chunks.rows(ready):
        a, b = _finite_rows(chunk)[:2]
        if not len(a) or not a.shape[1]:
            continue
        same.append(a.argmax(1) == b.argmax(1))
        shared.append(_shared(a, b, min(TOP, a.shape[1])))
        divergences.append(divergence(a, b))
    if not same:
        return None
    top, shares, kl = map(np.concatenate, (same, shared, divergences))
    return LogitsAgreement(len(top), float(top.mean()), float(shares.mean()), float(kl.mean()), float(kl.max()))


def divergence(baseline: Array, target: Array) -> Array:
    """Compute KL(softmax(baseline) || softmax(target)) per row, in nats, from float64 logits [rows, n]; -inf masks a
    candidate.

    Computed from log-softmax to avoid overflow. The result, [rows], is inf where the target excludes a candidate that
    the baseline allows.
    """
    logs = [x - x.max(1, keepdims=True) for x in (baseline, target)]
    logs = [x - np.log(np.exp(x).sum(1, keepdims=True)) for x in logs]
    shares = np.exp(logs[0])
    with np.errstate(invalid="ignore"):
        terms = np.where(shares > 0, shares * (logs[0] - logs[1]), 0.0)
    return np.asarray(np.maximum(terms.sum(1), 0.0))  # rounding may leave it slightly negative


def choice_of(ready: PreparedPair, k: int) -> RouterAgreement | None:
    """Compute the agreement of router scores [rows, experts] with k chosen experts; None if there are at most k
    experts."""
    num_rows = num_flips = num_exposed = 0
    flips: list[int] = []
    smallest = (np.inf, 0.0)
    for chunk in chunks.rows(ready):
        a, b, index = _finite_rows(chunk)
        if a.shape[1] <= k:
            return None
        if not len(a):
            continue
        flipped = np.flatnonzero(_shared(a, b, k) < 1.0)
        edge = np.partition(a, a.shape[1] - k - 1, axis=1)[:, a.shape[1] - k - 1 :]
        ordered = np.sort(edge, axis=1)
        margin, error = ordered[:, 1] - ordered[:, 0], 2.0 * np.abs(a - b).max(1)
        at = int(margin.argmin())
        smallest = min(smallest, (float(margin[at]), float(error[at])))
        num_rows, num_flips = num_rows + len(a), num_flips + len(flipped)
        num_exposed += int((margin <= error).sum())
        flips += index[flipped[: MAX_FLIPS - len(flips)]].tolist()
    return RouterAgreement(k, num_rows, num_flips, tuple(flips), *smallest, num_exposed) if num_rows else None


def _finite_rows(chunk: chunks.Chunk) -> tuple[Array, Array, Array]:
    """Return (baseline, target, row index) in float64 of the rows without NaN or +inf that have a finite value."""
    with np.errstate(invalid="ignore"):
        a, b = chunk.baseline.astype(np.float64), chunk.target.astype(np.float64)
    is_finite = np.ones(len(a), np.bool_)
    for side in (a, b):
        is_finite &= ~np.isnan(side).any(1) & (side.max(1, initial=-np.inf) < np.inf) & np.isfinite(side).any(1)
    index = np.arange(chunk.row, chunk.row + len(a))
    index = index if chunk.join.pairs is None else chunk.join.pairs[index]
    return a[is_finite], b[is_finite], index[is_finite]


def _shared(a: Array, b: Array, k: int) -> Array:
    """Return the fraction of the k largest elements that both sides share, [rows]; among equal elements, the first
    count."""
    one, two = (np.argsort(-side, axis=1, kind="stable")[:, :k] for side in (a, b))
    return np.asarray((one[:, :, None] == two[:, None, :]).any(2).mean(1))
