"""Report files of `tapscope diff` and `tapscope show`: HTML, Markdown and JUnit XML."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.core import extras
from tapscope.core.errors import OutputError
from tapscope.core.regular_files import replacing

if TYPE_CHECKING:
    from tapscope.comparator import Comparison
    from tapscope.run_format.run import Run

_FORMATS = ("html", "markdown", "junit")


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for report files."""
    group.add_argument("--html", metavar="FILE", type=Path, help="also write a self-contained HTML report")
    group.add_argument("--markdown", metavar="FILE", type=Path, help="also write a pull-request comment")
    group.add_argument("--junit", metavar="FILE", type=Path, help="also write JUnit XML, one test case per site")


def check(args: argparse.Namespace) -> None:
    """Raise MissingExtraError or OutputError before the comparison starts if a report file could not be written."""
    if args.html is not None:
        extras.require("web", "--html")
    for name in _FORMATS:
        file: Path | None = getattr(args, name, None)
        if file is not None and not file.parent.is_dir():
            raise OutputError(f"cannot write {file}: no directory {file.parent}")


def write(args: argparse.Namespace, comparison: "Comparison", runs: "tuple[Run, Run]") -> None:
    """Write the requested report files; raises OutputError."""
    if all(getattr(args, name) is None for name in _FORMATS):
        return
    from tapscope.dashboard.model.diff import HashedSteps, diff_view

    equal_steps = HashedSteps.of(runs)
    if args.html is not None:
        from tapscope.dashboard.report.html import html_report

        save(args.html, html_report(comparison, runs, equal_steps=equal_steps, made=_now()))
    if args.markdown is None and args.junit is None:
        return
    num = len(comparison.report.findings)
    view = diff_view(comparison.report, runs, equal_steps=equal_steps, max_findings=max(num, 1), max_steps=60)
    if args.markdown is not None:
        from tapscope.dashboard.report.markdown import markdown_report

        save(args.markdown, markdown_report(view))
    if args.junit is not None:
        from tapscope.dashboard.report.junit import junit_report

        save(args.junit, junit_report(view))


def save(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` atomically; raises OutputError."""
    try:
        with replacing(file) as out:
            out.write(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from None


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
