"""`tapscope web`: browse runs in a browser."""

import argparse
import re
from pathlib import Path

from tapscope.cli import diagnostics, output
from tapscope.cli.ctl import control_of
from tapscope.core import extras
from tapscope.core.errors import UsageError

_MAX_LINK_S = 30 * 86400


class WebCommand:
    """Browse runs, tensors, comparisons and live runs in a browser.

      $ tapscope web runs                    prints a link that logs in once
      $ tapscope web base target
      $ tapscope web --benchmarks results    a benchmark history over commits

    The page is read-only, except with --control. It reads the given runs and folders of runs, and nothing else. It
    loads nothing from other hosts. On an address other than loopback a password is required, from --password-file or
    TAPSCOPE_WEB_PASSWORD.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help="a run, or a folder of runs")
        parser.add_argument(
            "--benchmarks",
            metavar="DIR",
            type=Path,
            action="append",
            default=[],
            help="also show the benchmark results below DIR: JSON of 'tapscope bench', SGLang or vLLM; repeatable",
        )
        parser.add_argument(
            "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="address (default: 127.0.0.1:0, any free port)"
        )
        parser.add_argument(
            "--control",
            metavar="[HOST:]PORT|RUN",
            help="let the page switch capture of this live job; its token is read from TAPSCOPE_CONTROL_TOKEN",
        )
        parser.add_argument(
            "--read-only-link",
            metavar="TIME",
            help="also print a link for sharing, which anybody can use until it expires, e.g. 30m, 8h, 2d",
        )
        parser.add_argument("--password-file", metavar="FILE", type=Path, help="file whose first line is the password")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until interrupted."""
        if not args.paths and not args.benchmarks:
            raise UsageError("tapscope web: missing argument: PATH, or --benchmarks DIR; see: tapscope web --help")
        extras.require("web", "tapscope web")
        from tapscope.dashboard.capture_control import CaptureControl
        from tapscope.dashboard.web.login import read_password
        from tapscope.dashboard.web.roots import Roots
        from tapscope.dashboard.web.server import serve

        roots = Roots(args.paths)
        announced: list[str] = []
        shared_s = 0.0 if args.read_only_link is None else _seconds(args.read_only_link)

        def announce(link: str) -> None:
            output.write_line(link)
            output.flush()
            if not announced:
                diagnostics.note("open the link in a browser; Ctrl-C ends the server")
                if args.paths and not roots.paths():
                    where = ", ".join(map(str, args.paths))
                    diagnostics.note(f"no tapscope run in {where} yet; Refresh on the page lists new ones")
            else:
                diagnostics.note(f"the second link is read-only and expires in {args.read_only_link}")
            announced.append(link)

        control = None if args.control is None else CaptureControl(control_of(args.control))
        return serve(
            roots,
            args.listen,
            read_password(args.password_file),
            announce,
            benchmarks=args.benchmarks,
            control=control,
            read_only_link_s=shared_s,
        )


def _seconds(text: str) -> float:
    """Parse a duration such as ``30m``, ``8h`` or ``2d`` to seconds; raises UsageError."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0
    if not 1 <= seconds <= _MAX_LINK_S:
        raise UsageError(f"invalid --read-only-link {text!r}: expected a time from 1s to 30d, such as 30m, 8h or 2d")
    return float(seconds)
