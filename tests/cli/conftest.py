"""The model that tests of several verbs run."""

from pathlib import Path

import pytest
from checkpoints import make_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small Llama with random weights."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")
