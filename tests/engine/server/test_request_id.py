"""Ids of HTTP requests are in the headers of every response, in errors and in the request log."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from chat_templates import QWEN
from engine_http import served
from openai_scripts import SCRIPTS
from scripted import make_scripted

GREEDY = {"max_tokens": 2, "temperature": 0}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[httpx.Client]:
    path = make_scripted(tmp_path_factory.mktemp("m") / "m", QWEN, SCRIPTS, ["<|im_start|>", "<|im_end|>"])
    settings = {"model_name": "tiny", "api_key": "secret", "request_log": str(log)}
    headers = {"Authorization": "Bearer secret"}
    with served(path, settings=settings) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/nowhere", 404),
        ("POST", "/generate", 400),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_response_has_the_id_of_its_request(client: httpx.Client, method: str, route: str, status: int) -> None:
    headers = {"x-request-id": "mine 1"}
    found = client.request(method, route, headers=headers)
    assert (found.status_code, found.headers.get_list("x-request-id")) == (status, ["mine 1"])
    made = {client.request(method, route).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(name.startswith("req_") for name in made)
    refused = client.request(method, route, headers=headers | {"Origin": "http://a.example"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "mine 1")


@pytest.mark.parametrize("given", ["", "x" * 513, "a\tb", "naïve".encode()])
def test_an_id_that_is_long_or_not_printable_is_replaced(client: httpx.Client, given: str | bytes) -> None:
    assert client.get("/health", headers={"x-request-id": given}).headers["x-request-id"].startswith("req_")
    assert client.get("/health", headers={"x-request-id": "x" * 512}).headers["x-request-id"] == "x" * 512


def test_openais_package_reads_the_id(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="secret", max_retries=0) as made:
        answer = made.chat.completions.create(
            model="tiny", messages=HI, extra_headers={"x-request-id": "chat-1"}, **GREEDY
        )
        assert answer._request_id == "chat-1"
        with pytest.raises(openai.BadRequestError) as caught:
            made.chat.completions.create(model="tiny", messages=[], **GREEDY)
        assert caught.value.request_id.startswith("req_")


def test_request_log_has_the_id_of_a_streamed_request(client: httpx.Client, log: Path) -> None:
    body = {"model": "tiny", "messages": HI, "stream": True, "n": 2} | GREEDY
    answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "logged"}).raise_for_status()
    chunk = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))
    client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 1}, "rid": "other"})
    lines = list(map(json.loads, log.read_text().splitlines()))
    ids = [line["id"] for line in lines if line["x_request_id"] == "logged"]
    assert sorted(ids) == [f"{chunk['id']}-{index}" for index in range(2)]
    (other,) = (line for line in lines if line["id"] == "other")
    assert other["x_request_id"].startswith("req_")


def test_anthropics_errors_have_the_id(client: httpx.Client) -> None:
    headers = {"x-request-id": "message-1"}
    body = {"model": "tiny", "messages": HI, "max_tokens": 2}
    fine = client.post("/v1/messages", json=body, headers=headers).raise_for_status()
    assert (fine.headers["request-id"], fine.headers["x-request-id"]) == ("message-1", "message-1")
    for wrong, key in (({"max_tokens": 0}, "secret"), ({}, "wrong")):
        auth = {"Authorization": f"Bearer {key}"}
        refused = client.post("/v1/messages", json=body | wrong, headers=headers | auth)
        assert refused.status_code in (400, 401)
        assert refused.json()["request_id"] == refused.headers["request-id"] == "message-1"


def test_unexpected_exceptions_are_logged_with_the_id(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tapscope.engine.server.native_routes.read_generations", explode)
    with caplog.at_level(logging.ERROR, "tapscope"):
        answer = client.post("/generate", json={"text": "hi"}, headers={"x-request-id": "bug-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "bug-1")
    assert "the request bug-1 failed: ZeroDivisionError" in caplog.text
