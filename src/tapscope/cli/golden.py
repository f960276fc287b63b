"""`tapscope golden`: store the sketches of a run in one small file and check later runs against it."""

import argparse
from pathlib import Path

from tapscope.cli import compare_flags, diagnostics, output
from tapscope.core.errors import OutputError, RunNotFoundError, UsageError
from tapscope.core.gc_control import gc_paused


class GoldenCommand:
    """Record layer outputs in a small file, and check later runs against it.

      $ tapscope dump MODEL -o run --keep sketch
      $ tapscope golden record run -o model.golden
      $ tapscope golden check model.golden other-run     exit 1 where they differ

    A sketch is a 1 KB summary of a tensor; the distance of two tensors is estimated from their sketches. A golden file
    has one for every output of a layer, of the head and of the model; --site, --skip and --layers select others.
    Runs captured with --keep sketch or --keep full can be recorded and checked. tapscope diff reads golden files too.

    Exit codes of check: 0 agree, 1 differ or partial data, 2 usage, 3 unreadable data or nothing to compare.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "action",
            choices=("record", "check"),
            metavar="ACTION",
            help="record: write a golden file; check: compare a run with one",
        )
        parser.add_argument("path", metavar="RUN|GOLDEN", help="record: the run; check: the golden file")
        parser.add_argument("target", metavar="RUN", nargs="?", help="check: the run under test")
        parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="record: the golden file to write")
        parser.add_argument("--force", action="store_true", help="record: replace an existing file")
        compare_flags.add_flags(parser)
        parser.add_argument(
            "--json", action="store_true", help="check: one JSON object per line, as tapscope diff prints"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Record or check."""
        return _record(args) if args.action == "record" else _check(args)


def _record(args: argparse.Namespace) -> int:
    from tapscope.core.formatting import size
    from tapscope.kernels.native.sketch import sketch_of
    from tapscope.run_format.golden import write_golden
    from tapscope.run_format.manifest import FORMAT
    from tapscope.sources import open_run

    if args.target is not None or args.out is None:
        raise UsageError("golden record takes one run and the file to write: tapscope golden record RUN -o FILE")
    for flag, value in {"--steps": args.steps, "--ranks": args.ranks, "--json": args.json}.items():
        if value:
            raise UsageError(f"{flag} applies to golden check; golden record takes --site, --skip and --layers")
    if args.out.exists() and not args.force:
        raise UsageError(f"{args.out} exists; --force replaces it")
    if not args.out.parent.is_dir():
        raise OutputError(f"cannot write {args.out}: no directory {args.out.parent}")
    with gc_paused(), open_run(args.path) as run:
        if run.manifest.get("format") != FORMAT or not run.path.is_dir():
            raise UsageError(f"{args.path} is not a tapscope run; record one with: tapscope dump MODEL -o RUN")
        chosen = None
        if args.site or args.skip or args.layers:
            sites = {
                r.key.site for r in run.select(args.site, skip=args.skip, layers=compare_flags.options_of(args).layers)
            }
            chosen = sites.__contains__
        try:
            count, nbytes = write_golden(run, args.out, chosen, sketch_of)
        except OSError as error:
            raise OutputError(f"cannot write {args.out}: {error.strerror or error}") from None
    diagnostics.note(f"recorded {count:,} sketches into {args.out}, {size(nbytes)}")
    diagnostics.note(f"next: tapscope golden check {args.out} RUN")
    return diagnostics.ExitCode.OK


def _check(args: argparse.Namespace) -> int:
    from tapscope.comparator import compare_open_runs
    from tapscope.comparator.report.answer import answer
    from tapscope.core.errors import RunCorruptError
    from tapscope.run_format.golden import is_golden
    from tapscope.sources import open_run

    if args.target is None or args.out is not None:
        raise UsageError("golden check takes a golden and a run: tapscope golden check FILE RUN")
    if not Path(args.path).exists():
        raise RunNotFoundError(f"no golden file at {args.path}; write one with: tapscope golden record RUN -o FILE")
    if not is_golden(Path(args.path)):
        if Path(args.target).is_file() and is_golden(Path(args.target)):
            raise UsageError(f"the golden file comes first: tapscope golden check {args.target} {args.path}")
        raise RunCorruptError(f"{args.path} is not a golden file; write one with: tapscope golden record RUN -o FILE")
    with gc_paused(), open_run(args.path) as golden, open_run(args.target) as target:
        report = compare_open_runs(golden, target, compare_flags.options_of(args)).report
    if args.json:
        for line in report.to_json(2):
            output.write_json(line)
    else:
        for sentence in answer(report):
            output.write_line(sentence)
    return report.exit_code
