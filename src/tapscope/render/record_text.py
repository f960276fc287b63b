"""A record and its tensor summary as lines of text, for both `tapscope show` and the terminal UI.

Every line is a :class:`rich.text.Text`, never markup: sites and shapes contain brackets. Numbers are never truncated:
items that do not fit move to the next line, or are omitted with a note.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from tapscope.core import dtypes
from tapscope.core.formatting import block, count, number, plural, shape, size
from tapscope.render.record_notes import occasion, part
from tapscope.render.row_labels import RowMap, dims_words
from tapscope.render.tensor_summary import Corner, Digest, Histogram, Strip
from tapscope.run_format.record import Record, Stats

ODD = "bold"
DIM = "dim"


def flow(items: Iterable[tuple[str, str]], width: int) -> list[Text]:
    """Lay out name and value pairs, as many per line as fit in ``width``."""
    lines: list[Text] = []
    for name, value in items:
        item = Text(f"{name} " if name else "", style=DIM).append(value, style="not dim")
        if lines and lines[-1].cell_len + 3 + item.cell_len <= width:
            lines[-1].append("   ").append_text(item)
        else:
            lines.append(Text().append_text(item))
    return lines


def title_facts(record: Record, num_firings: int, phase: str) -> list[str]:
    """Return title parts: ``step 0 prefill``, ``rank 0``, the occurrence, and non-default fields of the key."""
    key = record.key
    facts = [f"step {key.step} {phase}".rstrip(), f"rank {key.rank}"]
    if num_firings > 1 or key.occurrence:
        facts.append(f"occurrence {key.occurrence} of {num_firings}")
    return facts + occasion(key)


def what_lines(record: Record, rows: RowMap | None, width: int) -> list[Text]:
    """Return lines with dtype, shape, bytes, dims, requests of the rows, and the recorded part of the tensor."""
    if record.dtype is None:
        return [Text(f"not a tensor: {_value_words(record.value)}"), *flow(part(record), width)]
    items = [("", f"{dtypes.short(record.dtype)} {shape(record.shape)}"), ("dims", dims_words(record))]
    if record.entry is not None:
        items.insert(1, ("", size(record.nbytes)))
    if rows is not None:
        items.append(("rows", rows.describe() + (" (axes inferred from the shape)" if rows.inferred else "")))
    return flow(items + part(record), width)


def digest_lines(record: Record, width: int) -> list[Text]:
    """Return lines with hash and bag."""
    return flow([(name, text) for name in ("hash", "bag") if (text := getattr(record, name)) is not None], width)


def _value_words(value: Any) -> str:
    """Format a non-tensor value: ``bool True``, ``object transformers.DynamicCache``, ``str 'abc' (first 3 of 9,000
    characters)``."""
    if not isinstance(value, dict):
        return repr(value)
    words = str(value.get("type", "unknown type"))
    if "value" in value:
        words += f" {value['value']!r}"
    elif "text" in value:
        words += f" {value.get('class')} {value['text']}"
    elif "class" in value:
        words += f" {value['class']}, only the class was recorded"
    cut = value.get("cut")
    return f"{words} (first {count(len(value['value']))} of {count(cut)} characters)" if cut else words


def stats_lines(record: Record, width: int) -> list[Text]:
    """Return lines with the recorded statistics over finite values."""
    stats = record.stats
    if stats is None:
        return [Text("no statistics were recorded", style=DIM)]
    items = [
        *((name, number(getattr(stats, name))) for name in ("min", "mean", "max", "std", "rms")),
        ("|max|", number(stats.absmax)),
        ("zero", share(stats.zeros, stats.count)),
        *((("subnormal", count(stats.subnormals)),) if stats.subnormals else ()),
        *_nonfinite_items(stats),
    ]
    return flow(items, width)


def _nonfinite_items(stats: Stats) -> list[tuple[str, str]]:
    if not stats.nonfinite:
        return [("non-finite", "0")]
    counts = (("nan", stats.nan), ("inf", stats.posinf), ("-inf", stats.neginf))
    return [(f"% {name}", count(num)) for name, num in counts if num]


def share(part: int, whole: int) -> str:
    """Format a count with its percentage: ``12 (3 %)``; ``0`` for zero."""
    if not part:
        return "0"
    percent = 100 * part / whole
    return f"{count(part)} ({'<1' if percent < 1 else f'{percent:.0f}'} %)"


def spark(histogram: Histogram, cells: int) -> Text:
    """Render the histogram as one line of blocks with heights on a log scale."""
    num = min(len(histogram.counts), max(cells, 1))
    starts = [i * len(histogram.counts) // num for i in range(num)] + [len(histogram.counts)]
    sums = [sum(histogram.counts[a:b]) for a, b in pairwise(starts)]
    top = math.log1p(max(sums))
    return Text("".join(block(math.log1p(value), top) for value in sums))


def strip_text(strip: Strip, cells: int) -> Text:
    """Render max |x| per row (or group of rows) as blocks; ``%``: contains a non-finite value, ``·``: all zero."""
    small = strip.shrink(max(cells, 1))
    top = max(small.peaks, default=0.0)
    line = Text()
    for peak, bad in zip(small.peaks, small.bad, strict=True):
        line.append("%" if bad else block(peak, top), style=ODD if bad else "")
    return line


def summary_lines(digest: Digest, width: int) -> list[Text]:
    """Return histogram and strip, one line each, and the location of the first non-finite value."""
    lines = []
    if digest.histogram is not None:
        lines.append(Text("hist ", style=DIM).append_text(_plain(spark(digest.histogram, width - 5))))
    if digest.strip.num_rows:
        what = "tokens" if digest.rows else "rows"
        lines.append(Text(f"{what} ", style=DIM).append_text(_plain(strip_text(digest.strip, width - len(what) - 1))))
    return lines + bad_lines(digest)


def bad_lines(digest: Digest) -> list[Text]:
    """Return the coordinates of the first non-finite value; empty if all values are finite."""
    if digest.first_bad is None or digest.bad_row is None:
        return []
    at = ",".join(map(str, digest.first_bad))
    place = digest.rows.place(digest.bad_row) if digest.rows else None
    return [Text(f"% first non-finite value at [{at}]{f': {place}' if place else ''}", style=ODD)]


def histogram_lines(histogram: Histogram | None, width: int, height: int = 32) -> list[Text]:
    """Return one line per bin with range, count and a bar on a log scale; at most ``height`` lines."""
    if histogram is None:
        return [Text("no finite value to count", style=DIM)]
    merged = _merge(histogram, max(height - 1, 1))
    labels = [f"{a:9.2e} … {b:9.2e}" for a, b in map(merged.edges, range(len(merged.counts)))]
    counts = [count(value) for value in merged.counts]
    counts_width = max(map(len, counts))
    room = max(width - 22 - counts_width - 3, 4)
    top = math.log1p(max(merged.counts))
    lines = [Text(f"{plural(sum(merged.counts), 'finite value')}, bars on a log scale", style=DIM)]
    for label, amount, value in zip(labels, counts, merged.counts, strict=True):
        bar = "█" * max(round(room * math.log1p(value) / top), 1) if value else ""
        lines.append(Text(f"{label:<22} {amount:>{counts_width}} {bar}".rstrip()))
    return lines


def _merge(histogram: Histogram, num: int) -> Histogram:
    """Merge adjacent bins pairwise, repeatedly, until at most ``num`` bins remain or their number is odd."""
    counts: Sequence[int] = histogram.counts
    while len(counts) > num and len(counts) % 2 == 0:
        counts = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]
    return Histogram(tuple(counts), histogram.low, histogram.high)


def corner_lines(corner: Corner, rows: RowMap | None, width: int, height: int) -> list[Text]:
    """Return a window of values with row labels and column numbers; the last line reports omitted rows and columns."""
    labels = [_row_label(corner, rows, i) for i in range(len(corner.values))]
    cells = [[value_text(value) for value in row] for row in corner.values]
    columns = [str(corner.first_column + i) for i in range(corner.values.shape[1])]
    if not cells or not columns:
        return [Text("no values: the tensor is empty", style=DIM)]
    label_width = max(map(len, labels))
    cell_width = max(len(text) for row in [*cells, columns] for text in row)
    shown_columns = max(min((width - label_width) // (cell_width + 1), len(columns)), 1)
    shown_rows = max(min(height - 2, len(cells)), 1)

    def line(label: str, values: list[str]) -> str:
        return f"{label:>{label_width}}" + "".join(f" {text:>{cell_width}}" for text in values[:shown_columns])

    body = [Text(line(label, row)) for label, row in zip(labels, cells, strict=True)]
    head = Text(line("", columns), style=DIM)
    return [head, *body[:shown_rows], Text(_left_out(corner, shown_rows, shown_columns), style=DIM)]


def _row_label(corner: Corner, rows: RowMap | None, offset: int) -> str:
    row = corner.first_row + offset
    return f"{row} {rows.label(row)}" if rows else str(row)


def _left_out(corner: Corner, rows: int, columns: int) -> str:
    def span(first: int, shown: int, total: int, word: str) -> str:
        if shown == total:
            return f"all {plural(total, word)}" if total > 1 else f"1 {word}"
        return f"{word}s {first}-{first + shown - 1} of {count(total)}"

    row_words = span(corner.first_row, rows, corner.num_rows, "row")
    return f"{row_words}, {span(corner.first_column, columns, corner.num_columns, 'column')}"


def value_text(value: Any) -> str:
    """Format a value: integers exactly, floats with five significant digits."""
    number_ = value.item() if hasattr(value, "item") else value
    return f"{number_:.5g}" if isinstance(number_, float) else str(number_)


def no_values_text(record: Record) -> str:
    """Explain why the record has no values, and how to capture them."""
    if record.dtype is None:
        return "Not a tensor: the value above is all there is."
    if record.cap is not None:
        return f"Statistics only: the tensor is larger than the cap of its rule, {size(record.cap)}."
    return "Statistics only: no values were kept at this site. To keep them, capture with --keep full."


def _plain(text: Text) -> Text:
    """Reset the base style of ``text``, so that a preceding dim label does not dim it."""
    text.style = "not dim"
    return text
