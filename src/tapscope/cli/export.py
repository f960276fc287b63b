"""`tapscope export`: write the records of a run in the formats of other tools."""

import argparse
import shlex
from pathlib import Path

from tapscope.cli import diagnostics, output
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.cli.record_flags import add_selection_flags, select
from tapscope.core.errors import DataError

SCHEMA = "tapscope.export/1"
_TABLES = ("csv", "tensorboard", "wandb")
"""Formats that contain statistics instead of tensors."""


class ExportCommand:
    """Export records to other formats.

      $ tapscope export base --to npz -o arrays --site '*:out' --steps 0
      $ tapscope export base --to csv -o tables
      $ tapscope export base --to tensorboard -o curves

      sglang       one .pt file per record, as SGLang's dumper writes it
      pt           one file per record: step_0/NAME.pt
      npz          one file per step and rank; bfloat16 and FP8 become float32
      csv          records.csv with statistics and scalars, and metrics.csv
      tensorboard  statistics and scalars over steps, one event file per rank
      wandb        the same, as one offline run per rank for wandb sync

    diff, view, ls and show read the formats sglang, pt and npz.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        from tapscope.tensor_files.export import FORMATS

        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument("--to", choices=FORMATS, required=True, help="format of the files")
        parser.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="new or empty directory")
        add_pattern_flag(parser)
        add_selection_flags(parser)
        parser.add_argument("--json", action="store_true", help="one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Export the records and print a summary. Raises DataError if no record can be exported."""
        from tapscope.core.formatting import plural, size
        from tapscope.kernels.native import filled
        from tapscope.sources import open_run
        from tapscope.tensor_files.export import export_run

        path = with_pattern(args.path, args)
        with open_run(path) as run:
            records = select(run, args)
            if not records:
                raise DataError(f"{run.path} has no records to export")
            if args.to in _TABLES:
                records = filled(run, records)
            with diagnostics.progress(len(records), "exporting") as advance:
                done = export_run(run, records, args.to, args.out, advance)
            for problem in run.problems:
                diagnostics.warn(problem)
        if args.json:
            output.write_json({"type": "summary", "schema": SCHEMA, "to": args.to, **done.to_json()})
        else:
            values = plural(done.num_values, "record")
            files = plural(done.num_files, "file")
            output.write_line(f"exported   {values} to {files} in {args.out} ({size(done.nbytes)})")
        for sentence in done.notes():
            diagnostics.note(sentence)
        if not done.num_values:
            raise DataError(f"{path}: nothing was exported to {args.to}; {'; '.join(done.notes())}")
        if args.to == "wandb":
            diagnostics.note(f"next: wandb sync {shlex.quote(str(args.out))}/wandb/offline-run-*")
        elif args.to not in _TABLES:
            diagnostics.note(f"next: tapscope diff {shlex.quote(str(path))} {shlex.quote(str(args.out))}")
        return diagnostics.ExitCode.OK
