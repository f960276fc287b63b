"""Fixtures of the CLI tests: the command line, and a small model."""

from pathlib import Path

import pytest
from checkpoints import make_llama
from command_line import Cli, command_line


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a small Llama with random weights."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command line and returns exit code, stdout and stderr."""
    return command_line(capsys)
