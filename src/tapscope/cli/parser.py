"""Parser: how a command line is read, and what is said where it cannot be meant."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from tapscope.cli import output
from tapscope.core.errors import UsageError
from tapscope.core.formatting import did_you_mean

_EPILOG = "all commands: tapscope --help; examples and reference: README.md and docs/ in the source repository"
_SYNONYMS = {"tolerance": "--rtol or --atol", "tol": "--rtol or --atol", "threshold": "--rtol, --atol or --rule"}
_SYNONYMS |= {"output": "--out", "rank": "--ranks", "step": "--steps", "layer": "--layers", "filter": "--site"}
"""What other tools call a flag, without dashes -> ours; offered only where the command has it."""


class Parser(argparse.ArgumentParser):
    """Of one verb. A wrong line raises UsageError: one sentence, without the whole usage in front of it."""

    def __init__(self, name: str, told: str) -> None:
        """``told``: what the verb does, with examples that begin with ``$``."""
        told = re.sub(r"^ +", "", told.rstrip(), flags=re.MULTILINE)
        super().__init__(
            prog=f"tapscope {name}",
            description=re.sub(r"^\$ ", "  $ ", told, flags=re.MULTILINE),
            epilog=_EPILOG,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Flags may stand among the words; raises UsageError, and SystemExit for ``--help``."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(self._unknown(unknown))
        return args

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for what argparse has to say."""
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        message = message.replace("the following arguments are required:", f"{self.prog} lacks")
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            return f"{self.prog} takes no more words, but there is {words[0]!r}"
        other = _SYNONYMS.get(flag.lstrip("-"), "")
        if other.partition(" ")[0].rstrip(",") in self._option_string_actions:
            return f"{self.prog} has no option {flag} (did you mean {other}?)"
        return f"{self.prog} has no option {flag}{did_you_mean(flag, self._option_string_actions)}"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the screen: argparse makes one for every flag, and each would ask shutil, which takes 2 ms to load."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=output.screen_width() - 2)
