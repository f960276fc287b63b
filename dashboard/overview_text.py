"""Text of an overview: its metrics in one line, its histograms, profiles and tokens as lines of blocks."""

import math
from collections.abc import Sequence

from rich.text import Text

from tapscope.core.formatting import block, printable
from tapscope.dashboard.model.overview import Overview, ProfileCell, SharedBin
from tapscope.dashboard.model.spans import even_spans
from tapscope.dashboard.model.token_strip import TokenStrip

LABEL = 11
"""Columns before the blocks."""


def metrics_text(found: Overview, *, is_pair: bool) -> str:
    """The metrics of all values, in one line."""
    bad = f" · {found.num_nonfinite:,} not finite" if found.num_nonfinite else ""
    if not is_pair:
        return f"max |x| {found.max_abs.text} · rms {found.rms.text}{bad}"
    text = f"max |Δ| {found.max_abs.text} · rel l2 {found.rel_l2.text} · cosine {found.cosine.text}"
    if found.ulp_dtype:
        text += f" · ULP of {found.ulp_dtype}: {found.ulp_median.text} median, {found.ulp_p99.text} p99"
        text += f", {found.ulp_max.text} max"
    return f"{text} · equal {found.equal.text}{bad}"


def histogram_lines(bins: Sequence[SharedBin], width: int, sides: Sequence[str]) -> list[Text]:
    """One line of blocks for each side, on the same bins; heights on a log scale."""
    if not bins:
        return [Text("no finite value to count", style="dim")]
    top = math.log1p(max(getattr(each, side) for each in bins for side in sides))
    wide = max((width - LABEL) // len(bins), 1)
    lines = []
    for side in sides:
        heights = "".join(block(math.log1p(getattr(each, side)), top) * wide for each in bins)
        lines.append(Text(f"{'Δ' if side == 'difference' else side:<10} {heights[: width - LABEL]}"))
    return [*lines, Text(f"{'':<10} {bins[0].low:.2e} … {bins[-1].high:.2e}", style="dim")]


def profile_lines(cells: Sequence[ProfileCell], what: str, width: int) -> list[Text]:
    """One line of blocks, ``%`` where a value is not finite, and the largest four channels or rows."""
    parts = [max(cells[a:b], key=_size) for a, b in even_spans(len(cells), width - LABEL)]
    line = "".join("%" if each.share is None else block(each.share, 1.0) for each in parts)
    worst = sorted(cells, key=_size, reverse=True)[:4]
    return [Text(f"{what:<10} {line}"), Text("largest: " + " · ".join(printable(each.text) for each in worst))]


def _size(cell: ProfileCell) -> float:
    return math.inf if cell.share is None else cell.share


def token_lines(strip: TokenStrip | None, width: int, key: str) -> list[Text]:
    """One line of blocks, and the first 16 rows with their errors; ``key`` changes the order."""
    if strip is None:
        return [Text("Reading all rows ...", style="dim")]
    lines = [Text(f"by {strip.order} ({key}: by {'position' if strip.order == 'error' else 'error'})", style="dim")]
    line = "".join("%" if each.share is None else block(each.share, 1.0) for each in strip.rows[: width - 2])
    shown = [f"{printable(each.label)}: {each.error.text}" for each in strip.rows]
    lines.append(Text(line))
    return [*lines, *(Text("  ".join(shown[i : i + 4])) for i in range(0, min(len(shown), 16), 4))]
