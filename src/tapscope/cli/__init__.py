"""The `tapscope` command: composes the parts, and loads each only when it is used."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from tapscope._version import __version__
from tapscope.cli import diagnostics, output
from tapscope.cli.diagnostics import ExitCode
from tapscope.cli.parser import Parser
from tapscope.core.errors import TapscopeError
from tapscope.core.extras import extra_of
from tapscope.core.formatting import did_you_mean
from tapscope.core.gc_control import gc_paused


class Command(Protocol):
    """A verb: its docstring is its help."""

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's own flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the return value is the exit code."""
        ...


class _Verb(NamedTuple):
    group: str
    module: str
    cls: str
    summary: str


VERBS = {
    "dump": _Verb("capture", "dump", "DumpCommand", "run a model once and record its tensors"),
    "serve": _Verb("capture", "serve", "ServeCommand", "serve a model over HTTP, its taps steered at run time"),
    "ctl": _Verb(
        "capture", "ctl", "CtlCommand", "steer a running dumper: state, configure, capture, reset, sites, metrics"
    ),
    "bench": _Verb("measure", "bench", "BenchCommand", "measure a server under load, or the engine alone"),
    "info": _Verb("look", "info", "InfoCommand", "what a run holds, and what looks wrong in it"),
    "ls": _Verb("look", "ls", "LsCommand", "list records, one a line"),
    "show": _Verb("look", "show", "ShowCommand", "one tensor: statistics, histogram, values"),
    "view": _Verb("look", "view", "ViewCommand", "browse a run in the terminal"),
    "verify": _Verb("keep", "verify", "VerifyCommand", "what of a run is there, missing or damaged"),
    "repair": _Verb("keep", "repair", "RepairCommand", "make whole what a killed recorder left"),
    "compact": _Verb("keep", "compact", "CompactCommand", "turn the records of a run into Parquet"),
    "diff": _Verb("compare", "diff", "DiffCommand", "compare two runs; exit 1 where they differ"),
}

_HEAD = """tapscope: see inside a running model, and find the first tensor where two runs diverge

  $ tapscope dump MODEL -o base             capture a run
  $ tapscope diff base target               exit 1 where they differ
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code, see :class:`ExitCode`."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words[0] if words else "--help", words[1:])
    except TapscopeError as error:
        diagnostics.error(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if (extra := extra_of(error)) is None:
            raise
        diagnostics.error(f"{error.name} is not installed; install the extra: pip install 'tapscope[{extra}]'")
        return ExitCode.USAGE
    except PermissionError as error:
        diagnostics.error(f"{error.filename or 'a file'} cannot be read: {error.strerror}")
        return ExitCode.DATA
    except MemoryError:
        diagnostics.error("there is not enough memory for this; select less with --site, --steps or --ranks")
        return ExitCode.DATA
    except KeyboardInterrupt:
        diagnostics.error("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        output.abandon()
        return ExitCode.PIPE_CLOSED


def _dispatch(name: str, words: list[str]) -> int:
    if name in ("-h", "--help", "help", "--version"):
        output.write_lines(f"tapscope {__version__}" if name == "--version" else _help())
        output.flush()
        return ExitCode.OK
    verb = VERBS.get(name)
    if verb is None:
        diagnostics.error(f"{name!r} is no command{did_you_mean(name, VERBS)}; commands are {', '.join(VERBS)}")
        return ExitCode.USAGE
    with gc_paused():
        command: Command = getattr(import_module(f"{__name__}.{verb.module}"), verb.cls)()
    try:
        args = _parser(name, command).parse(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    output.configure(color=args.color)
    diagnostics.configure(quiet=args.quiet)
    code = command.run(args)
    output.flush()
    return code


def _parser(name: str, command: Command) -> Parser:
    parser = Parser(name, command.__doc__ or "")
    command.prepare(parser)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour (default: auto)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes on stderr, only errors")
    return parser


def _help() -> str:
    lines = [_HEAD]
    group = ""
    for name, verb in VERBS.items():
        lines.append(f"{verb.group if verb.group != group else '':<9} {name:<7} {verb.summary}")
        group = verb.group
    lines.append("\ntapscope COMMAND --help says more; tapscope --version says which this is.")
    return "\n".join(lines)
