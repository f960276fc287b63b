"""Details: the metrics of --detail, a few lines per finding."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tapscope.comparator.verdict.finding import Finding
from tapscope.core import formatting

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail
    from tapscope.comparator.metrics.ranking import LogitsAgreement, RouterAgreement

_MOST_CELLS = 32


def details(findings: Sequence[Finding], top: int | None) -> Iterator[str]:
    """Yield lines for the bad findings, or for all unequal ones if none is bad; at most ``top`` findings."""
    known = [f for f in findings if f.detail is not None]
    shown = [f for f in known if f.verdict.is_bad] or known
    for finding in shown[: top or None]:
        assert finding.detail is not None
        first, *more = sentences(finding.detail)
        yield f"detail    {finding.site}: {first}"
        yield from (f"          {sentence}" for sentence in more)
    if top and len(shown) > top:
        yield f"          {len(shown) - top:,} more sites; --all or --json lists them"


def sentences(detail: "Detail") -> list[str]:
    """Return the detailed metrics, one line each."""
    return [_spread(detail), *_histogram(detail), *_detail_lines(detail)]


def _histogram(detail: "Detail") -> Iterator[str]:
    """Yield the histogram of differences by power of two, as a bar of block characters."""
    known = {e: count for e, count in detail.histogram if e is not None}
    if not known:
        return
    first, last = min(known), max(known)
    step = -(-(last - first + 1) // _MOST_CELLS)
    cells = [sum(known.get(e + i, 0) for i in range(step)) for e in range(first, last + 1, step)]
    blocks = "".join(formatting.block(cell, max(cells)) for cell in cells)
    equal = sum(count for e, count in detail.histogram if e is None)
    yield f"|Δ| from 2^{first} {blocks} to 2^{last + 1}" + (f", none of {equal:,} elements" if equal else "")


def _spread(detail: "Detail") -> str:
    shares = ", ".join(f"p{share * 100:.0f} {formatting.number(value)}" for share, value in detail.percentiles)
    if detail.ulp_max is None or detail.ulp_p99 is None:
        return f"|Δ| {shares}"
    return f"|Δ| {shares}; {detail.ulp_dtype} ULP p99 {_count(detail.ulp_p99)}, max {_count(detail.ulp_max)}"


def _detail_lines(detail: "Detail") -> Iterator[str]:
    if detail.channels:
        worst = ", ".join(f"{c.index} ({formatting.number(c.rel_l2)})" for c in detail.channels)
        yield f"channels with the largest errors (relative): {worst}"
    if detail.logits is not None:
        yield _agreement(detail.logits)
    if detail.router is not None:
        yield _choice(detail.router)


def _agreement(logits: "LogitsAgreement") -> str:
    kl = f"KL mean {formatting.number(logits.kl_mean)}, max {formatting.number(logits.kl_max)} nats"
    rows = formatting.plural(logits.rows, "row")
    return f"top-1 equal in {logits.top1:.1%} of {rows}, top-5 shared {logits.topk:.1%}; {kl}"


def _choice(router: "RouterAgreement") -> str:
    flips = f"{router.num_flips:,} of {formatting.plural(router.rows, 'row')} choose different experts (top {router.k})"
    exposed = f"{router.num_exposed:,} are within reach of their error"
    margin = (
        f"smallest margin {formatting.number(router.margin)}, twice its error {formatting.number(router.margin_error)}"
    )
    return f"{flips}; {exposed}; {margin}"


def _count(steps: float) -> str:
    return f"{steps:,.0f}" if steps < 1e6 else f"{steps:.1e}"
