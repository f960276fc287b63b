"""The command line, and the model that tests of several verbs run."""

from pathlib import Path

import pytest
from checkpoints import make_llama
from command_line import Cli, command_line


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small Llama with random weights."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Exit code, stdout and stderr of one command line."""
    return command_line(capsys)
