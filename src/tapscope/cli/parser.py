"""Parser: how a command line is read, and what is said where it cannot be meant."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tapscope.cli import output
from tapscope.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Of one verb. A wrong line raises UsageError: one sentence, without the whole usage in front of it."""

    def __init__(self, name: str, told: str) -> None:
        """``told``: what the verb does, with examples that begin with ``$``."""
        told = re.sub(r"^ +", "", told.rstrip(), flags=re.MULTILINE)
        super().__init__(
            prog=f"tapscope {name}",
            description=re.sub(r"^\$ ", "  $ ", told, flags=re.MULTILINE),
            epilog="docs: README.md; docs/dumper.md, engine.md, comparator.md, format.md, architecture.md",
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
        message = message.replace("the following arguments are required:", f"{self.prog} lacks")
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if flag is None:
            return f"{self.prog} takes no more words, but there is {words[0]!r}"
        return f"{flag} is no flag of {self.prog}{meant(flag, self._option_string_actions)}"


def meant(word: str, known: Iterable[str]) -> str:
    """`` (did you mean diff?)`` where a known word is near, else nothing."""
    import difflib  # takes a while, and few lines are wrong

    near = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the screen: argparse makes one for every flag, and each would ask shutil, which takes 2 ms to load."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=output.screen_width() - 2)
