"""`tapscope view`: browse a run in the terminal."""

import argparse
import re
import shlex
import sys
from pathlib import Path

from tapscope.cli import compare_flags, output
from tapscope.cli.ctl import control_of
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.core import extras
from tapscope.core.errors import UsageError


class ViewCommand:
    """Browse a run in the terminal, or two runs side by side.

      $ tapscope view base          sites, records, statistics, values
      $ tapscope view base target   layers × steps, findings, values of both runs
      $ tapscope view --live run    steps, rates and metrics of a run in progress
      $ tapscope view base --at 'base/layers.3.mlp:out@0.0[5,17]'

    Press ? for the keys and q to quit. With two runs, the options of diff apply. Change a key with --key ID=KEYS,
    e.g. --key find=ctrl+f; the help (?) lists the ids.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory; the baseline of two")
        parser.add_argument("target", metavar="TARGET", nargs="?", help="run under test")
        parser.add_argument(
            "--theme", choices=("dark", "light", "ansi"), default="dark", help="color theme (default: dark)"
        )
        parser.add_argument(
            "--at", metavar="LINK", help="open at a link of a report, such as run/SITE@STEP.RANK or run/SITE@0.0[5,17]"
        )
        parser.add_argument(
            "--live",
            action="store_true",
            help="begin at the live screen; RUN may be the [HOST:]PORT of a job's control API on this machine",
        )
        parser.add_argument("--key", action="append", default=[], metavar="ID=KEYS", help="change a key (repeatable)")
        parser.add_argument(
            "--control",
            metavar="[HOST:]PORT|RUN",
            help="let key C switch capture of this live job; its token is read from TAPSCOPE_CONTROL_TOKEN",
        )
        add_pattern_flag(parser)
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Open the browser; raises UsageError without a terminal, MissingExtraError without Textual."""
        if args.target is None and (flags := compare_flags.changed_flags(args)):
            raise UsageError(f"{flags[0]} applies to two runs; use: tapscope view {args.path} TARGET {flags[0]} ...")
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError(f"view requires a terminal; without one, use: tapscope {_without_terminal(args)}")
        extras.require("tui", "tapscope view")
        if not sys.stderr.isatty():  # Textual draws on stderr
            raise UsageError("view draws on stderr, which is redirected; start it without 2>")
        from tapscope.dashboard.app import browse, diff
        from tapscope.dashboard.capture_control import CaptureControl
        from tapscope.dashboard.model.permalink import parse_permalink
        from tapscope.remote import path_of

        if args.live and args.target is not None:
            raise UsageError("--live applies to one run; use: tapscope view --live RUN")
        if not args.live and args.target is None and _is_address(args.path):
            raise UsageError(
                f"{args.path} is not a run; to follow the job at this address: tapscope view --live {args.path}"
            )
        if args.live and _is_address(args.path):
            args.control = args.control or args.path
            args.path = _run_of(args.path)
        at = None if args.at is None else parse_permalink(args.at)
        output.settle_environment()
        path = path_of(with_pattern(args.path, args))
        if args.target is not None:
            target = path_of(with_pattern(args.target, args))
            return diff(path, target, compare_flags.options_of(args), theme=args.theme, keys=args.key, at=at)
        control = None if args.control is None else CaptureControl(control_of(args.control))
        return browse(path, theme=args.theme, keys=args.key, at=at, control=control, live=args.live)


def _is_address(path: str) -> bool:
    return re.fullmatch(r"([^/]*:)?\d{1,5}", path) is not None and not Path(path).is_dir()


def _without_terminal(args: argparse.Namespace) -> str:
    """Return the command that prints equivalent information without a terminal."""
    if args.target:
        return shlex.join(["diff", args.path, args.target])
    if args.live or _is_address(args.path):
        return shlex.join(["ctl", args.path, "state", "--table"])
    return f"{shlex.join(['info', args.path])}, or tapscope {shlex.join(['ls', args.path])}"


def _run_of(address: str) -> str:
    """Return the run directory recorded by a live job; raises UsageError if it is not on this machine."""
    from tapscope.dashboard.capture_control import CaptureControl

    run = CaptureControl(control_of(address)).state().run
    if not Path(run).is_dir():
        raise UsageError(f"{address} records {run}, which is not on this machine; use tapscope web where it is")
    return run
