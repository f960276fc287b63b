"""Text of one finding: both sides, metrics, token rows, and the values around the largest difference."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich.text import Text

from tapscope.comparator import Finding, Side, TokenView
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.report.details import sentences
from tapscope.core import dtypes
from tapscope.core.formatting import count, middle, number, shape
from tapscope.core.site import compact_ranges
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.finding import facts, metrics, worst_place
from tapscope.render.record_text import DIM, flow, strip_text, value_text
from tapscope.render.tensor_summary import Strip


def measure_lines(finding: Finding, width: int) -> list[Text]:
    """Return lines that describe both sides of a finding, its verdict and its metrics."""
    lines = [*_sides(finding, width), *_flow(facts(finding), width), *_flow(metrics(finding), width)]
    worst = worst_place(finding)
    return [*lines, *_flow([worst] if worst else [], width)]


def _flow(items: Iterable[Fact], width: int) -> list[Text]:
    return flow([(fact.label, fact.text) for fact in items], width)


def note_lines(finding: Finding) -> list[Text]:
    """Return one line per note of the finding."""
    return [Text(f"note: {note}") for note in finding.notes]


def detail_lines(detail: Detail) -> list[Text]:
    """Return the detailed measures: ULPs, percentiles, histogram, channels, agreement of logits, router choices."""
    return list(map(Text, sentences(detail)))


def _sides(finding: Finding, width: int) -> list[Text]:
    return [
        _side(word, side, width) for word, side in (("baseline", finding.baseline), ("target", finding.target)) if side
    ]


def _side(word: str, side: Side, width: int) -> Text:
    ranks = f" · ranks {compact_ranges(side.ranks)}" if len(side.ranks) > 1 else ""
    facts = f"{dtypes.short(side.dtype) if side.dtype else 'value'} {shape(side.shape)}"
    facts += f" · {side.dims}" if side.dims else ""
    line = Text(f"{word:<9}", style=DIM)
    room = max(width - len(facts) - len(ranks) - 12, 20)
    if not side.parts:
        return line.append(f"{middle(side.site, room)}  {facts}{ranks}", style="not dim")
    line.append(f"{facts}{ranks}, put together from", style="not dim")
    return line.append("".join(f"\n{'':9}{middle(part, width - 9)}" for part in side.parts), style="not dim")


def strip_line(seen: TokenView, step: int | None, width: int) -> Text:
    """Return one line that draws the error of every token row of ``step`` (None: of all steps) as blocks."""
    errors = seen.errors if step is None else seen.errors[seen.steps == step]
    bad = ~np.isfinite(errors)
    strip = Strip(tuple(np.where(bad, 0.0, errors).tolist()), tuple(bad.tolist()), len(errors))
    return Text("tokens ", style=DIM).append_text(Text("", style="not dim").append_text(strip_text(strip, width - 7)))


def token_lines(seen: TokenView, step: int | None, width: int, height: int) -> list[Text]:
    """Return a table of the token rows with the largest errors, worst first, in at most ``height`` rows."""
    rows = np.arange(len(seen.errors)) if step is None else np.flatnonzero(seen.steps == step)
    if not len(rows):
        return [Text(f"no row was compared in step {step}", style=DIM)]
    order = rows[np.argsort(-np.nan_to_num(seen.errors[rows], posinf=np.inf), kind="stable")][: max(height, 1)]
    wide = max(len(seen.labels[i]) for i in order)
    head = Text(f"  step  {'row':<{max(wide, 3)}}     error   max |Δ|   column", style=DIM)
    top = float(np.max(seen.errors[order][np.isfinite(seen.errors[order])], initial=0.0))
    lines = [head]
    for i in order.tolist():
        error = float(seen.errors[i])
        bar = "█" * round(max(width - wide - 42, 0) * min(error / top, 1.0)) if top and np.isfinite(error) else ""
        lines.append(
            Text(
                f"{int(seen.steps[i]):>6}  {seen.labels[i]:<{max(wide, 3)}}  {number(error):>8}  "
                f"{number(float(seen.max_abs[i])):>8}  {_column(seen, i):>7}  {bar}".rstrip()
            )
        )
    left = len(rows) - len(order)
    return [*lines, Text(f"{count(left)} more rows with smaller errors", style=DIM)] if left else lines


def _column(seen: TokenView, row: int) -> str:
    return str(int(seen.columns[row])) if seen.columns[row] >= 0 else "%"


def value_lines(seen: TokenView, width: int) -> list[Text]:
    """Return the values of the worst row around its largest difference: baseline, target and their difference."""
    window = seen.window
    with np.errstate(invalid="ignore"):
        sides = [window.baseline, window.target, window.target - window.baseline]
    cells = [[value_text(value) for value in side] for side in sides]
    columns = [str(window.first + i) for i in range(len(window.baseline))]
    wide = max((len(cell) for row in [*cells, columns] for cell in row), default=1)
    shown = max(min((width - 9) // (wide + 1), len(columns)), 1)
    start = max(min(window.column - window.first - shown // 2, len(columns) - shown), 0)

    def line(word: str, row: Sequence[str], style: str = "") -> Text:
        return Text(f"{word:<9}" + "".join(f" {cell:>{wide}}" for cell in row[start : start + shown]), style=style)

    names = ("baseline", "target", "Δ")
    heading = f"step {int(seen.steps[seen.worst])}, row {seen.labels[seen.worst]}"
    differs = seen.max_abs[seen.worst] or seen.errors[seen.worst]
    heading += ", the one with the largest error" if differs else ": no row differs"
    return [Text(heading, style=DIM), line("column", columns, DIM), *map(line, names, cells)]
