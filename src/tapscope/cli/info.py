"""`tapscope info`: summarize a run, and report anomalies."""

import argparse
import shlex
from typing import TYPE_CHECKING

from tapscope.cli import diagnostics, output
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.core.errors import UsageError

if TYPE_CHECKING:
    from tapscope.render.run_report import RunReport

SCHEMA = "tapscope.info/2"


class InfoCommand:
    """Summarize a run and report anomalies.

    $ tapscope info base              exit 1: anomalies or missing data
    $ tapscope info base --verify     read every payload and check its hash
    $ tapscope info --env             versions and kernels, for a bug report
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", nargs="?", help="a run directory")
        add_pattern_flag(parser)
        parser.add_argument(
            "--verify", action="store_true", help="read every payload and check its hash; exit 3 if corrupt"
        )
        parser.add_argument("--env", action="store_true", help="print versions and kernels instead")
        parser.add_argument("--json", action="store_true", help="one JSON object per line")

    def run(self, args: argparse.Namespace) -> int:
        """Print the report of the run, or the environment with ``--env``."""
        if args.env:
            return _print_environment(args.json)
        if args.path is None:
            raise UsageError("missing argument RUN; use: tapscope info RUN, or tapscope info --env")
        from tapscope.cli.verify import payload_sentence, report_of
        from tapscope.kernels.native import filled
        from tapscope.render.run_report import run_report
        from tapscope.sources import open_run

        path = with_pattern(args.path, args)
        with open_run(path) as run:
            run.records = filled(run, run.records)
            account = run_report(run)
            report = report_of(run) if args.verify else None
            damage = [str(one) for one in report.damaged] if report else []
            if args.json:
                _print_json(account, damage, args.verify)
            else:
                _print_text(account)
                for sentence in damage:
                    output.write_line(f"corrupt    {sentence}")
                if report and not damage:
                    output.write_line(f"verified   {payload_sentence(report)}")
        if not args.json and account.num_records:
            diagnostics.note(f"next: tapscope view {shlex.quote(path)}")
        if damage:
            return diagnostics.ExitCode.DATA
        return diagnostics.ExitCode.OK if account.fine else diagnostics.ExitCode.DIFFERENT


def _print_environment(as_json: bool) -> int:
    from tapscope.cli.environment import environment

    facts = environment()
    if as_json:
        output.write_json({"type": "environment", "schema": SCHEMA, **facts})
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            output.write_line(f"{name:<{width}}  {value}")
    return diagnostics.ExitCode.OK


def _print_json(account: "RunReport", damage: list[str], verified: bool) -> None:
    output.write_json({"type": "run", "schema": SCHEMA, **account.facts()})
    for kind, items in (("metric", account.metrics), ("event", account.events), ("anomaly", account.anomalies)):
        for item in items:
            output.write_json({"type": kind, "schema": SCHEMA, **item.to_json()})
    summary = {"complete": account.complete, "anomalous_sites": len(account.anomalies), "missing": account.missing}
    if verified:
        summary["damaged"] = damage
    output.write_json({"type": "summary", "schema": SCHEMA, **summary})


def _print_text(account: "RunReport") -> None:
    for name, lines in account.sections():
        for i, line in enumerate(lines):
            output.write_line(f"{'' if i else name:<10} {line}")
