"""Fixtures: a server whose model generates scripted output, and a client of the `openai` package."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from chat_templates import QWEN
from engine_http import served
from openai_scripts import SCRIPTS
from scripted import make_scripted


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("m") / "m", QWEN, SCRIPTS, ["<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with served(path, settings={"model_name": "tiny"}) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
