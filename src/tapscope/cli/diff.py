"""`tapscope diff`: compare two runs."""

import argparse
from collections.abc import Sequence

from msgspec import structs

from tapscope.cli import compare_flags, diagnostics, output, report_files
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.comparator import CompareOptions, Comparison, Report, compare_open_runs
from tapscope.comparator.options.options import MAX_JOBS
from tapscope.comparator.report.table import TOP, render
from tapscope.core.errors import ConfigError
from tapscope.core.gc_control import gc_paused
from tapscope.core.site import Glob
from tapscope.run_format.directory import is_abandoned, may_grow
from tapscope.run_format.run import Run
from tapscope.sources import open_run


class DiffCommand:
    """Compare two runs and name the first module where they diverge.

      $ tapscope diff base target
      $ tapscope diff base target --layers 0-3 --skip '*:in[*]'
      $ tapscope diff base target --json | jq 'select(.type == "summary")'
      $ tapscope diff base target --html diff.html --junit diff.xml
      $ tapscope diff checkpoint-a checkpoint-b
      $ tapscope diff mine theirs --pattern 'step{step}/{name}.npz'

    Sites are matched by name, token rows by request and position; shards are joined according to their dims.
    Without --rtol or --atol, each error is judged against a noise floor, the error that rounding explains. So fp32
    can be compared with bf16. The last four lines of the output are the answer.

    Exit codes: 0 agree, 1 differ or partial data, 2 usage, 3 unreadable data or nothing to compare.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "baseline", metavar="BASELINE", help="reference run, dump, checkpoint or tensor files, or their URL"
        )
        parser.add_argument("target", metavar="TARGET", help="run under test")
        add_pattern_flag(parser)
        compare_flags.add_flags(parser)
        work = parser.add_argument_group("execution")
        where = work.add_mutually_exclusive_group()
        where.add_argument(
            "--jobs",
            metavar="N",
            type=_job_count,
            default=1,
            help="measure in N processes; the report is the same (default: 1, with threads for large tensors)",
        )
        where.add_argument(
            "--ray",
            metavar="ADDRESS",
            help="measure in tasks on a Ray cluster whose nodes see the same paths: auto, HOST:PORT or ray://HOST:PORT",
        )
        show = parser.add_argument_group("output")
        show.add_argument(
            "--top", metavar="N", type=compare_flags.row_count, default=TOP, help=f"rows to list (default: {TOP})"
        )
        show.add_argument("--all", action="store_true", help="one row per site, without folding")
        show.add_argument(
            "--explain-floor",
            metavar="SITE",
            action="append",
            default=[],
            help="list the effects that determine the noise floor of these sites, named as in the report "
            "(glob; repeatable)",
        )
        show.add_argument(
            "--sqnr",
            metavar="N",
            type=compare_flags.row_count,
            default=0,
            help="list the N module outputs with the lowest signal-to-quantization-noise ratio (dB), and their inputs'",
        )
        report_files.add_flags(show)
        show.add_argument("--json", action="store_true", help="one JSON object per line: header, findings, summary")
        show.add_argument(
            "--json-schema",
            type=int,
            choices=(1, 2),
            default=2,
            help="version of the JSON format (default: 2; 1 is deprecated)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Compare the runs, write the report files, print the result and return the exit code."""
        report_files.check(args)
        options = structs.replace(
            compare_flags.options_of(args), explain_floor=tuple(args.explain_floor), jobs=args.jobs, ray=args.ray
        )
        paths = with_pattern(args.baseline, args), with_pattern(args.target, args)
        with gc_paused(), open_run(paths[0]) as baseline, open_run(paths[1]) as target:
            comparison = _compare(baseline, target, options)
            report = comparison.report
            _check_explained(report, options.explain_floor)
            report_files.write(args, comparison, (baseline, target))
        if args.json:
            for line in report.to_json(args.json_schema):
                output.write_json(line)
        else:
            _print(report, None if args.all else args.top, args.sqnr)
        return report.exit_code


def _job_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= (value := int(text)) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"invalid number of processes {text!r}: expected 1 to {MAX_JOBS}")
    return value


def _compare(baseline: Run, target: Run, options: CompareOptions) -> Comparison:
    for path, run in {run.path: run for run in (baseline, target)}.items():
        if not run.closed and not is_abandoned(path):
            how = "is still being recorded" if may_grow(path) else "was never closed by its recorder"
            diagnostics.warn(f"{path} {how}; comparing the records written so far")
    with diagnostics.byte_progress("comparing") as advance:
        return compare_open_runs(baseline, target, options, advance)


def _check_explained(report: Report, globs: Sequence[str]) -> None:
    """Raise ConfigError for a ``--explain-floor`` glob that matches no site with a modeled noise floor."""
    explained = {finding.site for finding in report.findings if finding.floor_effects}
    for glob in globs:
        if any(map(Glob(glob).matches, explained)):
            continue
        known = next((f for f in report.findings if Glob(glob).matches(f.site)), None)
        if known is None:
            raise ConfigError(f"--explain-floor {glob} matches no compared site; tapscope ls lists the sites of a run")
        why = f"is {known.verdict}, judged by {known.judged_by}" if known.judged_by else f"is {known.verdict}"
        raise ConfigError(f"--explain-floor {glob}: {known.site} {why}, so it has no noise floor to explain")


def _print(report: Report, top: int | None, sqnr: int) -> None:
    lines = render(report, width=output.report_width(), top=top, wrap=output.is_terminal(), sqnr=sqnr)
    if output.is_plain():
        for line in lines:
            output.write_line(line.plain)
        return
    from rich.text import Text

    console = output.console()
    for line in lines:
        console.print(Text(line.plain, style=line.style), overflow="ignore", no_wrap=True, crop=False)
