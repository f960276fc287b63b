"""The manual page tapscope(1), generated from the help of the commands."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from tapscope._version import __version__
from tapscope.cli.diagnostics import ExitCode

EXIT_CODES = {
    ExitCode.OK: "success; the runs agree",
    ExitCode.DIFFERENT: "the runs differ, or a check failed",
    ExitCode.USAGE: "invalid usage, or a missing package",
    ExitCode.DATA: "missing, damaged or incompatible data",
    ExitCode.LIVE: "a server or recorder did not respond, or requests failed",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.PIPE_CLOSED: "the reader of the output closed the pipe",
}


class Verb(Protocol):
    """Entry of a command in the command list."""

    @property
    def summary(self) -> str:
        """One-line description of the command."""
        ...


def man_page(verbs: Mapping[str, Verb], parser_of: Callable[[str], argparse.ArgumentParser]) -> str:
    """Return the page in roff, with a section per command for its description and options."""
    lines = [
        f'.TH TAPSCOPE 1 "" "tapscope {__version__}" "User Commands"',
        ".SH NAME",
        r"tapscope \- see inside a running model, and find the first tensor where two runs diverge",
        ".SH SYNOPSIS",
        r".B tapscope",
        r".I COMMAND",
        "[arguments]",
        ".SH DESCRIPTION",
        "Standard output is data; notes, warnings and errors go to standard error.",
        ".SH COMMANDS",
    ]
    for name, verb in verbs.items():
        lines += [".TP", rf"\fB{_escaped(name)}\fR", _escaped(verb.summary)]
    for name in verbs:
        lines += _command(name, parser_of(name))
    lines += [".SH EXIT STATUS", *_table((str(int(code)), text) for code, text in EXIT_CODES.items())]
    return "\n".join(lines)


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f".SH {_escaped(name.upper())}"
    usage = " ".join(parser.format_usage().removeprefix("usage:").split())
    yield f".B {_escaped(usage)}"
    for paragraph in re.split(r"\n\s*\n", parser.description or ""):
        is_example = paragraph.lstrip().startswith("$")
        yield from (".PP", *([".nf"] if is_example else ()))
        yield from (_escaped(line if is_example else line.strip()) for line in paragraph.strip("\n").split("\n"))
        yield from ([".fi"] if is_example else ())
    options = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    yield from _table((_option(action), _help(action)) for action in options)


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in rows:
        yield from (".TP", rf"\fB{_escaped(term)}\fR", _escaped(text))


def _option(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _help(action: argparse.Action) -> str:
    return " ".join((action.help or "").replace("%%", "%").split())


def _escaped(text: str) -> str:
    """Escape ``text`` for roff."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = re.sub(r"[^\x00-\x7f]", lambda match: rf"\[u{ord(match[0]):04X}]", text)
    return rf"\&{text}" if text.startswith((".", "'")) else text
