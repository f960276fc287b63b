"""`tapscope show`: print one tensor with its statistics and values."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.cli import diagnostics, output, report_files
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.core.errors import RuleError, UsageError
from tapscope.core.formatting import listed
from tapscope.core.site import port_of, split_call

if TYPE_CHECKING:
    from tapscope.render.row_labels import RowMap
    from tapscope.render.tensor_summary import Digest
    from tapscope.run_format.record import Record
    from tapscope.run_format.run import Run

SCHEMA = "tapscope.show/1"
_CHOICES = ("step", "rank", "occurrence", "micro", "pass_", "model")
"""Key fields that can be selected by flags."""
_MARGIN = 4
"""Number of columns shown on either side of the column named by a link."""
_PLOT_LINES = 16
MAX_SLICE_ROWS = 64
"""Maximum number of rows of a slice printed as text; --json prints all rows."""


class ShowCommand:
    """Show one tensor: statistics, histogram, values.

      $ tapscope show base layers.12.self_attn.o_proj:out --step 0 --slice "0,:8"
      $ tapscope show base layers.12.self_attn.o_proj:out --plot

    If several records match, the first is shown; stderr lists the flags that select another.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument(
            "site",
            metavar="SITE",
            help="a site as `tapscope ls RUN` prints it, a pattern, or a link of a report such as run/SITE@0.0[5,17]; "
            "SITE#1: its second call",
        )
        add_pattern_flag(parser)
        parser.add_argument("--step", type=int, metavar="N", help="step (default: the first that has the site)")
        parser.add_argument("--rank", type=int, metavar="N", help="rank (default: the first that has the site)")
        parser.add_argument("--occurrence", type=int, metavar="N", help="index of the call within the step, from 0")
        parser.add_argument("--micro", type=int, metavar="N", help="microbatch within the step")
        parser.add_argument("--pass", dest="pass_", metavar="PASS", help="pass: forward, recompute or backward")
        parser.add_argument("--model", metavar="NAME", help="model, if the run has several")
        parser.add_argument(
            "--slice", metavar="INDEX", help="print these values only; Python indexing: '0,:8', '...,-1', --slice=-1"
        )
        parser.add_argument(
            "--plot",
            action="store_true",
            help="print a heat map of the tensor, and rms and |max| by step and rank",
        )
        parser.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained HTML page instead")
        parser.add_argument("--json", action="store_true", help="one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Print the tensor, or write its HTML page."""
        report_files.check(args)
        given = [f"--{name}" for name in ("slice", "plot", "html") if getattr(args, name)]
        if len(given) > 1 or (args.json and given not in ([], ["--slice"])):
            raise UsageError(f"{' and '.join([*given, *(['--json'] if args.json else [])])} exclude each other")
        _follow_link(args)
        from tapscope.kernels.native import fill
        from tapscope.render.row_labels import row_map
        from tapscope.sources import open_run

        with open_run(with_pattern(args.path, args)) as run:
            matches = find(run, args)
            record = fill(run, matches[0])
            if len(matches) > 1:
                diagnostics.note(_describe_choice(matches))
            step = run.steps.get(record.key.step, {}).get(record.key.rank)
            rows = row_map(record, step)
            if args.slice is not None:
                _show_slice(run, record, args)
            elif args.html is not None:
                _write_html(run, record, args.html)
            elif args.plot:
                _print_plot(run, record)
            elif args.json:
                output.write_json(_json(record, _digest(run, record, rows)))
            else:
                firings = sum(
                    1 for r in run.records if r.key._replace(occurrence=0) == record.key._replace(occurrence=0)
                )
                _print(run, record, rows, firings, step.info.phase if step else "")
        return diagnostics.ExitCode.OK


def _follow_link(args: argparse.Namespace) -> None:
    """Replace a link in ``args`` by the site, step and rank it encodes, and by a slice around its index."""
    if not re.search(r"/.+@\d+\.\d+(\[[\d,]*\])?$", args.site):
        return
    from tapscope.dashboard.model.permalink import parse_permalink

    link = parse_permalink(args.site)
    named, args.site = args.site, link.site
    args.step = link.step if args.step is None else args.step
    args.rank = link.rank if args.rank is None else args.rank
    if link.index and args.slice is None and not args.html:
        args.link = named
        *row, column = link.index
        first = max(column - _MARGIN, 0)
        args.slice = ",".join([*map(str, row), f"{first}:{column + _MARGIN + 1}"])


def _write_html(run: "Run", record: "Record", file: Path) -> None:
    from tapscope.dashboard.model.record import record_view
    from tapscope.dashboard.report.html import show_report

    report_files.save(file, show_report(record_view(run, record)))


def find(run: "Run", args: argparse.Namespace) -> "list[Record]":
    """Return the matching records, the one to show first; raises RuleError that lists existing records."""
    site, call = split_call(args.site)
    candidates = run.select([site])
    exact = [record for record in candidates if record.key.site == site]
    candidates = exact or candidates
    wanted = {name: getattr(args, name) for name in _CHOICES}
    wanted["occurrence"] = call if wanted["occurrence"] is None else wanted["occurrence"]
    matches = [r for r in candidates if all(v is None or getattr(r.key, k) == v for k, v in wanted.items())]
    if not matches:
        asked = " ".join(f"--{name.rstrip('_')} {value}" for name, value in wanted.items() if value is not None)
        raise RuleError(f"{args.site} has no record with {asked} in {run.path}; it has {_available(candidates)}")
    return sorted(matches, key=lambda r: (r.key.step, r.key.rank, not _is_output(r), r.seq))


def _is_output(record: "Record") -> bool:
    """Return whether the record is a module output: a module name selects its output, although inputs fire first."""
    return re.match(r"out(\[|$)", port_of(record.key.site)) is not None


def _available(records: "list[Record]") -> str:
    from tapscope.core.site import compact_ranges
    from tapscope.run_format.record import FORWARD

    values_of = {name: {getattr(r.key, name) for r in records} for name in _CHOICES}
    words = [
        f"{name}{'s' * (len(values) > 1)} {compact_ranges(values)}"
        for name, values in values_of.items()
        if name in _CHOICES[:3] or (name == "micro" and values != {0})
    ]
    words += [f"pass {' or '.join(sorted(values_of['pass_']))}"] if values_of["pass_"] != {FORWARD} else []
    words += [f"model {' or '.join(map(repr, sorted(values_of['model'])))}"] if values_of["model"] != {""} else []
    return ", ".join(words)


def _describe_choice(matches: "list[Record]") -> str:
    """Describe which of several matching records is shown, and the flags that select another."""
    from tapscope.render.record_notes import flags

    key = matches[0].key
    sites = sorted({record.key.site for record in matches})
    shown = f"{len(matches):,} records match; shown: {key.site} --step {key.step} --rank {key.rank}"
    shown += " ".join([f" --occurrence {key.occurrence}", *flags(key, (record.key for record in matches))])
    if len(sites) == 1:
        return f"{shown} (there are {_available(matches)})"
    return f"{shown}; sites: {listed(sites)}"


def _digest(run: "Run", record: "Record", rows: "RowMap | None") -> "Digest | None":
    from tapscope.render.tensor_summary import digest

    return digest(run.array(record), rows) if record.entry is not None else None


def _print(run: "Run", record: "Record", rows: "RowMap | None", firings: int, phase: str) -> None:
    from rich.text import Text

    from tapscope.render import record_text

    console = output.console()
    width = max(console.width, 40)
    lines = [Text(f"{record.key.site}   {' · '.join(record_text.title_facts(record, firings, phase))}", style="bold")]
    lines += record_text.what_lines(record, rows, width)
    lines += record_text.digest_lines(record, width)
    lines += [Text(), *record_text.stats_lines(record, width)] if record.dtype else []
    digest = _digest(run, record, rows)
    if digest is None:
        lines += [Text(), Text(record_text.no_values_text(record))]
    else:
        if digest.is_magnitude:
            lines += [Text("complex values are shown as magnitudes")]
        lines += [*record_text.summary_lines(digest, min(width, 80)), Text()]
        lines += [*record_text.histogram_lines(digest.histogram, min(width, 80), 17), Text()]
        lines += record_text.corner_lines(digest.corner, rows, width, 10)
        if digest.around_bad is not None:
            lines += [Text(), Text("around the first non-finite value"), *_around(digest, width)]
    for line in lines:
        console.print(line)


def _print_plot(run: "Run", record: "Record") -> None:
    """Print a heat map of the values, if they were recorded, and the site's statistics over all steps and ranks."""
    from rich.text import Text

    from tapscope.dashboard.browse_source import RunSource
    from tapscope.dashboard.model.series import site_series
    from tapscope.dashboard.model.value_map import value_map
    from tapscope.dashboard.overview_text import map_lines
    from tapscope.dashboard.series_text import series_lines
    from tapscope.render import record_text

    console, source = output.console(), RunSource(run)
    width = max(console.width, 40)
    facts = record_text.title_facts(record, source.num_firings(record), source.phase(record.key.step, record.key.rank))
    lines = [Text(f"{record.key.site}   {' · '.join(facts)}", style="bold")]
    if record.entry is None:
        lines.append(Text(record_text.no_values_text(record)))
    else:
        table = source.table(record)
        lines += map_lines(value_map(table), table, width, _PLOT_LINES)
    for line in [*lines, Text(), *series_lines([site_series(source, record.key.site)], width)]:
        console.print(line)


def _around(digest: "Digest", width: int) -> Any:
    from tapscope.render import record_text

    assert digest.around_bad is not None
    return record_text.corner_lines(digest.around_bad, digest.rows, width, 10)


def parse_index(text: str, ndim: int) -> tuple[Any, ...]:
    """Parse ``"0,:8"`` to a NumPy index of ints, slices and at most one ``...``, expanded to ``ndim`` axes; raises
    UsageError."""
    index = tuple(_parse_part(part.strip(), text) for part in text.split(","))
    if sum(part is Ellipsis for part in index) > 1:
        raise UsageError(f"--slice {text!r}: '...' may be used once")
    used = len([part for part in index if part is not Ellipsis])
    if used > ndim:
        raise UsageError(f"--slice {text!r} has {used} indices but the tensor has {ndim} axes")
    fill = (slice(None),) * (ndim - used)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    return index[:at] + fill + index[at + 1 :]


def _parse_part(part: str, text: str) -> Any:
    if part == "...":
        return Ellipsis
    pieces = part.split(":")
    try:
        numbers = [int(piece) if piece.strip() else None for piece in pieces]
    except ValueError:
        numbers = []
    is_index = len(pieces) == 1 and numbers and numbers[0] is not None
    if is_index:
        return numbers[0]
    if len(pieces) in (2, 3) and numbers and (len(numbers) < 3 or numbers[2] != 0):
        return slice(*numbers)
    raise UsageError(f"--slice {text!r}: invalid index {part!r}; examples: 0, :8, 2:10:2, ...")


def _show_slice(run: "Run", record: "Record", args: argparse.Namespace) -> None:
    import numpy as np

    from tapscope.core.formatting import shape

    array = run.array(record)
    try:
        index = parse_index(args.slice, array.ndim)
        picked = array[index]
    except (UsageError, IndexError) as error:
        if link := getattr(args, "link", None):
            raise UsageError(f"{link}: invalid index; the shape is {shape(array.shape)}") from None
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--slice {args.slice!r} is out of range for shape {shape(array.shape)}") from None
    if args.json:
        plain = picked.astype(np.float64) if picked.dtype.kind == "V" else picked
        values = np.abs(plain).tolist() if plain.dtype.kind == "c" else plain.tolist()
        output.write_json({**_json(record, None), "slice": args.slice, "values": values})
        return
    at = [np.arange(size)[part] for size, part in zip(array.shape, index, strict=True)]
    _print_slice(np.asarray(picked), at)


def _print_slice(picked: Any, at: list[Any]) -> None:
    """Print one line per innermost row, labeled with its coordinates in the whole tensor."""
    import numpy as np

    from tapscope.render.record_text import value_text

    kept = [axis for axis, where in enumerate(at) if where.ndim]
    columns = [str(i) for i in at[kept[-1]]] if kept else [""]
    table = picked.reshape(-1, len(columns)) if picked.size else picked.reshape(0, len(columns))
    cells = [[value_text(value) for value in row] for row in table[:MAX_SLICE_ROWS].tolist()]
    leading = [len(at[axis]) for axis in kept[:-1]]
    labels = []
    for row in range(len(cells)):
        place = dict(zip(kept[:-1], np.unravel_index(row, leading) if leading else (), strict=True))
        last = kept[-1] if kept else None
        parts = [":" if a == last else str(w[place[a]]) if a in place else str(w) for a, w in enumerate(at)]
        labels.append(f"[{','.join(parts)}]")
    label_width = max(map(len, labels), default=0)
    width = max((len(text) for row in [*cells, columns] for text in row), default=1)
    for label, cells_of_row in zip(["", *labels], [columns, *cells], strict=True):
        output.write_line(f"{label:<{label_width}}" + "".join(f" {text:>{width}}" for text in cells_of_row))
    if len(table) > MAX_SLICE_ROWS:
        diagnostics.note(f"{len(table) - MAX_SLICE_ROWS:,} more rows of the slice; --json prints all")
    if not picked.size:
        diagnostics.note("the slice is empty")


def _json(record: "Record", digest: "Digest | None") -> dict[str, Any]:
    from tapscope.run_format.record import to_json

    line: dict[str, Any] = {"schema": SCHEMA, **to_json(record), "rank": record.key.rank, "type": "tensor"}
    if digest is not None:
        line["first_nonfinite"] = digest.first_bad
        if digest.histogram is not None:
            line["histogram"] = {
                "counts": digest.histogram.counts,
                "low": digest.histogram.low,
                "high": digest.histogram.high,
            }
    return line
