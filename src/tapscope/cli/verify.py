"""`tapscope verify`: check a run for missing or corrupt data."""

import argparse
from typing import TYPE_CHECKING

from tapscope.cli import diagnostics, output

if TYPE_CHECKING:
    from tapscope.run_format.run import Run
    from tapscope.run_format.verify import RankReport, Report

SCHEMA = "tapscope.verify/1"
_MAX_DAMAGED = 5
_SLOW_BYTES = 4_000_000_000  # reading more takes several seconds


class VerifyCommand:
    """Check a run for missing or corrupt data.

      $ tapscope verify base
      $ tapscope verify base --json    one object per line, every corrupt record

    Reads every payload and compares its hash with the recorded one.

    Exit codes: 0 complete, 1 missing or corrupt data, 2 usage, 3 not a run.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument(
            "--json", action="store_true", help="one JSON object per line, listing every corrupt record"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Verify the run and print the report."""
        from tapscope.sources import open_run

        with open_run(args.path) as run:
            report = report_of(run)
        (_print_json if args.json else _print_text)(report)
        if report.is_in_progress:
            diagnostics.note(f"{args.path} is still being recorded; verify it again when its recorder has ended")
        elif not report.complete and any(rank.unsealed for rank in report.ranks):
            diagnostics.note(f"next: tapscope repair {args.path}")
        return diagnostics.ExitCode.OK if report.complete else diagnostics.ExitCode.DIFFERENT


def report_of(run: "Run") -> "Report":
    """Verify an open run with the native hash and a progress bar; returns the report."""
    from tapscope.core.formatting import size
    from tapscope.kernels.native import digest_of
    from tapscope.run_format.verify import verify_run

    total = int(run.records.nbytes.sum())
    if total > _SLOW_BYTES:
        diagnostics.note(f"reading {size(total)} of payloads")
    with diagnostics.progress(total, "verifying") as advance:
        return verify_run(run, digest_of, advance)


def payload_sentence(report: "Report") -> str:
    """Summarize how many payloads were read and compared."""
    kept = sum(rank.num_with_values for rank in report.ranks)
    sketches = sum(rank.num_sketches for rank in report.ranks)
    hashed = sum(rank.num_hashed for rank in report.ranks)
    summed = sum(rank.num_summed for rank in report.ranks)
    rest = kept - hashed - summed
    bad = len(report.damaged)
    if bad:
        return f"{bad:,} of {kept + sketches:,} payloads are missing or corrupt"
    sentences = [f"{hashed:,} payloads match their recorded hash"] if hashed or not (summed or sketches or rest) else []
    sentences += [f"{sketches:,} sketches match their recorded CRC-32"] if sketches else []
    sentences += [f"{summed:,} payloads match the CRC-32 of their file"] if summed else []
    sentences += [f"{rest:,} payloads could be read; they have no recorded hash"] if rest else []
    return "; ".join(sentences)


def _print_json(report: "Report") -> None:
    output.write_json({"type": "run", "schema": SCHEMA, "run": str(report.path), "ranks": len(report.ranks)})
    for rank in report.ranks:
        output.write_json({"type": "rank", "schema": SCHEMA, **rank.to_json()})
    for damage in report.damaged:
        output.write_json({"type": "damage", "schema": SCHEMA, **damage.to_json()})
    summary = {"complete": report.complete, "missing": report.sentences(), "num_damaged": len(report.damaged)}
    output.write_json({"type": "summary", "schema": SCHEMA, **summary})


def _print_text(report: "Report") -> None:
    output.write_line(f"run        {report.path}")
    for rank in report.ranks:
        output.write_line(f"{f'rank {rank.rank}':<10} {_counts(rank)}")
    output.write_line(f"payloads   {payload_sentence(report)}")
    for damage in report.damaged[:_MAX_DAMAGED]:
        output.write_line(f"corrupt    {damage}")
    if len(report.damaged) > _MAX_DAMAGED:
        output.write_line(f"           and {len(report.damaged) - _MAX_DAMAGED:,} more; --json lists all")
    for sentence in report.sentences():
        output.write_line(f"{'note' if report.complete else 'missing':<10} {sentence}")
    output.write_line(f"complete   {'yes' if report.complete else 'NO'}")


def _counts(rank: "RankReport") -> str:
    from tapscope.core.formatting import size

    ledger = rank.ledger
    counts = f"{ledger.seen:,} seen, {ledger.dropped:,} dropped, {ledger.failed:,} failed, {ledger.lost:,} lost"
    sketches = f", {rank.num_sketches:,} with sketches" if rank.num_sketches else ""
    kept = f"{rank.num_records:,} records, {rank.num_with_values:,} with values{sketches} ({size(rank.nbytes)})"
    return f"{counts}; on disk {kept}"
