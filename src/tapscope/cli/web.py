"""`tapscope web`: browse runs in a browser."""

import argparse
from pathlib import Path

from tapscope.cli import diagnostics, output
from tapscope.core import extras
from tapscope.core.errors import UsageError


class WebCommand:
    """Browse runs, tensors, comparisons and live runs in a browser.

      $ tapscope web runs                    prints a link that logs in once
      $ tapscope web base target
      $ tapscope web --benchmarks results    a benchmark history over commits

    The page reads the given runs and folders of runs, and nothing else. It loads nothing from other hosts. On an
    address other than loopback a password is required, from --password-file or TAPSCOPE_WEB_PASSWORD.
    """

    name = "web"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help="a run, or a folder of runs")
        parser.add_argument(
            "--benchmarks",
            metavar="DIR",
            type=Path,
            action="append",
            default=[],
            help="also show the benchmark results below DIR: JSON of tapscope bench, SGLang or vLLM; repeatable",
        )
        parser.add_argument(
            "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="address (default 127.0.0.1:0, any free port)"
        )
        parser.add_argument("--password-file", metavar="FILE", type=Path, help="file whose first line is the password")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until it is interrupted."""
        if not args.paths and not args.benchmarks:
            raise UsageError("tapscope web: missing argument: PATH, or --benchmarks DIR; see: tapscope web --help")
        extras.require("web", "tapscope web")
        from tapscope.dashboard.web.login import read_password
        from tapscope.dashboard.web.server import serve

        def announce(link: str) -> None:
            output.write_line(link)
            output.flush()
            diagnostics.note("open the link in a browser; Ctrl-C ends the server")

        return serve(args.paths, args.listen, read_password(args.password_file), announce, benchmarks=args.benchmarks)
