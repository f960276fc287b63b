"""The tapscope command line, called in the test process."""

from collections.abc import Callable

import pytest

from tapscope import cli

Cli = Callable[..., tuple[int, str, str]]
"""Command-line arguments -> exit code, stdout and stderr."""


def command_line(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs command lines and captures their output."""

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
