"""Text of an overview: metrics in one line; histograms, profiles, token rows and heat map as lines of blocks."""

import math
from collections.abc import Sequence

from rich.text import Text

from tapscope.core.formatting import block, printable
from tapscope.dashboard.model.overview import Overview, ProfileCell, SharedBin
from tapscope.dashboard.model.spans import even_spans
from tapscope.dashboard.model.token_strip import TokenRow, TokenStrip
from tapscope.dashboard.model.value_map import ValueMap
from tapscope.dashboard.model.value_table import ValueTable

LABEL = 11
"""Width of the label in front of the blocks, in columns."""
MAP_LABEL = 16


def metrics_text(overview: Overview, *, is_pair: bool) -> str:
    """Return the metrics over all values as one line; ``is_pair`` for a comparison of two tensors."""
    bad = f" · {overview.num_nonfinite:,} not finite" if overview.num_nonfinite else ""
    if not is_pair:
        return f"max |x| {overview.max_abs.text} · rms {overview.rms.text}{bad}"
    text = f"max |Δ| {overview.max_abs.text} · rel l2 {overview.rel_l2.text} · cosine {overview.cosine.text}"
    if overview.ulp_dtype:
        text += f" · ULP of {overview.ulp_dtype}: {overview.ulp_median.text} median, {overview.ulp_p99.text} p99"
        text += f", {overview.ulp_max.text} max"
    return f"{text} · equal {overview.equal.text}{bad}"


def histogram_lines(bins: Sequence[SharedBin], width: int, sides: Sequence[str]) -> list[Text]:
    """Return one line of blocks per side, on common bins with heights on a log scale, and a line with the value range.

    Neighboring bins are summed where ``width`` is too small for all of them.
    """
    if not bins:
        return [Text("no finite value to count", style="dim")]
    spans = even_spans(len(bins), width - LABEL)
    counts = {side: [sum(getattr(each, side) for each in bins[a:b]) for a, b in spans] for side in sides}
    top = math.log1p(max(map(max, counts.values())))
    wide = max((width - LABEL) // len(spans), 1)
    lines = []
    for side in sides:
        heights = "".join(block(math.log1p(each), top) * wide for each in counts[side])
        lines.append(Text(f"{'Δ' if side == 'difference' else side:<10} {heights}"))
    return [*lines, Text(f"{'':<10} {bins[0].low:.2e} … {bins[-1].high:.2e}", style="dim")]


def profile_lines(cells: Sequence[ProfileCell], what: str, width: int) -> list[Text]:
    """Return a line of blocks, with ``%`` for non-finite values, and a line with the four largest channels or rows."""
    worst = sorted(cells, key=_size, reverse=True)[:4]
    largest = " · ".join(printable(each.text) for each in worst)
    return [Text(f"{what:<10} {_blocks(cells, width - LABEL)}"), Text(f"largest: {largest}")]


def token_lines(strip: TokenStrip | None, width: int, key: str) -> list[Text]:
    """Return a heading, a line of blocks, and the first 16 rows with their errors, four per line.

    ``key`` is the key that changes the order. The heading states the number of rows if ``strip`` is truncated.
    """
    if strip is None:
        return [Text("Reading all rows ...", style="dim")]
    part = f", the first {len(strip.rows):,} of {strip.num_rows:,} rows" if len(strip.rows) < strip.num_rows else ""
    other = "position" if strip.order == "error" else "error"
    shown = [f"{printable(each.label)}: {each.error.text}" for each in strip.rows]
    return [
        Text(f"by {strip.order} ({key}: by {other}){part}", style="dim"),
        Text(_blocks(strip.rows, width - 2)),
        *(Text("  ".join(shown[i : i + 4])) for i in range(0, min(len(shown), 16), 4)),
    ]


def map_lines(whole: ValueMap, table: ValueTable, width: int, height: int) -> list[Text]:
    """Return the whole tensor as a heat map of at most ``height`` lines; a cell shows the maximum of its values."""
    label = min(max((len(printable(table.label(row))) for row, _ in whole.rows), default=1), MAP_LABEL)
    shown = whole.binned(height, max(width - label - 1, 1))
    size = f"{len(shown.rows)} × {len(shown.columns)} cells of {table.num_rows:,} × {table.num_columns:,} values"
    head = Text(f"largest |x|, {size}: 1 to 9 on a log scale, % not finite, ∅ zero", style="dim")
    labels = (printable(table.label(first))[:label] for first, _ in shown.rows)
    return [head, *(Text(f"{name:>{label}} {line}") for name, line in zip(labels, shown.glyphs(), strict=True))]


def _blocks(cells: Sequence[ProfileCell] | Sequence[TokenRow], width: int) -> str:
    """Draw each span of cells as a block for its largest share; ``%`` where a value is not finite."""
    parts = [max(map(_size, cells[a:b])) for a, b in even_spans(len(cells), width)]
    return "".join("%" if each == math.inf else block(each, 1.0) for each in parts)


def _size(cell: ProfileCell | TokenRow) -> float:
    return math.inf if cell.share is None else cell.share
