"""`tapscope repair`: repair a run whose recorder was killed."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.cli import diagnostics, output

if TYPE_CHECKING:
    from tapscope.run_format.repair import Repair

SCHEMA = "tapscope.repair/1"


class RepairCommand:
    """Repair a run whose recorder was killed.

      $ tapscope repair base
      $ tapscope repair base --check    dry run; exit 1 if a repair is needed

    Completes the segments and cuts off an incomplete last line. No data is discarded: bytes of an incomplete line go
    to records.jsonl.torn, and payload bytes without a record become __orphan tensors of their segment. A run in
    progress is not touched.

    Exit codes: 0 repaired, 1 something could not be repaired, 2 usage, 3 not a run.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument("--check", action="store_true", help="dry run: report what would be repaired")
        parser.add_argument("--json", action="store_true", help="one JSON object per rank")

    def run(self, args: argparse.Namespace) -> int:
        """Repair the run and report the changes."""
        from tapscope.run_format.repair import repair_run

        done = repair_run(Path(args.path), check=args.check)
        for repair in done:
            if args.json:
                line = {"type": "rank", "schema": SCHEMA, "check": args.check, **repair.to_json()}
                output.write_json(line | {"needed": repair.needed})
            else:
                for sentence in _sentences(repair, args.check):
                    output.write_line(f"{f'rank {repair.rank}':<10} {sentence}")
        needed = any(repair.needed for repair in done)
        if not args.json and not needed and not any(repair.problems for repair in done):
            output.write_line("nothing to repair")
        if needed:
            diagnostics.note(f"next: tapscope {'repair' if args.check else 'verify'} {args.path}")
        bad = any(repair.problems for repair in done) or (args.check and needed)
        return diagnostics.ExitCode.DIFFERENT if bad else diagnostics.ExitCode.OK


def _sentences(repair: "Repair", check: bool) -> list[str]:
    from tapscope.core.formatting import plural

    would = "would be " if check else ""
    sentences = []
    if repair.torn_bytes:
        sentences.append(f"{plural(repair.torn_bytes, 'byte')} of a torn last line {would}moved to a side file")
    for name in repair.sealed:
        orphans = repair.orphans.get(name, 0)
        sentences.append(f"{name} {would}sealed" + (f", {orphans:,} bytes without a record" if orphans else ""))
    sentences += [f"{name} {would}removed: empty" for name in repair.removed]
    return sentences + [f"PROBLEM {problem}" for problem in repair.problems]
