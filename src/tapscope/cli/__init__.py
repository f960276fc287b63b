"""The `tapscope` command. Subcommands are imported lazily."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from tapscope._version import __version__
from tapscope.cli import completion, diagnostics, output, project_settings
from tapscope.cli.diagnostics import ExitCode
from tapscope.cli.parser import Parser
from tapscope.cli.project_settings import ProjectSettings
from tapscope.core.errors import ConfigError, TapscopeError, UsageError
from tapscope.core.extras import extra_of
from tapscope.core.formatting import did_you_mean
from tapscope.core.gc_control import gc_paused


class Command(Protocol):
    """Interface of a subcommand; the class docstring is the text of its ``--help``."""

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments to ``parser``."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit code."""
        ...


class _Verb(NamedTuple):
    group: str
    module: str
    cls: str
    summary: str


VERBS = {
    "dump": _Verb("capture", "dump", "DumpCommand", "run a model once and record its tensors"),
    "serve": _Verb("capture", "serve", "ServeCommand", "serve a model over HTTP and capture at run time"),
    "ctl": _Verb("capture", "ctl", "CtlCommand", "control a running dumper: configure, capture, ..."),
    "bench": _Verb("measure", "bench", "BenchCommand", "measure a server under load, or the engine alone"),
    "info": _Verb("inspect", "info", "InfoCommand", "summarize a run and report anomalies"),
    "ls": _Verb("inspect", "ls", "LsCommand", "list records, one per line"),
    "show": _Verb("inspect", "show", "ShowCommand", "show one tensor: statistics, histogram, values"),
    "view": _Verb("inspect", "view", "ViewCommand", "browse one run, or two side by side, in the terminal"),
    "web": _Verb("inspect", "web", "WebCommand", "browse runs and comparisons in a browser"),
    "verify": _Verb("maintain", "verify", "VerifyCommand", "check a run for missing or corrupt data"),
    "repair": _Verb("maintain", "repair", "RepairCommand", "repair a run whose recorder was killed"),
    "compact": _Verb("maintain", "compact", "CompactCommand", "convert the records of a run to Parquet"),
    "export": _Verb("maintain", "export", "ExportCommand", "export records to SGLang, .npz, .pt or .csv files"),
    "convert": _Verb("maintain", "convert", "ConvertCommand", "quantize a checkpoint to FP8, int8 or int4"),
    "diff": _Verb("compare", "diff", "DiffCommand", "compare two runs; exit 1 where they differ"),
    "map": _Verb("compare", "map", "MapCommand", "propose a map file for two runs whose names differ"),
    "mismatch": _Verb("compare", "mismatch", "MismatchCommand", "compare log-probabilities of a trainer and a rollout"),
    "check-determinism": _Verb(
        "compare", "check_determinism", "CheckDeterminismCommand", "run the same steps twice and compare bit for bit"
    ),
    "replay": _Verb("compare", "replay", "ReplayCommand", "separate a module's own error from inherited error"),
    "golden": _Verb("compare", "golden", "GoldenCommand", "record a run in a small file, and check later runs"),
    "bisect": _Verb("compare", "bisect", "BisectCommand", "find the modules that make two models differ"),
    "completion": _Verb("shell", "completion", "CompletionCommand", "print shell completion or the manual page"),
}

_SYNONYMS = {
    "compare": "diff",
    "capture": "dump",
    "record": "dump",
    "list": "ls",
    "open": "view",
    "man": "completion man",
}
"""Command names used by other tools -> the corresponding tapscope command."""

_HEAD = """See inside a running model, and find the first tensor where two runs diverge.

  $ tapscope dump MODEL -o base             capture a run
  $ tapscope diff base target               exit 1 where they differ
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code, see :class:`ExitCode`. ``argv`` defaults to ``sys.argv[1:]``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and completion.REQUEST in os.environ:
        completion.complete(VERBS, parser_of)
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
        diagnostics.error(f"cannot read {error.filename or 'a file'}: {error.strerror}")
        return ExitCode.DATA
    except MemoryError:
        diagnostics.error("out of memory; select less with --site, --steps or --ranks")
        return ExitCode.DATA
    except KeyboardInterrupt:
        diagnostics.error("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        output.abandon()
        return ExitCode.PIPE_CLOSED


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the argument parser of the command ``name``."""
    return _parser(name, _command(name))


def _dispatch(name: str, words: list[str]) -> int:
    if name in ("-h", "--help", "help", "--version"):
        output.write_lines(f"tapscope {__version__}" if name == "--version" else _help())
        output.flush()
        return ExitCode.OK
    if name not in VERBS:
        hint = did_you_mean(name, VERBS, _SYNONYMS)
        diagnostics.error(f"unknown command {name!r}{hint}; commands: {', '.join(VERBS)}")
        return ExitCode.USAGE
    command = _command(name)
    try:
        args, settings = _parse(name, command, words)
    except SystemExit as stop:
        return int(stop.code or 0)
    output.configure(color=args.color)
    diagnostics.configure(quiet=args.quiet)
    if settings is not None:
        diagnostics.note(f"options of {settings.file} [{settings.table}]: {shlex.join(settings.words)}")
    code = command.run(args)
    output.flush()
    return code


def _command(name: str) -> Command:
    with gc_paused():
        command: Command = getattr(import_module(f"{__name__}.{VERBS[name].module}"), VERBS[name].cls)()
    return command


def _parse(name: str, command: Command, words: list[str]) -> tuple[argparse.Namespace, ProjectSettings | None]:
    """Parse the options of the project file followed by those of the command line."""
    parser = _parser(name, command)
    settings = project_settings.read(name, VERBS, parser)
    if settings is None:
        return parser.parse(words), None
    try:
        return parser.parse([*settings.words, *words]), settings
    except UsageError as error:
        parser.parse(words)  # raises if the command line alone is invalid
        raise ConfigError(f"{settings.file}: [{settings.table}]: {error}") from None


def _parser(name: str, command: Command) -> Parser:
    parser = Parser(name, command.__doc__ or "")
    command.prepare(parser)
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colored output (default: auto)"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only warnings and errors on stderr")
    return parser


def _help() -> str:
    lines = [_HEAD]
    width, group = max(map(len, VERBS)), ""
    for name, verb in VERBS.items():
        lines.append(f"{verb.group if verb.group != group else '':<9} {name:<{width}} {verb.summary}")
        group = verb.group
    lines.append("\nOptions of a command: tapscope COMMAND --help. Version: tapscope --version.")
    return "\n".join(lines)
