"""`tapscope compact`: convert the records of a run to Parquet."""

import argparse
from pathlib import Path

from tapscope.cli import diagnostics, output

SCHEMA = "tapscope.compact/1"


class CompactCommand:
    """Convert the record lines of a finished run to Parquet tables.

      $ tapscope compact base

    The run reads the same as before, is smaller and opens faster; payloads do not change. The lines are removed only
    after the table has been read back and compared with them. A run that is being recorded is not touched.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument("--json", action="store_true", help="one JSON object per rank")

    def run(self, args: argparse.Namespace) -> int:
        """Compact the run and print the space saved."""
        from tapscope.core.formatting import plural, size
        from tapscope.run_format.compact import compact_run
        from tapscope.run_format.manifest import rank_dirs

        path = Path(args.path)
        with diagnostics.progress(len(rank_dirs(path)), "compacting") as advance:
            done = compact_run(path, advance=advance)
        for one in done:
            if args.json:
                output.write_json({"type": "rank", "schema": SCHEMA, **one.to_json()})
            else:
                saved = f"{size(one.bytes_before)} -> {size(one.bytes_after)}"
                output.write_line(f"{f'rank {one.rank}':<10} {plural(one.num_records, 'record')}: {saved}")
        if not done:
            diagnostics.note(f"nothing to compact: {path} has no record lines")
        return diagnostics.ExitCode.OK
