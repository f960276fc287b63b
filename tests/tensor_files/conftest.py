"""The command line in the directory of a test."""

from pathlib import Path

import pytest
from command_line import Cli, command_line


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs a command line in the test's directory and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return command_line(capsys)
