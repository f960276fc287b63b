"""`tapscope view`: browse a run in the terminal."""

import argparse
import sys
from importlib.util import find_spec

from tapscope.errors import UsageError


class ViewCommand:
    """browse a run in the terminal: sites, records, statistics, values

    $ tapscope view base          ? shows the keys, q quits

    Keys can be changed with --key ID=KEYS, e.g. --key find=ctrl+f; the ids stand in the help (?).
    """

    name = "view"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", help="a run directory")
        parser.add_argument(
            "--theme", choices=("dark", "light", "ansi"), default="dark", help="colours (default: dark)"
        )
        parser.add_argument("--key", action="append", default=[], metavar="ID=KEYS", help="change a key (repeat)")

    def run(self, args: argparse.Namespace) -> int:
        """Open the browser; raises UsageError without a terminal or without Textual."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError(
                f"view needs a terminal; elsewhere use: tapscope info {args.path}, or tapscope ls {args.path}"
            )
        if find_spec("textual") is None:
            raise UsageError("view needs Textual; install it with: pip install 'tapscope[tui]'")
        from tapscope.dashboard.app import browse

        return browse(args.path, theme=args.theme, keys=args.key)
