"""`tapscope completion`: shell completion (through argcomplete) and the manual page."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping

from tapscope.cli import output

REQUEST = "_ARGCOMPLETE"
"""Environment variable that the shell hook sets to request completions."""
SHELLS = ("bash", "zsh", "fish")
MAN = "man"


class CompletionCommand:
    """Print shell completion or the manual page.

    $ source <(tapscope completion bash)          in ~/.bashrc
    $ source <(tapscope completion zsh)           in ~/.zshrc, after compinit
    $ tapscope completion fish > ~/.config/fish/completions/tapscope.fish
    $ tapscope completion man > ~/.local/share/man/man1/tapscope.1
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the shell argument."""
        parser.add_argument(
            "shell", choices=(*SHELLS, MAN), metavar="SHELL", help=f"one of {', '.join(SHELLS)}, or {MAN}"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the completion code or the manual page."""
        if args.shell == MAN:
            from tapscope.cli import VERBS, parser_of
            from tapscope.cli.man_page import man_page

            output.write_lines(man_page(VERBS, parser_of))
            return 0
        from argcomplete.shell_integration import shellcode

        output.write_lines(shellcode(["tapscope"], shell=args.shell))
        return 0


def complete(verbs: Mapping[str, object], parser_of: Callable[[str], argparse.ArgumentParser]) -> None:
    """Answer a completion request of the shell and exit.

    Completes command names for the first word and options of the command afterwards. ``parser_of`` builds the parser of
    one command. The shell passes the command line and cursor position in ``COMP_LINE`` and ``COMP_POINT``.
    """
    import argcomplete

    point = int(os.environ.get("COMP_POINT", "0"))
    words = os.environ.get("COMP_LINE", "")[:point].split(" ")
    complete_words = [word for word in words[:-1] if word]
    if len(complete_words) < 2:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=verbs)
        parser.add_argument("--version", action="store_true")
    elif complete_words[1] in verbs:
        parser = parser_of(complete_words[1])
        # argcomplete skips N - 1 words, here the program; the command then takes the place of the program name.
        os.environ[REQUEST] = "2"
    else:
        sys.exit(1)
    argcomplete.autocomplete(parser, always_complete_options=False)
