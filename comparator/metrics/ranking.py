"""Ranking: the effect of errors on values that are compared with each other: logits, and a router's scores."""

from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.metrics import chunks

Array = np.ndarray[Any, Any]

TOP = 5
"""Candidates of a token whose agreement is counted."""
MAX_FLIPS = 16
"""Rows with different choices that are listed."""


class LogitsAgreement(Struct, frozen=True):
    """Agreement of two rows of logits, as a sampler sees it. Rows with NaN on either side are excluded."""

    rows: int
    top1: float
    """Fraction of rows with the same largest logit; of equal ones the first counts."""
    topk: float
    """Mean fraction of the 5 largest that both sides have."""
    kl_mean: float
    """Kullback-Leibler divergence of softmax(target) from softmax(baseline), in nats, over rows."""
    kl_max: float


class RouterAgreement(Struct, frozen=True):
    """Whether a router chooses different experts."""

    k: int
    """Experts per token."""
    rows: int
    num_flips: int
    """Rows whose sets of k experts differ."""
    flips: tuple[int, ...]
    """The first of them: row pairs of the comparison, or row indices without token rows."""
    margin: float
    """Smallest gap between the last chosen expert and the first one not chosen, over the baseline's rows."""
    margin_error: float
    """Twice the largest error of that row: a choice with a larger gap cannot flip."""
    num_exposed: int
    """Rows with a gap of at most twice their largest error."""


def agreement_of(ready: PreparedPair) -> LogitsAgreement | None:
    """Agreement of logits [rows, vocabulary]; None if no row is left."""
    same: list[Array] = []
    shared: list[Array] = []
    divergences: list[Array] = []
    for chunk in chunks.rows(ready):
        a, b = _sound(chunk)[:2]
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
    """[rows] KL(softmax(baseline) || softmax(target)) in nats, of [rows, n] float64 logits; -inf masks a candidate.

    Computed from log-softmax, so that nothing overflows; inf where the target excludes what the baseline allows.
    """
    logs = [x - x.max(1, keepdims=True) for x in (baseline, target)]
    logs = [x - np.log(np.exp(x).sum(1, keepdims=True)) for x in logs]
    shares = np.exp(logs[0])
    with np.errstate(invalid="ignore"):
        terms = np.where(shares > 0, shares * (logs[0] - logs[1]), 0.0)
    return np.asarray(np.maximum(terms.sum(1), 0.0))  # rounding may leave it slightly negative


def choice_of(ready: PreparedPair, k: int) -> RouterAgreement | None:
    """Agreement of a router's scores [rows, experts] with k chosen; None if there are no more experts than that."""
    num_rows = num_flips = num_exposed = 0
    flips: list[int] = []
    smallest = (np.inf, 0.0)
    for chunk in chunks.rows(ready):
        a, b, index = _sound(chunk)
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


def _sound(chunk: chunks.Chunk) -> tuple[Array, Array, Array]:
    """(baseline, target, row) in float64 of the rows without NaN or +inf, and with at least one finite value."""
    with np.errstate(invalid="ignore"):
        a, b = chunk.baseline.astype(np.float64), chunk.target.astype(np.float64)
    sound = np.ones(len(a), np.bool_)
    for side in (a, b):
        sound &= ~np.isnan(side).any(1) & (side.max(1, initial=-np.inf) < np.inf) & np.isfinite(side).any(1)
    index = np.arange(chunk.row, chunk.row + len(a))
    index = index if chunk.join.pairs is None else chunk.join.pairs[index]
    return a[sound], b[sound], index[sound]


def _shared(a: Array, b: Array, k: int) -> Array:
    """[rows] fraction of the k largest that both have; of equal ones the first count."""
    one, two = (np.argsort(-side, axis=1, kind="stable")[:, :k] for side in (a, b))
    return np.asarray((one[:, :, None] == two[:, None, :]).any(2).mean(1))
