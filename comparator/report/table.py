"""Table: the report as text.

Glyphs and words carry the meaning, color only repeats it; the last four lines are the answer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tapscope.comparator.noise_floor.error_model import FloorEffect
from tapscope.comparator.report.answer import LABEL, answer, counts
from tapscope.comparator.report.columns import table_lines
from tapscope.comparator.report.details import details
from tapscope.comparator.report.folding import fold_rows
from tapscope.comparator.report.sqnr_ranking import sqnr_lines
from tapscope.comparator.report.width import Line, display_width, wrap_line
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core import formatting
from tapscope.core.formatting import number

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Header, Report

_MIN_SHOWN = 1e-3


TOP = 12
"""Default number of rows of the table."""


def render(
    report: "Report", *, width: int = 100, top: int | None = TOP, wrap: bool = False, sqnr: int = 0
) -> Iterator[Line]:
    """Yield the lines of the report for a screen of ``width`` columns.

    The table has ``top`` rows of findings, None for all. With ``wrap``, sentences are broken between words. ``sqnr`` is
    the number of outputs with the lowest SQNR that are listed.
    """
    for line in _headers(report):
        yield from wrap_line(line, width, LABEL) if wrap else (line,)
    yield Line("")
    rows, hidden = fold_rows(report, top)
    yield from table_lines(rows, width)
    for sentence in _unlike(report.findings, top):
        yield from wrap_line(Line(sentence), width, 2) if wrap else (Line(sentence),)
    for sentence in hidden:
        yield Line(f"   … {sentence}")
    yield Line("")
    ranked = sqnr_lines(report.findings, sqnr)
    explained = (*details(report.findings, top), *floor_lines(report.findings), *ranked)
    for line in (*map(Line, explained), *_ending(report, top)):
        is_command = line.plain.startswith("next ")  # kept on one line for copying
        yield from wrap_line(line, width, LABEL) if wrap and not is_command else (line,)


def report_account(report: "Report") -> Iterator[Line]:
    """Yield the report without its findings: both runs, coverage, assumptions, gaps, and the answer."""
    yield from _headers(report)
    yield Line("")
    yield from _ending(report, None)


def _ending(report: "Report", top: int | None) -> Iterator[Line]:
    yield from _coverage(report, top)
    yield Line(f"verdicts  {counts(report)}")
    yield from map(Line, answer(report))


def _headers(report: "Report") -> Iterator[Line]:
    rows = [_header(which, side) for which, side in (("baseline", report.baseline), ("target", report.target))]
    widths = [max(display_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield Line(
            "  ".join(cell + " " * (w - display_width(cell)) for cell, w in zip(row, widths, strict=True)).rstrip()
        )


def _header(which: str, header: "Header") -> list[str]:
    mesh = " ".join(f"{axis}{size}" for axis, size in header.mesh.items() if size > 1) or "1 rank"
    state = "not closed" if header.is_open else ""
    facts = [header.model or "-", header.framework or "-", header.precision, mesh]
    sizes = [formatting.plural(header.num_steps, "step"), formatting.plural(header.num_records, "record")]
    return [which, header.name, *facts, *sizes, state]


def _unlike(findings: Sequence[Finding], top: int | None) -> Iterator[str]:
    """Yield why sites cannot be compared, each reason once."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict is Verdict.SHAPE:
            reasons.setdefault(finding.notes[0] if finding.notes else "cannot be compared", []).append(finding.site)
    for reason, sites in list(reasons.items())[: top or None]:
        more = f" and {formatting.plural(len(sites) - 1, 'more site')}" if len(sites) > 1 else ""
        yield f"# {sites[0]}{more}: {reason}"


def _coverage(report: "Report", top: int | None) -> Iterator[Line]:
    coverage = report.coverage
    sites = f"{formatting.plural(coverage.num_sites_matched, 'site')} matched"
    alone = f"{coverage.num_sites_only_baseline:,} only in baseline, {coverage.num_sites_only_target:,} only in target"
    rows = ""
    if coverage.rows_known:
        rows = f" · rows: {coverage.num_rows_aligned:,} aligned, {max(coverage.num_rows_forked):,} forked, "
        rows += f"{sum(coverage.num_rows_unaligned):,} unaligned"
        again = sum(coverage.num_rows_recomputed)
        rows += f", {again:,} recomputed by one run" if again else ""
        superseded = sum(coverage.num_rows_replaced)
        rows += f", {superseded:,} of rejected or unmatched drafts" if superseded else ""
    yield Line(f"coverage  {sites} ({alone}){rows}")
    yield Line(f"matched   {_matched(report)}")
    yield Line(f"judged    {_judged(report)}")
    for fork in coverage.forks[:4]:
        decoded = f" ({fork.baseline_text!r} against {fork.target_text!r})" if fork.baseline_text else ""
        tokens = f"token {fork.baseline_token} against {fork.target_token}{decoded}"
        yield Line(f"fork      request {fork.request} at position {fork.position}: {tokens}; later rows not compared")
    if len(coverage.forks) > 4:
        yield Line(f"fork      {len(coverage.forks) - 4} more requests; --json lists them")
    for sentence in coverage.warnings:
        yield Line(f"note      {sentence}")
    for sentence in coverage.partial[:top]:
        yield Line(f"missing   {sentence}", style="bold")
    if top is not None and len(coverage.partial) > top:
        more = formatting.plural(len(coverage.partial) - top, "more sentence")
        yield Line(f"missing   {more} like these; --all lists them", style="bold")


def _matched(report: "Report") -> str:
    """Return the number of sites matched by each pass."""
    passes = Counter(f.matched_by for f in report.findings if not f.verdict.is_orphan)
    return " · ".join(f"{n:,} {name or 'unknown'}" for name, n in passes.most_common())


def _judged(report: "Report") -> str:
    """Return the number of sites judged by each standard."""
    tolerance = report.options.tolerance
    words = {
        "rounding": "what rounding explains",
        "noise_run": "the noise run",
        "tolerance": "" if tolerance is None else f"atol {tolerance[0]:g} + rtol {tolerance[1]:g} × |baseline|",
    }
    sources = Counter(words.get(f.judged_by, f.judged_by.partition(" ")[0]) for f in report.findings if f.judged_by)
    sentences = [f"{n:,} by {name}" for name, n in sources.most_common()]
    sentences += [f"{unread:,} equal by recorded hash, unread"] if (unread := report.coverage.num_sites_unread) else []
    return " · ".join(sentences)


def floor_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield, for every finding that lists its floor effects, the floor and each effect with its contribution and a
    sentence."""
    for finding in findings:
        if not finding.floor_effects:
            continue
        over = f"error {number(finding.error)}, floor {number(finding.floor)} ({finding.ratio:.2f} of it)"
        yield f"floor     {finding.site}: {over}, by the test {finding.test}"
        shown = _notable(finding)
        sizes, names = [_size(each) for each in shown], [each.effect for each in shown]
        width, name_width = max(map(len, sizes)), max(map(len, names))
        for name, size, each in zip(names, sizes, shown, strict=True):
            yield f"          {name:{name_width}}  {size:>{width}}  {each.explanation}{_without(each, finding.floor)}"


def _notable(finding: Finding) -> list[FloorEffect]:
    """Return the effects that change the floor or are not negligible relative to the largest effect."""
    effects = finding.floor_effects
    least = _MIN_SHOWN * max((each.contribution for each in effects if each.unit == "error"), default=0.0)
    return [
        each for each in effects if each.unit == "factor" or each.contribution >= least or _without(each, finding.floor)
    ]


def _size(effect: FloorEffect) -> str:
    """Return ``2.2e-03`` for an error, ``×4`` for a factor."""
    return f"×{effect.contribution:.3g}" if effect.unit == "factor" else number(effect.contribution)


def _without(effect: FloorEffect, floor: float) -> str:
    """Return text on the floor without the effect, if that floor differs; otherwise empty."""
    if effect.floor_without is None or abs(effect.floor_without - floor) <= 0.005 * floor:
        return ""
    return f" (floor without it {number(effect.floor_without)})"
