"""The command line in the directory of a test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tapscope import cli

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Exit code, stdout and stderr of one command line in the directory of the test."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
