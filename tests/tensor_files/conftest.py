"""The command line in the directory of a test."""

from pathlib import Path

import pytest
from command_line import Cli, command_line


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Exit code, stdout and stderr of one command line in the directory of the test."""
    monkeypatch.chdir(tmp_path)
    return command_line(capsys)
