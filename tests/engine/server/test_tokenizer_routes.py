"""vLLM's /tokenize, /detokenize, /version and /ping."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from tapscope import __version__

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as made:
        yield made


def test_tokenize_gives_the_ids_of_a_prompt(http: httpx.Client, path: Path) -> None:
    text = "<|im_start|>hi, you"
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    for special in (True, False):
        found = http.post("/tokenize", json={"model": "tiny", "prompt": text, "add_special_tokens": special}).json()
        ids = inner.encode(text, add_special_tokens=special).ids
        assert found == {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None}
    strings = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()["token_strs"]
    assert strings == inner.encode(text).tokens
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("settings", [{}, {"add_generation_prompt": False}, {"add_special_tokens": True}])
def test_tokenize_gives_the_ids_that_a_chat_computes(http: httpx.Client, settings: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **settings}
    chat = http.post("/v1/chat/completions", json=body | {"max_tokens": 1, "return_token_ids": True}).json()
    assert http.post("/tokenize", json=body).json()["tokens"] == chat["prompt_token_ids"]


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("tokenize", {}, 400, "exactly one of 'prompt' and 'messages'"),
        ("tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "exactly one of 'prompt' and 'messages'"),
        ("tokenize", {"prompt": "x", "tools": []}, 400, "tools applies to messages"),
        ("tokenize", {"prompt": "x", "chat_template": "y"}, 400, "chat_template is not supported"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "'other' does not exist here"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"prompt": "x" * 200_000}, 400, "shorten the prompt"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [5, -1]}, 400, "tokens"),
        ("detokenize", {"tokens": [5, 1 << 40]}, 400, "invalid token id 1099511627776 in tokens: expected 0 to "),
    ],
)
def test_tokenizer_routes_refuse_invalid_bodies(
    http: httpx.Client, route: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = http.post(f"/{route}", json=body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_version_and_ping(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    assert (http.get("/ping").status_code, http.post("/ping").status_code) == (200, 200)
