"""POST /v1/responses through the `openai` package, against a real server whose model generates scripted output."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tapscope.engine.api.deltas import ContentDelta, ReasoningDelta
from tapscope.engine.api.reply import ReplyFormat
from tapscope.engine.api.responses_request import ResponsesBody, as_chat_messages
from tapscope.engine.api.responses_response import ResponsesResponse

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("get_weather", "get_time")]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def num_prompt_tokens(path: Path, messages: list[dict[str, Any]]) -> int:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_responses_return_text_and_token_counts(client: openai.OpenAI, path: Path) -> None:
    made = client.responses.create(input="hi", instructions="Be brief.", **GREEDY)
    assert (made.output_text, made.status, made.incomplete_details) == ("Hello there!", "completed", None)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert made.usage.input_tokens == num_prompt_tokens(path, messages)
    assert (made.usage.output_tokens, made.usage.output_tokens_details.reasoning_tokens) == (4, 0)
    cut = client.responses.create(input="count", max_output_tokens=2, **GREEDY)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
        "one two ",
        "incomplete",
        "max_output_tokens",
    )
    assert cut.output[0].status == "incomplete"


def test_responses_stream_builds_the_same_response(client: openai.OpenAI) -> None:
    for text, tools in (("hi", []), ("think", []), ("weather?", TOOLS)):
        whole = client.responses.create(input=text, tools=tools, **GREEDY)
        with client.responses.stream(input=text, tools=tools, **GREEDY) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")

        def content(response: Any) -> list[dict[str, Any]]:
            return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]

        for item, expected in zip(content(streamed), content(whole), strict=True):
            for part in item.get("content") or ():
                part.pop("parsed", None)
            assert item == expected
        deltas: dict[int, str] = {}
        for event in events:
            if event.type.endswith(".delta"):
                deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        strings = [getattr(item, "arguments", None) or item.content[0].text for item in whole.output]
        assert list(deltas.values()) == strings


def test_responses_call_functions_and_read_their_outputs(client: openai.OpenAI, path: Path) -> None:
    made = client.responses.create(input="weather?", tools=TOOLS, **GREEDY)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    call = made.output[1]
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Paris"}, "completed")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}, *made.output]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"} for item in made.output[1:]]
    again = client.responses.create(input=items, tools=TOOLS, **GREEDY)
    calls = [
        {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}} for item in made.output[1:]
    ]
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"type": "function", **each} for each in calls],
        },
        *({"role": "tool", "tool_call_id": each["id"], "content": "sunny"} for each in calls),
    ]
    chat = [{"type": "function", "function": {"name": t["name"], "parameters": t["parameters"]}} for t in TOOLS]
    asked = client.chat.completions.create(messages=messages, tools=chat, **GREEDY)
    assert again.usage.input_tokens == asked.usage.prompt_tokens
    forced = client.responses.create(
        input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "get_time"}, max_output_tokens=60, **GREEDY
    )
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "get_time")]


def test_responses_take_the_sampling_fields_of_vllm(client: openai.OpenAI, path: Path) -> None:
    words = ["three ", " there", "<|im_end|>"]
    three, there, end = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(words)

    def text(prompt: str, **fields: Any) -> str:
        return client.responses.create(input=prompt, extra_body=fields, **GREEDY).output_text

    assert text("count", stop="o three") == "one tw"
    assert text("count", stop=["three"], include_stop_str_in_output=True) == "one two three"
    assert text("count", stop_token_ids=[three]) == "one two "
    assert " there" not in text("hi", logit_bias={there: -100}, max_output_tokens=3)
    assert text("hi", ignore_eos=True, max_output_tokens=5) != text("hi", max_output_tokens=5) == "Hello there!"
    for skips, expected in ((True, ""), (False, "<|im_end|>" * 2)):
        assert text("hi", logit_bias={end: 100}, max_output_tokens=2, skip_special_tokens=skips) == expected
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert text("hi", **{penalty: 1.5}) == "Hello there!"
        with pytest.raises(openai.BadRequestError, match=f"{penalty}=-9"):
            text("hi", **{penalty: -9})


def test_responses_separate_reasoning_and_take_it_back(client: openai.OpenAI) -> None:
    made = client.responses.create(input="think", **GREEDY)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert (made.output[0].content[0].text, made.output_text) == ("hm so be it", "Fine day.")
    assert (made.usage.output_tokens, made.usage.output_tokens_details.reasoning_tokens) == (7, 2)
    items = [{"role": "user", "content": "think"}, *made.output, {"role": "user", "content": "hi"}]
    assert client.responses.create(input=items, **GREEDY).output_text == "Hello there!"


def test_responses_reasoning_after_an_answer_begins_another_turn() -> None:
    replies = [{"type": "message", "role": "assistant", "content": text} for text in ("one", "two")]
    thought = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [thought[0], replies[0], thought[1], replies[1], call]
    first, second = as_chat_messages(ResponsesBody.parse({"input": items}))
    assert first == {"role": "assistant", "reasoning_content": "a", "content": "one"}
    assert (second["reasoning_content"], second["content"], len(second["tool_calls"])) == ("b", "two", 1)


def test_responses_follow_a_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    schema["additionalProperties"] = False
    wanted = {"format": {"type": "json_schema", "name": "c", "schema": schema, "strict": True}}
    made = client.responses.create(input="hi", text=wanted, max_output_tokens=60, **GREEDY)
    assert json.loads(made.output_text)["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "a string or a non-empty list of items"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "logprobs is not supported"),
        ({"input": "x", "background": True}, "background", "background is not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "must be"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "must be one of",
        ),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "supports 1024 in total"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
    ],
)
def test_responses_refuse_invalid_bodies(url: str, body: Any, param: str, words: str) -> None:
    answer = httpx.post(f"{url}/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_only_the_last_item_of_a_truncated_stream_is_incomplete() -> None:
    model: Any = SimpleNamespace(name="tiny", require_tokenizer=lambda: None)
    params = SimpleNamespace(temperature=0.0, top_p=1.0)
    prompt: Any = SimpleNamespace(form=ReplyFormat(), token_ids=(1,), params=params)
    response = ResponsesResponse(model, ResponsesBody(input="x"), prompt)
    pieces = [ReasoningDelta("so"), ContentDelta("yes")]
    response._reply = SimpleNamespace(feed=lambda *_, **__: pieces)  # type: ignore[assignment]
    output: Any = SimpleNamespace(finish_reason="length", token_ids=(1, 2), cached_tokens=0, text="", reason="")
    events = [json.loads(line[6:]) for line in response.events(output).splitlines() if line.startswith("data: ")]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [item["status"] for item in events[-1]["response"]["output"]] == ["completed", "incomplete"]
