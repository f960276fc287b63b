"""Clients select adapters as in SGLang (`model: NAME:ADAPTER`, `lora_path`) and as in vLLM (`model: ADAPTER`)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from chat_templates import QWEN
from checkpoints import make_llama
from engine_http import served
from lora_adapters import ATTENTION, EVERY, make_adapter

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, num_hidden_layers=2)
    (path / "chat_template.jinja").write_text(QWEN, encoding="utf-8")
    make_adapter(path.parent / "a", path, ATTENTION, seed=1)
    make_adapter(path.parent / "b", path, EVERY, seed=2)
    return path


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with served(path, settings={"model_name": "tiny"}, lora_paths={"a": path.parent / "a"}) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def _generate(url: str, **body: object) -> httpx.Response:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/generate", json={"input_ids": IDS, "sampling_params": params} | body, timeout=60)


def test_openai_client_selects_an_adapter(client: openai.OpenAI, url: str) -> None:
    def complete(model: str, **extra: object) -> tuple[str, str]:
        answer = client.completions.create(
            model=model, prompt=IDS, max_tokens=6, temperature=0, extra_body={"ignore_eos": True} | extra
        )
        return answer.choices[0].text, answer.model

    base, adapted = complete("tiny")[0], complete("tiny:a")[0]
    assert base != adapted
    assert complete("tiny:a")[1] == "tiny:a"
    assert complete("a") == (adapted, "a")
    assert complete("tiny", lora_path="a") == (adapted, "tiny")
    assert _generate(url).json()["text"] == base
    assert _generate(url, lora_path="a").json()["text"] == adapted
    both = _generate(url, input_ids=[IDS, IDS, IDS], lora_path=["a", None, "a"]).json()
    assert [answer["text"] for answer in both] == [adapted, base, adapted]
    vectors = [client.embeddings.create(model=model, input=IDS).data[0].embedding for model in ("tiny", "tiny:a")]
    assert vectors[0] != vectors[1]


def test_chat_apis_select_an_adapter(client: openai.OpenAI, url: str) -> None:
    import anthropic  # takes three seconds to import

    messages: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    options: dict[str, object] = {"messages": messages, "max_tokens": 6, "temperature": 0}
    outputs = []
    for model in ("tiny", "tiny:a"):
        chat = client.chat.completions.create(model=model, **options, extra_body={"ignore_eos": True})
        streamed = client.chat.completions.create(model=model, **options, stream=True, extra_body={"ignore_eos": True})
        text = chat.choices[0].message.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
        outputs.append(text)
        assert client.responses.create(model=model, input="hello", max_output_tokens=6, temperature=0).model == model
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
            assert other.messages.create(model=model, max_tokens=6, messages=messages).model == model
    assert outputs[0] != outputs[1]


def test_models_route_lists_adapters(client: openai.OpenAI, path: Path) -> None:
    cards = {card.id: card.to_dict() for card in client.models.list()}
    assert list(cards) == ["tiny", "tiny:a"]
    assert (cards["tiny:a"]["parent"], cards["tiny:a"]["root"]) == ("tiny", str(path.parent / "a"))
    assert client.models.retrieve("a").to_dict()["parent"] == "tiny"


def test_unknown_adapter_is_named_in_one_sentence(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(
        openai.NotFoundError, match="the model 'tiny:x' does not exist here; this server has 'tiny', 'tiny:a'"
    ):
        client.completions.create(model="tiny:x", prompt=IDS)
    with pytest.raises(openai.APIStatusError, match="'tiny:a' and lora_path='x' name two adapters"):
        client.completions.create(model="tiny:a", prompt=IDS, extra_body={"lora_path": "x"})
    refused = _generate(url, lora_path="x")
    assert refused.json()["error"]["message"] == "the adapter 'x' is not loaded; loaded: a"
    refused = _generate(url, lora_path=["a", "a"])
    assert "'lora_path' has 2 entries for 1 prompts" in refused.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_under_load(client: openai.OpenAI, url: str, path: Path) -> None:
    """With the routes of SGLang and vLLM; other requests continue, and those for the unloaded adapter finish."""

    def post(route: str, **body: str) -> httpx.Response:
        return httpx.post(f"{url}{route}", json=body, timeout=60)

    expected = {name: _generate(url, **({"lora_path": name} if name else {})).json()["text"] for name in ("", "a")}
    with ThreadPoolExecutor(6) as pool:
        names = ["", "a"] * 10
        replies = [
            pool.submit(lambda n=name: _generate(url, **({"lora_path": n} if n else {})).json()["text"])
            for name in names
        ]
        for turn in range(3):
            route = "" if turn % 2 else "/v1"
            loaded = post(f"{route}/load_lora_adapter", lora_name="b", lora_path=str(path.parent / "b"))
            assert loaded.json() == {
                "success": True,
                "loaded_adapters": {name: str(path.parent / name) for name in ("a", "b")},
            }
            assert [card.id for card in client.models.list()] == ["tiny", "tiny:a", "tiny:b"]
            assert _generate(url, lora_path="b").json()["text"] not in expected.values()
            unloaded = post(f"{route}/unload_lora_adapter", lora_name="b").json()
            assert (unloaded["success"], unloaded["num_live"]) == (True, 0)
        assert [text.result() for text in replies] == [expected[name] for name in names]
    refused = post("/unload_lora_adapter", lora_name="b")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "adapter 'b' cannot be unloaded: it is not loaded; loaded: a",
    )
    refused = post("/load_lora_adapter", lora_name="b", lora_path="nowhere")
    assert refused.status_code == 400
    assert "adapter 'b': " in refused.json()["error"]["message"]
    assert "nowhere/adapter_config.json is missing" in json.dumps(refused.json())
