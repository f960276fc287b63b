"""Parser: argparse with one-sentence errors and suggestions for mistyped flags."""

import argparse
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NoReturn

from tapscope.cli import output
from tapscope.core.errors import UsageError
from tapscope.core.formatting import did_you_mean

_EPILOG = "See also: tapscope --help for all commands; README.md and docs/ for examples."
_SYNONYMS = {"tolerance": "--rtol or --atol", "tol": "--rtol or --atol", "threshold": "--rtol, --atol or --rule"}
_SYNONYMS |= {"output": "--out", "rank": "--ranks", "step": "--steps", "layer": "--layers", "filter": "--site"}
_SYNONYMS |= {
    "host": "--listen",
    "port": "--listen",
    "n": "--limit",
    "head": "--limit",
    "max-tokens": "--max-new-tokens",
}
_SYNONYMS |= {"tensor-parallel-size": "--tp", "tp-size": "--tp", "data-parallel-size": "--dp", "dp-size": "--dp"}
"""Names of flags in other tools, without dashes -> ours; suggested only where the command has the flag."""
_EXPECTED = {"int": "expected an integer", "float": "expected a number"}


class Parser(argparse.ArgumentParser):
    """The parser of one command. Errors are a UsageError of one sentence, without the usage text."""

    def __init__(self, name: str, description: str) -> None:
        """``description``: the docstring of the command; its examples begin with ``$``, its tables with two spaces."""
        description = re.sub(r"^ {4}", "", description.rstrip(), flags=re.MULTILINE)
        super().__init__(
            prog=f"tapscope {name}",
            description=re.sub(r"^ *\$ ", "  $ ", description, flags=re.MULTILINE),
            epilog=_EPILOG,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse ``words``, flags and positionals in any order. Raises UsageError, and SystemExit for ``--help``."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(self._unknown(unknown))
        return args

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a UsageError."""
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        message = re.sub(
            r"invalid (int|float) value: ('.*')", lambda m: f"invalid value {m[2]}: {_EXPECTED[m[1]]}", message
        )
        head, required, names = message.partition("the following arguments are required: ")
        if required:  # argparse also names positionals that may be empty
            optional = {str(action.metavar) for action in self._actions if action.nargs == "*"}
            missing = [name for name in names.split(", ") if name not in optional]
            message = f"{head}{self.prog}: missing argument: {', '.join(missing)}"
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            return f"{self.prog}: unexpected argument {words[0]!r}"
        return f"{self.prog}: unknown option {flag}{did_you_mean(flag, self._option_string_actions, _SYNONYMS)}"


class _Formatter(argparse.HelpFormatter):
    """As wide as the terminal; wraps prose and leaves examples, which are indented, as they are.

    Argparse creates one per flag and would import shutil, which takes 2 ms.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=output.screen_width() - 2)

    def _format_usage(self, *args: Any) -> str:
        """Wraps also within a group of exclusive flags, which argparse leaves on one line (Python before 3.13)."""
        lines = super()._format_usage(*args).split("\n")
        return "\n".join(self._wrap_group(line) if len(line) > self._width else line for line in lines)

    def _wrap_group(self, line: str) -> str:
        """Breaks after ``|`` only."""
        from textwrap import wrap  # as argparse, only where help is printed

        indent, text = line[: -len(line.lstrip())], re.sub(r"(?<!\|) ", "\0", line.strip())
        wrapped = wrap(text, self._width, initial_indent=indent, subsequent_indent=f"{indent} ", break_on_hyphens=False)
        return "\n".join(wrapped).replace("\0", " ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Consecutive lines without indentation are one paragraph."""
        blocks: list[str] = []
        for is_prose, group in groupby(text.splitlines(), lambda line: bool(line) and not line.startswith(" ")):
            lines = list(group)
            blocks += [super()._fill_text(" ".join(lines), width, indent)] if is_prose else lines
        return "\n".join(blocks)
