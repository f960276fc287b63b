"""Parser: argparse with one-sentence errors and suggestions for misspelled flags."""

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
"""Flag names used by other tools, without dashes -> tapscope's flag; suggested only if the command has that flag."""
_EXPECTED = {"int": "expected an integer", "float": "expected a number"}


class Parser(argparse.ArgumentParser):
    """Argument parser of one command. An error raises UsageError with one sentence, without the usage text."""

    def __init__(self, name: str, description: str) -> None:
        """``description`` is the docstring of the command; examples begin with ``$``, tables with two spaces."""
        description = re.sub(r"^ {4}", "", description.rstrip(), flags=re.MULTILINE)
        super().__init__(
            prog=f"tapscope {name}",
            description=re.sub(r"^ *\$ ", "  $ ", description, flags=re.MULTILINE),
            epilog=_EPILOG,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse ``words``, flags and positionals in any order. Raises UsageError; ``--help`` raises SystemExit."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(self._unknown(unknown))
        return args

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's ``message``, plus suggestions."""
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
    """Help formatter with the width of the terminal; wraps prose but keeps indented examples unchanged.

    argparse creates a formatter per flag; its default would import shutil, which takes 2 ms.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=output.screen_width() - 2)

    def _format_usage(self, *args: Any) -> str:
        """Format the usage; unlike argparse before Python 3.13, also wrap inside a group of mutually exclusive
        flags."""
        lines = super()._format_usage(*args).split("\n")
        return "\n".join(self._wrap_group(line) if len(line) > self._width else line for line in lines)

    def _wrap_group(self, line: str) -> str:
        """Wrap ``line`` only after ``|``."""
        from textwrap import wrap  # imported lazily like in argparse: only help needs it

        indent, text = line[: -len(line.lstrip())], re.sub(r"(?<!\|) ", "\0", line.strip())
        wrapped = wrap(text, self._width, initial_indent=indent, subsequent_indent=f"{indent} ", break_on_hyphens=False)
        return "\n".join(wrapped).replace("\0", " ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill paragraphs: consecutive lines without indentation are one paragraph."""
        blocks: list[str] = []
        for is_prose, group in groupby(text.splitlines(), lambda line: bool(line) and not line.startswith(" ")):
            lines = list(group)
            blocks += [super()._fill_text(" ".join(lines), width, indent)] if is_prose else lines
        return "\n".join(blocks)
