"""Anthropic's API through the `anthropic` package, against a real server whose model generates scripted output.

Only the process that runs these tests imports the package, as the import takes three seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from chat_templates import QWEN
from engine_http import HOLDS, served
from scripted import make_scripted
from transformers import AutoTokenizer

from tapscope.engine.api.anthropic_messages import input_of_truncated

if TYPE_CHECKING:
    import anthropic

SCRIPTS = {
    "default": ["Hello", " there", "!"],
    "weather": [
        *("Let me look. ", "<tool_call>", '\n{"name": "get_weather", ', '"arguments": {"city": ', '"Paris"', "}}"),
        "\n</tool_call>",
    ],
    "think": ["<think>", "\nhm ", "so be it\n", "</think>", "\n\nFine", " day."],
    "count": ["one ", "two ", "three ", "four ", "five"],
}
TOOL = {
    "name": "get_weather",
    "description": "Today's weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("m") / "m", QWEN, SCRIPTS, ["<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with served(path, settings={"model_name": "tiny", "api_key": "secret"}) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as made:
        yield made


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_messages_returns_text_and_token_counts(client: anthropic.Anthropic, path: Path) -> None:
    made = client.messages.create(messages=ask("hi"), system="Be brief.", **BASE)
    assert (made.type, made.role, made.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in made.content] == [("text", "Hello there!")]
    assert (made.stop_reason, made.stop_sequence, made.usage.output_tokens) == ("end_turn", None, 4)
    conversation = [{"role": "system", "content": "Be brief."}, *ask("hi")]
    prompt = AutoTokenizer.from_pretrained(path).apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    assert made.usage.input_tokens + made.usage.cache_read_input_tokens == len(prompt)
    counted = client.messages.count_tokens(model="tiny", messages=ask("hi"), system="Be brief.")
    assert counted.input_tokens == len(prompt)


def test_messages_streams_anthropic_events_in_order(client: anthropic.Anthropic, url: str) -> None:
    HOLDS[url].after(2)  # otherwise a slow reader would receive all outputs merged into one event
    events = []
    for event in client.messages.create(messages=ask("count"), stream=True, **BASE):
        events.append(event)
        if event.type == "content_block_delta":
            HOLDS[url].release()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the package drops the ping event between them
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == "one two three four five"
    assert len(deltas) >= 2
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 6)
    with client.messages.stream(messages=ask("count"), **BASE) as stream:
        assert "".join(stream.text_stream) == "one two three four five"


def test_messages_calls_tools_and_reads_their_results(client: anthropic.Anthropic, path: Path) -> None:
    body = {"messages": ask("weather?"), "tools": [TOOL], **BASE}
    made = client.messages.create(**body)
    assert made.stop_reason == "tool_use"
    assert [block.type for block in made.content] == ["text", "tool_use"]
    call = made.content[1]
    assert (made.content[0].text, call.name, call.input) == ("Let me look.", "get_weather", {"city": "Paris"})
    with client.messages.stream(**body) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) >= 1
    assert "".join(pieces) == '{"city": "Paris"}'
    assert final.content[1].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "count"}]}
    conversation = [
        *ask("weather?"),
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**(body | {"messages": conversation}))
    assert again.content[0].text == "one two three four five"
    counted = client.messages.count_tokens(model="tiny", messages=conversation, tools=[TOOL])
    assert counted.input_tokens == again.usage.input_tokens + again.usage.cache_read_input_tokens
    none = client.messages.create(**body, tool_choice={"type": "none"})
    assert none.content[0].text.startswith("Let me look. <tool_call>")
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    strict = TOOL | {"strict": True, "input_schema": schema | {"additionalProperties": False}}
    assert client.messages.create(**body | {"tools": [strict]}).content[1].input == {"city": "Rome"}


def test_messages_reads_system_messages_within_the_conversation(client: anthropic.Anthropic) -> None:
    instruction: Any = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    turns: Any = [*ask("hi"), {"role": "assistant", "content": "Hello"}, instruction, *ask("count")]
    made = client.messages.create(messages=turns, **BASE)
    assert made.content[0].text == "one two three four five"
    without = [turn for turn in turns if turn is not instruction]
    counts = [client.messages.count_tokens(model="tiny", messages=each).input_tokens for each in (turns, without)]
    assert counts[0] > counts[1]


def test_messages_returns_a_truncated_call_as_the_stream_does(client: anthropic.Anthropic) -> None:
    inputs = []
    for limit in range(3, 8):
        body = {"messages": ask("weather?"), "tools": [TOOL], **BASE, "max_tokens": limit}
        made = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
        assert made.stop_reason == final.stop_reason == "max_tokens"
        assert [block.type for block in made.content] == [block.type for block in final.content]
        calls = [block for block in made.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [each.input for each in final.content if each.type == "tool_use"]
        inputs += [call.input for call in calls]
    assert {} in inputs
    assert {"city": "Paris"} in inputs


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": "b"', {"a": "b"}),
        ('{"a": "b", "c"', {"a": "b"}),
        ('{"a": 1, "c": 12', {"a": 1}),
        ('{"a": [1, {"b": "}"}, tru', {"a": [1, {"b": "}"}]}),
        ('{"a": "x\\", y", "b": {', {"a": 'x", y', "b": {}}),
        ("[1, 2", {}),
        ("nonsense", {}),
    ],
)
def test_input_of_truncated_has_the_complete_members(arguments: str, read: dict[str, Any]) -> None:
    assert input_of_truncated(arguments) == read


def test_messages_returns_thinking_as_its_own_block(client: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    made = client.messages.create(messages=ask("think"), thinking=thinking, **BASE)
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert (made.content[0].thinking, made.content[1].text) == ("hm so be it", "Fine day.")
    with client.messages.stream(messages=ask("think"), thinking=thinking, **BASE) as stream:
        final = stream.get_final_message()
    assert (final.content[0].thinking, final.content[1].text) == ("hm so be it", "Fine day.")
    conversation = [*ask("think"), {"role": "assistant", "content": made.content}, *ask("hi")]
    assert client.messages.create(messages=conversation, **BASE).content[0].text == "Hello there!"


def test_messages_names_the_matched_stop_sequence(client: anthropic.Anthropic) -> None:
    made = client.messages.create(messages=ask("count"), stop_sequences=["zzz", "three"], **BASE)
    assert (made.stop_reason, made.stop_sequence, made.content[0].text) == ("stop_sequence", "three", "one two ")
    with client.messages.stream(messages=ask("count"), stop_sequences=["three"], **BASE) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, final.content[0].text) == ("stop_sequence", "three", "one two ")


def test_messages_tool_choice_forces_a_call(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    tool = {"name": "inside", "input_schema": schema | {"additionalProperties": False}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "inside"}):
        body = BASE | {"max_tokens": 80, "messages": ask("hi"), "tools": [tool], "tool_choice": choice}
        made = client.messages.create(**body)
        assert (made.stop_reason, [block.type for block in made.content]) == ("tool_use", ["tool_use"])
        assert made.content[0].input["unit"] in ("c", "f")


def test_messages_continues_a_prefill_up_to_max_tokens(client: anthropic.Anthropic) -> None:
    made = client.messages.create(messages=ask("count"), **(BASE | {"max_tokens": 2}))
    assert (made.stop_reason, made.content[0].text) == ("max_tokens", "one two ")
    conversation = [*ask("hi"), {"role": "assistant", "content": "one two "}]
    assert client.messages.create(messages=conversation, **BASE).content[0].text == "three four five"


def test_models_lists_anthropic_limits(client: anthropic.Anthropic) -> None:
    import anthropic

    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == ("tiny", "model", "active")
    assert model.max_input_tokens == model.max_tokens == 1023
    assert client.models.retrieve("tiny") == model
    longest = {"model": "tiny", "max_tokens": model.max_tokens + 1, "messages": ask("hi")}
    with pytest.raises(anthropic.BadRequestError, match="supports 1024 in total"):
        client.messages.create(**longest)


def test_effort_is_the_templates_reasoning_effort(client: anthropic.Anthropic, tmp_path: Path) -> None:
    import anthropic

    plain = client.messages.create(messages=ask("hi"), **BASE)
    same = client.messages.create(messages=ask("hi"), output_config={"effort": "max"}, **BASE)
    assert (same.content[0].text, same.usage.output_tokens) == (plain.content[0].text, plain.usage.output_tokens)
    template = "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }} {% endif %}" + QWEN
    path = make_scripted(tmp_path / "m", template, SCRIPTS, ["<|im_start|>", "<|im_end|>"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    with served(path, settings={"model_name": "tiny"}) as url, anthropic.Anthropic(base_url=url, api_key="x") as made:
        for effort in (None, "low", "max"):
            given = {} if effort is None else {"reasoning_effort": effort}
            prompt = tokenizer.apply_chat_template(
                ask("hi"), add_generation_prompt=True, return_dict=False, enable_thinking=False, **given
            )
            asked = {} if effort is None else {"output_config": {"effort": effort}}
            assert made.messages.count_tokens(model="tiny", messages=ask("hi"), **asked).input_tokens == len(prompt)
            usage = made.messages.create(messages=ask("hi"), **asked, **BASE).usage
            assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)


def test_thinking_between_tools_is_off(client: anthropic.Anthropic) -> None:
    counts = [
        client.messages.count_tokens(model="tiny", messages=ask("hi"), thinking={"type": kind}, speed="standard")
        for kind in ("between_tools", "disabled", "adaptive")
    ]
    assert counts[0] == counts[1] != counts[2]


def test_messages_refuses_a_missing_api_key(url: str) -> None:
    import anthropic

    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(messages=ask("hi"), **BASE)
    assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"max_tokens": None}, 400, "max_tokens is missing"),
        ({"max_tokens": 5000}, 400, "supports 1024 in total"),
        ({"model": "claude"}, 404, "this server has 'tiny'"),
        ({"model": None}, 400, "model is missing"),
        ({"messages": []}, 400, "messages=[]: must be a non-empty list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "must be one of user, assistant, system"),
        ({"temperature": 1.5}, 400, "number from 0 to 1"),
        ({"mcp_servers": [{}]}, 400, "mcp_servers is not supported"),
        ({"speed": "fast"}, 400, 'speed is not supported; leave it out, or give "standard"'),
        ({"output_config": {"effort": "more"}}, 400, "output_config.effort='more': must be one of"),
        ({"thinking": {"type": "sometimes"}}, 400, "must be one of enabled, adaptive, between_tools, disabled"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "must be custom"),
        ({"tool_choice": {"type": "any"}}, 400, "there are no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, 400, "must be below max_tokens=50"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}},
            *(400, "output_config.format: Invalid type: nope"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            *(400, "must be one of text, tool_result"),
        ),
    ],
)
def test_messages_refuses_invalid_bodies_with_anthropic_errors(url: str, change: Any, status: int, words: str) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": ask("hi")} | change
    answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert words in error["message"]
