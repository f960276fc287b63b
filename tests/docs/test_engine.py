"""docs/guide/serve.md shows the output that OpenAI and Anthropic clients receive from a server."""

import contextlib
import doctest
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_templates import QWEN
from engine_http import served
from openai_scripts import SCRIPTS
from scripted import make_scripted

PAGE = (Path(__file__).resolve().parents[2] / "docs/guide/serve.md").read_text()
ID = re.compile(r"\b(call|toolu|msg|req)_[0-9a-f]{32}\b")
PIECE = re.compile(r"""(?<='arguments': ')[^']*|(?<="thinking":")[^"]*|(?<="text":")[^"]*""")
WORD = re.compile(r"""'[^']*'|"[^"]*"|[\w.#]+""")
COUNT = re.compile(r'(?<="output_tokens":)\d+')


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = make_scripted(tmp_path_factory.mktemp("m") / "m", QWEN, SCRIPTS, ["<|im_start|>", "<|im_end|>"])
    with served(path, settings={"model_name": "tiny"}) as address:
        yield address


def _printed(source: str, names: dict[str, Any]) -> str:
    """Return the output of an example in an interpreter; for an exception, its last line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(compile(source, "docs/guide/serve.md", "single"), names)
        except Exception as error:  # noqa: BLE001 - the page shows it
            print(f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}: {error}")
    return said.getvalue()


def _merged(stream: str) -> tuple[str, set[str]]:
    """Return the merged text of a stream and the words of its lines: a slow reader receives several steps as one."""
    return "".join(PIECE.findall(stream)), set(WORD.findall(COUNT.sub("#", PIECE.sub("", stream))))


def test_engine_page_shows_the_answers_clients_get(url: str) -> None:
    import anthropic  # the import takes three seconds

    names: dict[str, Any] = {"openai": openai, "anthropic": anthropic}
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        for example in doctest.DocTestParser().get_examples(block):
            printed = ID.sub("#", _printed(example.source.replace("http://127.0.0.1:8000", url), names))
            shown = ID.sub("#", example.want)
            if example.source.startswith("for "):
                (said, words), (told, known) = _merged(printed), _merged(shown)
                assert (said, words - known) == (told, set()), example.source
            else:
                assert printed == shown, example.source
        names["client"].close()
