"""Train-inference mismatch: compares the log-probabilities that a trainer and a rollout give the rollout's tokens.

With the log-ratio r = log pi(token) - log mu(token) of trainer pi and rollout mu, over tokens sampled from mu:

- importance ratio: exp(r), as PPO clips it (arXiv:1707.06347),
- k1: mean of -r, and k3: mean of exp(r) - 1 - r: estimators of KL(mu || pi) in nats per token
  (J. Schulman, *Approximating KL divergence*, 2020); k3 has less variance and is never negative,
- KL: the same divergence computed from whole rows of logits, without sampling error.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.compare import Comparison, compare_open_runs
from tapscope.comparator.metrics.detail import is_router
from tapscope.comparator.metrics.token_logprobs import TokenLogprobs
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pipeline.measure_pairs import Progress
from tapscope.comparator.report.report import Report
from tapscope.comparator.verdict.finding import Finding
from tapscope.core.errors import ConfigError, NothingInCommonError
from tapscope.run_format.run import Run
from tapscope.sources import open_run

Array = np.ndarray[Any, Any]

__all__ = ["Mismatch", "MismatchStats", "RoutingAgreement", "TokenMismatch", "mismatch"]

PERCENTILES = (0.01, 0.5, 0.99)


class MismatchStats(Struct, frozen=True):
    """Mismatch statistics over a set of tokens: one request, or all of them."""

    num_tokens: int
    mean_abs: float
    """Mean of |log pi - log mu|, in nats."""
    max_abs: float
    k1: float
    k3: float
    kl: float
    """Mean over rows of KL(mu || pi), computed from the full distributions."""
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    ratio_percentiles: tuple[float, ...]
    """Percentiles of the importance ratio, at :data:`PERCENTILES`."""
    clipped: float
    """Fraction of tokens whose importance ratio is outside [1 - clip, 1 + clip]."""
    log_ratio_sum: float
    """Sum of r: the logarithm of the importance ratio of the whole sequence."""


class TokenMismatch(Struct, frozen=True):
    """Log-probabilities and importance ratio of one token."""

    request: str
    position: int
    token: int
    trainer: float
    """log pi, in nats."""
    rollout: float
    """log mu, in nats."""
    ratio: float


class RoutingAgreement(Struct, frozen=True):
    """Agreement of the expert choices of one router."""

    site: str
    num_rows: int
    agreement: float
    """Fraction of token rows for which both runs chose the same set of experts."""


class Mismatch(Struct, frozen=True):
    """The result of :func:`mismatch`."""

    site: str
    """The site of the compared logits."""
    total: MismatchStats
    requests: dict[str, MismatchStats]
    tokens: tuple[TokenMismatch, ...]
    """Every counted token, ordered by request and position."""
    routing: tuple[RoutingAgreement, ...]
    """Routers that chose different experts in at least one token row."""
    num_unknown: int
    """Rows whose next token is unknown: the last row of each request."""
    num_prompt: int
    """Prompt tokens that were left out; 0 if ``prompt_tokens`` was set."""
    num_nonfinite: int
    report: Report
    """The comparison report on all sites."""


def mismatch(
    trainer: Run | str | Path,
    rollout: Run | str | Path,
    options: CompareOptions | None = None,
    *,
    clip: float = 0.2,
    temperature: float = 1.0,
    prompt_tokens: bool = False,
    progress: Progress | None = None,
) -> Mismatch:
    """Compare a trainer's run (the baseline) with a rollout's run of the same tokens.

    ::

        result = mismatch("reference", "served")
        print(result.total.ratio_mean, result.total.k3, result.report)

    ``clip`` is half the width of the clip range around 1. ``temperature`` is the sampling temperature of the rollout,
    by which logits are divided. ``prompt_tokens`` counts prompt tokens as well as generated ones.

    Raises ConfigError for an invalid argument, NothingInCommonError if no row has full logits in both runs, and the
    errors of :func:`tapscope.compare`.
    """
    if not 0.0 < clip < 1.0:
        raise ConfigError(f"invalid clip range {clip}: expected a number between 0 and 1")
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(f"invalid temperature {temperature}: expected a finite number > 0")
    with ExitStack() as opened:
        left, right = (
            run if isinstance(run, Run) else opened.enter_context(open_run(run)) for run in (trainer, rollout)
        )
        comparison = compare_open_runs(left, right, options, progress)
        finding, logprobs = _logits(comparison, temperature)
        keep = np.ones(len(logprobs.token), np.bool_)
        if not prompt_tokens:
            keep = _generated(logprobs, comparison.requests, left, right)
        return _result(comparison, finding, logprobs, keep, clip)


def _logits(comparison: Comparison, temperature: float) -> tuple[Finding, TokenLogprobs]:
    """Return the first finding on logits and its log-probabilities."""
    for finding in comparison.report.findings:
        if (logprobs := comparison.token_logprobs(finding, temperature)) is not None and len(logprobs.token):
            return finding, logprobs
    raise NothingInCommonError(
        "the runs have no logits of a common token row in full; record them with --site '*lm_head:out' --keep full, "
        "and compute the rollout's tokens in the trainer (tapscope dump --tokens-from ROLLOUT)"
    )


def _generated(logprobs: TokenLogprobs, requests: Sequence[str], trainer: Run, rollout: Run) -> Array:
    """Return a [tokens] bool mask of the generated tokens, which follow the prompt of their request.

    A request with another name in the rollout is recognized by its prompt, which is a prefix of the trainer's tokens.
    """
    prompts, tokens = rollout.prompts(), trainer.tokens()
    lengths = []
    for name in requests:
        whole = [tokens[name][p] for p in sorted(tokens.get(name, {}))]
        alike = [len(p) for p in prompts.values() if len(p) < len(whole) and whole[: len(p)] == list(p)]
        lengths.append(len(prompts[name]) if name in prompts else max(alike, default=0))
    return np.asarray(logprobs.position >= np.array(lengths, np.int64)[logprobs.request])


def _result(comparison: Comparison, finding: Finding, logprobs: TokenLogprobs, keep: Array, clip: float) -> Mismatch:
    if not keep.any():
        raise NothingInCommonError(
            f"{finding.site}: only prompt tokens have logits in both runs; count them with --prompt-tokens"
        )
    request, position, token = logprobs.request[keep], logprobs.position[keep], logprobs.token[keep]
    trainer, rollout, kl = logprobs.baseline[keep], logprobs.target[keep], logprobs.kl[keep]
    per_request = {
        comparison.requests[index]: _stats(
            trainer[request == index], rollout[request == index], kl[request == index], clip
        )
        for index in np.unique(request).tolist()
    }
    columns = (request.tolist(), position.tolist(), token.tolist(), trainer.tolist(), rollout.tolist())
    tokens = tuple(
        TokenMismatch(comparison.requests[r], p, t, a, b, float(np.exp(a - b)))
        for r, p, t, a, b in zip(*columns, strict=True)
    )
    routing = tuple(_routing(comparison))
    total = _stats(trainer, rollout, kl, clip)
    return Mismatch(
        site=finding.site,
        total=total,
        requests=per_request,
        tokens=tokens,
        routing=routing,
        num_unknown=logprobs.num_unknown,
        num_prompt=int((~keep).sum()),
        num_nonfinite=logprobs.num_nonfinite,
        report=comparison.report,
    )


def _routing(comparison: Comparison) -> Iterator[RoutingAgreement]:
    """Yield the agreement of each router that chose different experts in at least one token row."""
    for finding in comparison.report.findings:
        detail = comparison.detail(finding) if is_router(finding.site) else None
        if detail is not None and (router := detail.router) is not None and router.num_flips:
            yield RoutingAgreement(finding.site, router.rows, 1.0 - router.num_flips / router.rows)


def _stats(trainer: Array, rollout: Array, kl: Array, clip: float) -> MismatchStats:
    log_ratio = trainer - rollout
    ratio = np.exp(log_ratio)
    return MismatchStats(
        num_tokens=len(ratio),
        mean_abs=float(np.abs(log_ratio).mean()),
        max_abs=float(np.abs(log_ratio).max()),
        k1=float(-log_ratio.mean()),
        k3=float((np.expm1(log_ratio) - log_ratio).mean()),
        kl=float(kl.mean()),
        ratio_mean=float(ratio.mean()),
        ratio_min=float(ratio.min()),
        ratio_max=float(ratio.max()),
        ratio_percentiles=tuple(np.quantile(ratio, PERCENTILES).tolist()),
        clipped=float(((ratio < 1.0 - clip) | (ratio > 1.0 + clip)).mean()),
        log_ratio_sum=float(log_ratio.sum()),
    )
