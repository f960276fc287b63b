"""The command line, called in the test's own process."""

from collections.abc import Callable

import pytest

from tapscope import cli

Cli = Callable[..., tuple[int, str, str]]
"""Words of a command line -> exit code, stdout and stderr."""


def command_line(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs command lines and captures what they print."""

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
