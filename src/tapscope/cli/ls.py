"""`tapscope ls`: list the records of a run, one per line."""

import argparse
from typing import TYPE_CHECKING, Any

from tapscope.cli import diagnostics, output
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.cli.record_flags import add_selection_flags, select
from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import UsageError

if TYPE_CHECKING:
    from tapscope.run_format.record import Record
    from tapscope.run_format.records import Records

SCHEMA = "tapscope.ls/2"


class LsCommand:
    """List the records of a run, one per line.

      $ tapscope ls base --site 'layers.3.*:out' --sort max --limit 10

    Columns: mark (% not finite, ∅ all zero), step, rank, site, dtype, shape, rms, |max|, counts of NaN and infinity,
    stored bytes (- if only statistics were recorded); then slice, cap and tags, if a record has any. #occurrence,
    microbatch, pass and model follow the site where they are not the default.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        add_pattern_flag(parser)
        add_selection_flags(parser)
        parser.add_argument("--sort", choices=("seq", "max", "size"), default="seq", help="sort order (default: seq)")
        parser.add_argument(
            "--limit", type=int, metavar="N", help="print at most N records; the number of omitted records is reported"
        )
        anomalies = parser.add_argument(
            "--anomalies", action="store_true", help="only records with anomalies (non-finite, all zero)"
        )
        deprecated_flag(parser, "--odd", anomalies)
        parser.add_argument("--json", action="store_true", help="one JSON object per line")

    def run(self, args: argparse.Namespace) -> int:
        """Print the records. Exit code 0 even if the run is empty; a note reports it."""
        from tapscope.kernels.native import fill, filled
        from tapscope.render.anomalies import anomalous
        from tapscope.sources import open_run

        if args.limit is not None and args.limit < 1:
            raise UsageError(f"--limit {args.limit}: must be at least 1")
        with open_run(with_pattern(args.path, args)) as run:
            records = select(run, args)
            if args.anomalies or args.sort == "max":  # compute missing statistics from the values
                records = filled(run, records)
            if args.anomalies:
                records = anomalous(records)
            shown = [fill(run, record) for record in records.take(_order(records, args.sort)[: args.limit])]
            for line in map(_json, shown) if args.json else ():
                output.write_json(line)
            if not args.json:
                _table(shown)
            _note_hidden(args, run.path, len(records), len(shown), bool(run.records))
            for problem in run.problems:
                diagnostics.warn(problem)
        return diagnostics.ExitCode.OK


def _order(records: "Records", sort: str) -> Any:
    """Return record indices in display order.

    ``max`` and ``size``: largest first (``max``: non-finite before all others). ``seq``: by step, rank and sequence
    number.
    """
    import numpy as np

    if sort == "size":
        return np.argsort(-records.nbytes, kind="stable")
    if sort == "seq":
        return np.lexsort((records.seq, records.of_kinds(lambda kind: kind.rank), records.step))
    return records.largest_first()


def _note_hidden(args: argparse.Namespace, path: Any, total: int, shown: int, any_record: bool) -> None:
    if not total:
        why = "no anomalies" if args.anomalies and any_record else f"{path} has no records yet"
        diagnostics.note(why)
    elif shown < total:
        diagnostics.note(f"{total - shown:,} more records; --limit {total} lists them all")


def _table(records: "list[Record]") -> None:
    """Print a table without truncation; each column is as wide as its longest cell."""
    rows = [_cells(record) for record in records]
    if not rows:
        return
    head: tuple[str, ...] = (
        "",
        "step",
        "rank",
        "site",
        "dtype",
        "shape",
        "rms",
        "|max|",
        "nan",
        "inf",
        "bytes",
        "notes",
    )
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    left = (0, 3, 4, 11)
    for row in (head, *rows):
        cells = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        output.write_line("  ".join(cells).rstrip())


def _cells(record: "Record") -> tuple[str, ...]:
    from tapscope.core import dtypes
    from tapscope.core.formatting import count, number, shape, size
    from tapscope.render.anomalies import anomaly_of
    from tapscope.render.record_notes import firing, part

    key, stats, anomaly = record.key, record.stats, anomaly_of(record)
    numbers = ("-",) * 4
    if stats is not None:
        numbers = (number(stats.rms), number(stats.absmax), count(stats.nan), count(stats.posinf + stats.neginf))
    return (
        anomaly.glyph if anomaly else "",
        str(key.step),
        str(key.rank),
        " ".join([key.site, *firing(key)]),
        dtypes.short(record.dtype),
        shape(record.shape) if record.dtype else "value",
        *numbers,
        size(record.nbytes) if record.entry else "-",
        ", ".join(f"{name} {words}" for name, words in part(record)),
    )


def _json(record: "Record") -> dict[str, Any]:
    from tapscope.render.anomalies import anomaly_of
    from tapscope.run_format.record import to_json

    anomaly = anomaly_of(record)
    line = {"schema": SCHEMA, **to_json(record), "rank": record.key.rank}
    if anomaly:
        line["anomaly"] = {"kind": anomaly.kind, "detail": anomaly.detail}
    return line
