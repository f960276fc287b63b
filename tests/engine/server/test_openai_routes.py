"""OpenAI's API through the `openai` package, against a real server whose model generates scripted output."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import openai
import pytest
import torch
from engine_http import HOLDS, served
from openapi_fields import fields_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tapscope.engine.api.logprobs import completion_logprobs
from tapscope.engine.requests.token_logprob import TokenLogprob

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
]
GREEDY = {"model": "tiny", "temperature": 0}
NOPE = {"type": "nope"}
NOPE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOPE}}


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models_lists_the_model_and_404s_others(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tapscope"
    for call in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.chat.completions.create(model="gpt-4", messages=ask("hi")),
        lambda: client.completions.create(model="gpt-4", prompt="hi"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "this server has 'tiny'" in caught.value.message


def test_chat_returns_text_and_token_counts(client: openai.OpenAI, path: Path) -> None:
    made = client.chat.completions.create(messages=ask("hi"), **GREEDY)
    assert made.object == "chat.completion"
    choice = made.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there!", "stop")
    assert choice.message.tool_calls is None
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(ask("hi"), add_generation_prompt=True, return_dict=False)
    assert made.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 4,
        "total_tokens": len(prompt) + 4,
    }


def test_chat_stream_accumulates_and_ends_with_usage(client: openai.OpenAI, url: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    HOLDS[url].after(2)  # otherwise a slow reader would receive all outputs merged into one chunk
    chunks = []
    for chunk in client.chat.completions.create(messages=ask("count"), **GREEDY, **options):
        chunks.append(chunk)
        if chunk.choices and chunk.choices[0].delta.content:
            HOLDS[url].release()
    *body, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "one two three four five"
    assert len([chunk for chunk in body if chunk.choices[0].delta.content]) >= 2
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    assert all(chunk.usage is None for chunk in body)


@pytest.mark.parametrize("is_chat", [True, False])
def test_continuous_usage_counts_the_tokens_of_each_choice(client: openai.OpenAI, url: str, is_chat: bool) -> None:
    def stream(**options: bool) -> Iterator[Any]:
        shared = {"stream": True, "stream_options": options, "n": 2, "max_tokens": 4}
        if is_chat:
            yield from client.chat.completions.create(messages=ask("count"), **shared, **GREEDY)
        else:
            ids = [[5, 6, 7], [5]]
            yield from client.completions.create(prompt=ids, extra_body={"ignore_eos": True}, **shared, **GREEDY)

    HOLDS[url].after(2)  # ensures that the choice of the first chunk has another chunk
    chunks = []
    for chunk in stream(include_usage=True, continuous_usage_stats=True):
        chunks.append(chunk)
        HOLDS[url].release()
    *body, last = chunks
    finals: dict[int, Any] = {}
    for chunk in body:
        (choice,), usage = chunk.choices, chunk.usage
        previous = finals.get(choice.index)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert previous is None or (previous.prompt_tokens, True) == (
            usage.prompt_tokens,
            previous.completion_tokens <= usage.completion_tokens,
        )
        finals[choice.index] = usage
    assert len(body) > len(finals) == (2 if is_chat else 4)
    assert [usage.completion_tokens for usage in finals.values()] == [4] * len(finals)
    assert last.choices == []
    assert last.usage.completion_tokens == 4 * len(finals)
    assert last.usage.prompt_tokens == sum(finals[index].prompt_tokens for index in finals if index % 2 == 0)
    for options in ({"include_usage": False, "continuous_usage_stats": True}, {"continuous_usage_stats": True}):
        assert all(chunk.usage is None for chunk in stream(**options))  # as in vLLM


def test_chat_max_tokens_ends_the_answer(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        made = client.chat.completions.create(messages=ask("count"), **{name: 2}, **GREEDY)
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("one two ", "length")


def test_chat_separates_tool_calls_from_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"messages": ask("weather?"), "tools": TOOLS, **GREEDY}
    choice = client.chat.completions.create(**body).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    with client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") >= 2
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed.tool_calls] == calls
    assert streamed.content == "Let me look."
    one = client.chat.completions.create(**body, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["get_weather"]
    none = client.chat.completions.create(**body, tool_choice="none").choices[0].message
    assert none.tool_calls is None
    assert none.content.startswith("Let me look. <tool_call>")


def test_chat_renders_tool_results_into_the_prompt(client: openai.OpenAI, path: Path) -> None:
    first = client.chat.completions.create(messages=ask("weather?"), tools=TOOLS, **GREEDY).choices[0].message
    conversation = [
        *ask("weather?"),
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "count"},
    ]
    made = client.chat.completions.create(messages=conversation, tools=TOOLS, **GREEDY)
    assert made.choices[0].message.content == "one two three four five"
    called = [call.model_dump() for call in first.tool_calls]
    for call in called:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    plain = [conversation[0], {"role": "assistant", "content": "Let me look.", "tool_calls": called}, conversation[2]]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(plain, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert made.usage.prompt_tokens == len(prompt)


def test_chat_separates_reasoning_from_the_answer(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(messages=ask("think"), **GREEDY).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm so be it", "Fine day.")
    chunks = list(client.chat.completions.create(messages=ask("think"), stream=True, **GREEDY))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm so be it"
    assert "".join(delta.content or "" for delta in deltas) == "Fine day."
    plain = client.chat.completions.create(
        messages=ask("think"), extra_body={"separate_reasoning": False}, **GREEDY
    ).choices[0]
    assert plain.message.content == "<think>\nhm so be it\n</think>\n\nFine day."


def test_chat_usage_counts_the_tokens_between_the_reasoning_tags(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ask("think"), **GREEDY)
    assert (whole.usage.completion_tokens, whole.usage.completion_tokens_details.reasoning_tokens) == (7, 2)
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(messages=ask("think"), n=2, **asked, **GREEDY)
    assert (last.usage.completion_tokens, last.usage.completion_tokens_details.reasoning_tokens) == (14, 4)
    cut = client.chat.completions.create(messages=ask("think"), max_tokens=3, **GREEDY)
    assert cut.usage.completion_tokens_details.reasoning_tokens == 2
    plain = client.chat.completions.create(messages=ask("hi"), **GREEDY)
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reason_is_the_string_or_token_that_was_asked_for(client: openai.OpenAI, path: Path, stream: bool) -> None:
    three = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("three ")

    def ended(**fields: Any) -> tuple[list[Any], ...]:
        chat = client.chat.completions.create(messages=ask("count"), stream=stream, extra_body=fields, **GREEDY)
        text = client.completions.create(prompt=["one ", "two "], stream=stream, extra_body=fields, **GREEDY)
        answers = [list(each) if stream else [each] for each in (chat, text)]
        choices = [[choice for answer in each for choice in answer.choices] for each in answers]
        return tuple([getattr(each, "stop_reason", None) for each in some if each.finish_reason] for some in choices)

    assert ended(stop=["x", "ree"]) == (["ree"], ["ree"] * 2)
    assert ended(stop_token_ids=[three]) == ([three], [three] * 2)
    assert ended() == ([None], [None] * 2)
    assert ended(max_tokens=1) == ([None], [None] * 2)


def test_chat_continues_the_final_message(client: openai.OpenAI) -> None:
    conversation = [*ask("hi"), {"role": "assistant", "content": "one two "}]
    made = client.chat.completions.create(messages=conversation, extra_body={"continue_final_message": True}, **GREEDY)
    assert made.choices[0].message.content == "three four five"


def test_chat_stop_cuts_the_text(client: openai.OpenAI) -> None:
    for stop in ("thr", ["zzz", "o three"]):
        made = client.chat.completions.create(messages=ask("count"), stop=stop, **GREEDY).choices[0]
        assert made.finish_reason == "stop"
        assert made.message.content == ("one two " if stop == "thr" else "one tw")
    stream = client.chat.completions.create(messages=ask("count"), stop="o three", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one tw"


def test_chat_seed_reproduces_n_answers(client: openai.OpenAI) -> None:
    def draw(seed: int, n: int) -> list[str]:
        made = client.chat.completions.create(
            model="tiny", messages=ask("hi"), n=n, seed=seed, max_tokens=8, temperature=30
        )
        assert [choice.index for choice in made.choices] == list(range(n))
        assert made.usage.completion_tokens <= 8 * n
        return [choice.message.content for choice in made.choices]

    first = draw(7, 3)
    assert draw(7, 3) == first
    assert draw(7, 1) == first[:1]
    assert len(set(first)) == 3
    assert draw(8, 1) != first[:1]


def test_chat_logprobs_match_transformers(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(ask("hi"), add_generation_prompt=True, return_dict=False)
    made = client.chat.completions.create(messages=ask("hi"), logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    entries = made.logprobs.content
    assert [entry.token for entry in entries] == ["Hello", " there", "!", "</s>"]
    assert [bytes(entry.bytes) for entry in entries] == [b"Hello", b" there", b"!", b"</s>"]
    shown_ids = tokenizer.convert_tokens_to_ids([entry.token for entry in entries])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([[*ids, *shown_ids]])).logits[0]
    expected = logits.log_softmax(-1)[len(ids) - 1 : -1]
    for row, token, entry in zip(expected, shown_ids, entries, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    chunks = client.chat.completions.create(messages=ask("hi"), logprobs=True, stream=True, **GREEDY)
    streamed = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs.content or [])]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in entries]


def test_completions_echo_returns_prompt_logprobs(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("one two three ")
    made = client.completions.create(prompt=ids, echo=True, logprobs=2, max_tokens=0, **GREEDY).choices[0]
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert made.text == "one two three "
    assert made.logprobs.tokens == ["one ", "two ", "three "]
    assert made.logprobs.text_offset == [0, 4, 8]
    expected = [rows[index, token].item() for index, token in enumerate(ids[1:])]
    assert made.logprobs.token_logprobs[0] is None
    assert made.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [len(top) for top in made.logprobs.top_logprobs[1:]] == [2, 2]
    more = client.completions.create(prompt=ids, echo=True, logprobs=0, max_tokens=2, **GREEDY).choices[0]
    assert more.text == "one two three four five"
    assert (more.logprobs.tokens[-2:], more.logprobs.text_offset[-2:]) == (["four ", "five"], [14, 19])


def test_completions_top_logprobs_have_the_token_itself_too(client: openai.OpenAI) -> None:
    asked = {"prompt": [300, 40, 50], "echo": True, "max_tokens": 0, "extra_body": {"return_tokens_as_token_ids": True}}
    made = client.completions.create(logprobs=1, **asked, **GREEDY).choices[0].logprobs
    for token, value, top in list(zip(made.tokens, made.token_logprobs, made.top_logprobs, strict=True))[1:]:
        assert (len(top), top[token]) == (2, value)
        assert max(top.values()) > value
    assert client.completions.create(logprobs=0, **asked, **GREEDY).choices[0].logprobs.top_logprobs is None


def test_top_logprobs_of_equal_strings_have_the_most_likely_one() -> None:
    """Two tokens decode to the same incomplete character; the prompt has the less likely one, so it is not greedy."""

    class Bytes:
        def token_bytes(self, token: int) -> bytes:
            return {1: b"\xe4", 2: b"\xb8", 3: b"a"}[token]

    tokenizer: Any = Bytes()
    entry = TokenLogprob(token_id=1, logprob=-3.0, top=((2, -0.5), (3, -4.0)))
    shown, _ = completion_logprobs([entry], [1], tokenizer, 0)
    assert (shown["token_logprobs"], shown["top_logprobs"]) == ([-3.0], [{"\ufffd": -0.5, "a": -4.0}])


def test_chat_accepts_messages_as_other_clients_send_them(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(messages=ask("hi"), **GREEDY)
    answer = {"role": "assistant", "content": "x", "annotations": [], "audio": None, "function_call": None}
    history = [ask("hi")[0] | {"type": "text"}, answer, *ask("hi")]  # as OpenAI's package and lm-evaluation-harness do
    second = client.chat.completions.create(messages=history, **GREEDY)
    assert second.choices[0].message.content == first.choices[0].message.content


def test_chat_logit_bias_suppresses_tokens(client: openai.OpenAI, path: Path) -> None:
    banned = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(" there")
    made = client.chat.completions.create(messages=ask("hi"), logit_bias={str(banned): -100}, max_tokens=4, **GREEDY)
    assert made.choices[0].message.content.startswith("Hello")
    assert " there" not in made.choices[0].message.content


def test_completions_return_token_ids_and_prompt_logprobs(client: openai.OpenAI, path: Path) -> None:
    ids = AutoTokenizer.from_pretrained(path)("one two").input_ids
    asked = {"return_token_ids": True, "prompt_logprobs": 2, "return_tokens_as_token_ids": True}
    choice = client.completions.create(prompt="one two", max_tokens=3, logprobs=1, extra_body=asked, **GREEDY).choices[
        0
    ]
    assert choice.prompt_token_ids == ids
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    echoed = client.completions.create(prompt="one two", max_tokens=0, echo=True, logprobs=2, **GREEDY).choices[0]
    first, *rest = choice.prompt_logprobs
    assert first is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(rest, ids[1:], strict=True)]
    assert found == pytest.approx(echoed.logprobs.token_logprobs[1:], abs=1e-5)
    assert all([value["rank"] for value in entry.values()][-2:] == [1, 2] for entry in rest)
    chunks = list(
        client.completions.create(
            prompt="one two", max_tokens=3, stream=True, extra_body=asked | {"prompt_logprobs": None}, **GREEDY
        )
    )
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
    assert [chunk.choices[0].prompt_token_ids for chunk in chunks if hasattr(chunk.choices[0], "prompt_token_ids")] == [
        ids
    ]


def test_chat_returns_token_ids_and_prompt_logprobs(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(ask("hi"), add_generation_prompt=True, return_dict=False)
    asked = {"return_token_ids": True, "prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    made = client.chat.completions.create(messages=ask("hi"), logprobs=True, extra_body=asked, **GREEDY)
    assert made.prompt_token_ids == prompt
    assert [next(iter(entry)) for entry in made.prompt_logprobs[1:]] == [str(token) for token in prompt[1:]]
    choice = made.choices[0]
    assert tokenizer.decode(choice.token_ids, skip_special_tokens=True) == "Hello there!"
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    chunks = list(
        client.chat.completions.create(messages=ask("hi"), stream=True, extra_body={"return_token_ids": True}, **GREEDY)
    )
    assert chunks[0].prompt_token_ids == prompt
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids


def test_chat_truncates_the_prompt(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ask("hi"), extra_body={"return_token_ids": True}, **GREEDY)
    asked = {"return_token_ids": True, "truncate_prompt_tokens": 5}
    short = client.chat.completions.create(messages=ask("hi"), max_tokens=2, extra_body=asked, **GREEDY)
    assert (short.prompt_token_ids, short.usage.prompt_tokens) == (whole.prompt_token_ids[-5:], 5)
    asked["truncate_prompt_tokens"] = -1
    made = client.completions.create(prompt=[7] * 2000, max_tokens=24, extra_body=asked, **GREEDY)
    assert made.usage.prompt_tokens == 1000
    asked["truncate_prompt_tokens"] = 2
    made = client.completions.create(prompt="one two three ", max_tokens=0, echo=True, extra_body=asked, **GREEDY)
    assert "one two three ".endswith(made.choices[0].text)
    assert made.usage.prompt_tokens == 2


def test_chat_masks_bad_words_and_other_tokens(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)

    def say(**asked: Any) -> str:
        return (
            client.chat.completions.create(messages=ask("hi"), max_tokens=6, extra_body=asked, **GREEDY)
            .choices[0]
            .message.content
        )

    assert say() == "Hello there!"
    assert "there" not in say(bad_words=["there"])
    assert say(bad_words=["Hello there"]).startswith("Hello")
    assert "Hello there" not in say(bad_words=["Hello there"])
    allowed = tokenizer.convert_tokens_to_ids(["Hello", "!"])
    assert set(say(allowed_token_ids=allowed)) == set("Hello!")
    assert say(allowed_token_ids=[], bad_words=[], guided_decoding_backend="auto") == "Hello there!"


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"structured_outputs": {"choice": ["red", 'a "b"']}}, 'red|a "b"'),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"regex": "[0-9]{3}", "disable_any_whitespace": False}}, "[0-9]{3}"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
        ({"guided_json": {"enum": ["red", "blue"]}}, '"red"|"blue"'),
        ({"structured_outputs": {"json": '{"enum": ["red", "blue"]}'}}, '"red"|"blue"'),
    ],
)
def test_chat_guides_the_output_as_vllm(client: openai.OpenAI, asked: dict[str, Any], pattern: str) -> None:
    made = client.chat.completions.create(messages=ask("hi"), max_tokens=30, extra_body=asked, **GREEDY)
    assert re.fullmatch(pattern, made.choices[0].message.content)


def test_chat_response_format_enforces_a_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    made = client.chat.completions.create(messages=ask("hi"), response_format=wanted, max_tokens=60, **GREEDY)
    assert json.loads(made.choices[0].message.content)["colour"] in ("red", "blue")
    with pytest.raises(openai.BadRequestError, match="type"):
        bad = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "nonsense"}}}
        client.chat.completions.create(messages=ask("hi"), response_format=bad, **GREEDY)


def test_chat_response_format_enforces_a_structural_tag(client: openai.OpenAI) -> None:
    """Both formats of structural tags work; the model's scripted call has other arguments, but is still parsed."""
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    call = {"name": {"const": "get_weather"}, "arguments": schema | {"additionalProperties": False}}
    schema = {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
    old = {"structures": [{"begin": "<tool_call>", "schema": schema, "end": "</tool_call>"}]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"begin": "<tool_call>", "content": content, "end": "</tool_call>"}
    new = {"format": {"type": "triggered_tags", "tags": [tag], "triggers": ["<tool_call>"]}}
    for kv_format in (old | {"triggers": ["<tool_call>"]}, new):
        wanted: Any = {"type": "structural_tag"} | kv_format
        asked = {"tools": TOOLS, "response_format": wanted, "max_tokens": 60, **GREEDY}
        choice = client.chat.completions.create(messages=ask("weather?"), **asked).choices[0]
        assert choice.message.content.startswith("Let me look.")
        assert [json.loads(made.function.arguments) for made in choice.message.tool_calls][:1] == [{"city": "Rome"}]
        assert client.chat.completions.create(messages=ask("hi"), **asked).choices[0].message.content == "Hello there!"
    with pytest.raises(openai.BadRequestError, match=r"triggers=7: must be a non-empty list") as caught:
        client.chat.completions.create(
            messages=ask("hi"), response_format={"type": "structural_tag", "triggers": 7} | old, **GREEDY
        )
    assert caught.value.param == "structural_tag.triggers"


@pytest.mark.parametrize("is_parallel", [True, False])
def test_chat_strict_tools_follow_their_schemas(client: openai.OpenAI, is_parallel: bool) -> None:
    city: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
    changes = {"strict": True, "parameters": city | {"additionalProperties": False}}
    tools = [{"type": "function", "function": tool["function"] | changes} for tool in TOOLS]
    asked: Any = {"tools": tools, "max_tokens": 200, **GREEDY}
    asked |= {"messages": ask("weather?"), "parallel_tool_calls": is_parallel}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content.startswith("Let me look.")
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Bern")
    assert is_parallel or len(choice.message.tool_calls) == 1
    loose = client.chat.completions.create(**asked | {"tools": TOOLS}).choices[0].message.tool_calls[0]
    assert json.loads(loose.function.arguments) == {"city": "Paris"}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.function\.strict='yes': must be true or false"):
        client.chat.completions.create(
            **asked | {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}
        )


def test_chat_tool_choice_forces_a_call(client: openai.OpenAI) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"unit": {"enum": ["c", "f"]}},
                    "required": ["unit"],
                    "additionalProperties": False,
                },
            },
        }
        for name in ("outside", "inside")
    ]
    body: dict[str, Any] = {"messages": ask("hi"), "tools": tools, "max_tokens": 80, **GREEDY}
    named = {"type": "function", "function": {"name": "inside"}}
    for choice, names in (("required", {"outside", "inside"}), (named, {"inside"})):
        made = client.chat.completions.create(**body, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert made.finish_reason == "tool_calls"
        assert len(made.message.tool_calls) == 1
        call = made.message.tool_calls[0].function
        assert call.name in names
        assert json.loads(call.arguments)["unit"] in ("c", "f")
        chunks = client.chat.completions.create(**body, tool_choice=choice, parallel_tool_calls=False, stream=True)
        pieces = [piece for chunk in chunks for piece in (chunk.choices[0].delta.tool_calls or [])]
        assert pieces[0].function.name == call.name
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.arguments


def test_completions_accept_strings_ids_and_lists(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("one two three ")
    for prompt, echoed in (
        ("one two three ", ["one two three "]),
        (ids, ["one two three "]),
        (["one ", "Hello"], ["one ", "Hello"]),
        ([ids, ids[:1]], ["one two three ", "one "]),
    ):
        made = client.completions.create(prompt=prompt, max_tokens=2, **GREEDY)
        assert [choice.index for choice in made.choices] == list(range(len(echoed)))
        with_echo = client.completions.create(prompt=prompt, max_tokens=2, echo=True, **GREEDY)
        pairs = zip(echoed, made.choices, strict=True)
        assert [choice.text for choice in with_echo.choices] == [text + choice.text for text, choice in pairs]
    assert client.completions.create(prompt="one two three ", max_tokens=5, **GREEDY).choices[0].text == "four five"
    streamed = client.completions.create(prompt=["one ", "Hello"], max_tokens=3, stream=True, **GREEDY)
    by_index = {0: "", 1: ""}
    for chunk in streamed:
        by_index[chunk.choices[0].index] += chunk.choices[0].text
    assert by_index == {0: "two three four ", 1: " there!"}


def test_embeddings_are_pooled_normalized_hidden_states(client: openai.OpenAI, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path).model
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = ["one two three ", "import json", "a b c d e f g " * 60]
    client.completions.create(prompt=prompts[2], max_tokens=1, **GREEDY)  # puts the prompt into the prefix cache
    for pooling in ("last", "mean"):
        made = client.embeddings.create(model="tiny", input=prompts, extra_body={"pooling": pooling})
        assert made.pooling == pooling
        assert made.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in prompts)
        for text, item in zip(prompts, made.data, strict=True):
            with torch.no_grad():
                states = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
            pooled = states[-1] if pooling == "last" else states.mean(0)
            expected = torch.nn.functional.normalize(pooled, dim=0)
            torch.testing.assert_close(torch.tensor(item.embedding), expected, atol=1e-5, rtol=1e-4)
    ids = tokenizer.encode(prompts[0])
    plain = client.embeddings.create(model="tiny", input=ids, encoding_format="float").data[0].embedding
    coded = client.embeddings.create(model="tiny", input=prompts[0], encoding_format="base64").data[0].embedding
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(plain, abs=1e-6)
    short = client.embeddings.create(model="tiny", input=ids, encoding_format="float", dimensions=8).data[0].embedding
    assert short == pytest.approx(np.array(plain[:8]) / np.linalg.norm(plain[:8]), abs=1e-6)
    for limit, kept in ((2, ids[-2:]), (-1, [5] * 1023)):
        given = ids if limit > 0 else [7] + [5] * 1023
        mean = {"pooling": "mean"}
        cut = client.embeddings.create(model="tiny", input=given, extra_body=mean | {"truncate_prompt_tokens": limit})
        assert cut.usage.prompt_tokens == len(kept)
        same = client.embeddings.create(model="tiny", input=kept, extra_body=mean).data[0].embedding
        assert cut.data[0].embedding == pytest.approx(same, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions=9000: tiny has embeddings of 128 elements"):
        client.embeddings.create(model="tiny", input="x", dimensions=9000)


@pytest.mark.parametrize(
    ("path_", "body", "status", "param", "words"),
    [
        ("chat/completions", {}, 400, "messages", "messages is missing: must be a non-empty list"),
        (
            "chat/completions",
            {"messages": [{"role": "wizard", "content": "x"}]},
            400,
            "messages[0].role",
            "must be one",
        ),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
        ("chat/completions", {"messages": ask("x"), "temperature": -1}, 400, "temperature", "finite number ≥ 0"),
        ("chat/completions", {"messages": ask("x"), "n": 0}, 400, "n", "an integer from 1 to 128"),
        ("chat/completions", {"messages": ask("x"), "max_tokens": 5000}, 400, "max_tokens", "supports 1024 in total"),
        ("chat/completions", {"messages": ask("x" * 9000)}, 400, "messages", "supports 1024 in total"),
        ("chat/completions", {"messages": ask("x"), "audio": {}}, 400, "audio", "audio is not supported"),
        ("chat/completions", {"messages": ask("x"), "functions": []}, 400, "functions", "use tools"),
        ("chat/completions", {"messages": ask("x"), "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
        ("chat/completions", {"messages": ask("x"), "tool_choice": "required"}, 400, "tool_choice", "no tools"),
        (
            "chat/completions",
            {"messages": ask("x"), "logit_bias": {"a": 1}},
            400,
            "logit_bias",
            "token ids with numbers",
        ),
        ("chat/completions", {"messages": ask("x"), "stop": [""]}, 400, "stop[0]", "must be a non-empty string"),
        ("chat/completions", {"messages": ask("x"), "stream_options": {}}, 400, "stream_options", "set stream"),
        (
            "chat/completions",
            {"messages": ask("x"), "chat_template_kwargs": {"enable_thinkin": True}},
            *(400, "chat_template_kwargs", "does not use 'enable_thinkin'"),
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x", "annotations": [{"type": "url_citation"}]}]},
            *(400, "messages[0].annotations", "must be empty"),
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            *(400, "messages[0].content[0].type", "must be one of text, refusal"),
        ),
        (
            "chat/completions",
            {
                "messages": [
                    *ask("x"),
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            *(400, "messages[1].tool_calls[0].function.arguments", "JSON text of an object"),
        ),
        (
            "chat/completions",
            {"messages": ask("x"), "guided_regex": "a", "regex": "b"},
            400,
            "regex",
            "only one of them",
        ),
        (
            "chat/completions",
            {"messages": ask("x"), "bad_words": ["a"], "regex": "b"},
            400,
            None,
            "use one",
        ),
        (
            "chat/completions",
            {"messages": ask("x"), "structured_outputs": {}},
            400,
            "structured_outputs",
            "exactly one of",
        ),
        (
            "chat/completions",
            {"messages": ask("x"), "truncate_prompt_tokens": 0},
            400,
            "truncate_prompt_tokens",
            "≥ 1, or -1",
        ),
        ("completions", {"prompt": [5] * 1024}, 400, "prompt", "supports 1024 in total"),
        ("responses", {"input": "x" * 9000}, 400, "input", "supports 1024 in total"),
        ("embeddings", {"input": [5] * 1024}, 400, "input", "1024 tokens; tiny embeds at most 1023"),
        ("completions", {"prompt": [5], "allowed_token_ids": [10**6]}, 400, None, "in allowed_token_ids"),
        ("completions", {"prompt": [5], "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "in a stream"),
        (
            "completions",
            {"prompt": "x", "suffix": "y"},
            400,
            "suffix",
            'not supported; leave it out, or give ""',
        ),
        ("completions", {"prompt": []}, 400, "prompt", "none of them empty"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt", "a list of token ids"),
        *(
            (path, body | {field: value}, 400, param, f"{param}: Invalid type: nope")
            for path, body, field, value, param in (
                ("chat/completions", {"messages": ask("x")}, "response_format", NOPE_FORMAT, "response_format"),
                ("completions", {"prompt": "x", "n": 2}, "response_format", NOPE_FORMAT, "response_format"),
                ("chat/completions", {"messages": ask("x"), "stream": True}, "guided_json", NOPE, "guided_json"),
                (
                    *("completions", {"prompt": "x", "stream": True}),
                    *("structured_outputs", {"json": NOPE}, "structured_outputs"),
                ),
                (
                    *("responses", {"input": "x"}),
                    *("text", {"format": {"type": "json_schema", "name": "x", "schema": NOPE}}, "text.format"),
                ),
                (
                    *("chat/completions", {"messages": ask("x"), "tool_choice": "required"}),
                    *("tools", [{"type": "function", "function": {"name": "f", "parameters": NOPE}}], "tools"),
                ),
            )
        ),
        ("chat/completions", {"messages": ask("x"), "guided_regex": "("}, 400, "guided_regex", "guided_regex: "),
        (
            "chat/completions",
            {
                "messages": ask("x"),
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "schema": NOPE, "end": "</a>"}],
                    "triggers": ["<a>"],
                },
            },
            *(400, "response_format", "Invalid type: nope"),
        ),
        ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of", "only the value of n"),
        ("completions", {"prompt": [10**6]}, 400, None, "expected 0 to"),
        ("completions", [], 400, None, "must be a JSON object"),
        ("nothing", {}, 404, None, "unknown route: POST /v1/nothing; GET /openapi.json lists the routes"),
        ("models", {}, 405, None, "POST is not allowed on /v1/models; use GET"),
    ],
)
def test_openai_routes_refuse_invalid_bodies_with_openai_errors(
    url: str, path_: str, body: Any, status: int, param: str | None, words: str
) -> None:
    answer = httpx.post(f"{url}/v1/{path_}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_chat_ignores_fields_about_the_sender(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        messages=[{"role": "developer", "content": "Be brief."}, *ask("hi")],
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        **GREEDY,
    )
    assert made.choices[0].message.content == "Hello there!"


def test_chat_without_a_template_is_refused(tmp_path: Path, path: Path) -> None:
    for file in path.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    with served(tmp_path, settings={"model_name": "bare"}) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": ask("hi")})
        assert answer.status_code == 400
        assert "bare has no chat template" in answer.json()["error"]["message"]
        done = httpx.post(f"{address}/v1/completions", json={"prompt": "one ", "max_tokens": 2, "temperature": 0})
        assert done.json()["choices"][0]["text"] == "two three "


def test_openapi_describes_the_answers_of_each_route(url: str, path: Path) -> None:
    chat, sampled = {"model": "tiny", "messages": ask("think")}, {"prompt": "hi", "max_tokens": 5}
    ids = {"return_token_ids": True, "prompt_logprobs": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
        ("/generate", {"text": ["hi"], "return_logprob": True, "token_ids_logprob": [5], "return_hidden_states": True}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2, "logprobs": 0, "full_logprobs": True}}),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/chat/completions", chat | ids | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": ask("weather"), "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": ask("hi"), "stop": ["there"]}),
        ("/v1/completions", sampled | ids),
        ("/v1/completions", sampled | {"echo": True, "logprobs": 2, "stop_regex": "."}),
        ("/v1/embeddings", {"input": ["hi", "you"]}),
        ("/v1/responses", {"input": "think"}),
        ("/v1/responses", {"input": "count", "max_output_tokens": 2}),
        ("/v1/messages", chat | {"max_tokens": 40}),
        ("/v1/messages/count_tokens", chat),
        ("/pause_generation", {}),
        ("/continue_generation", {}),
        ("/weights_digest", {}),
        ("/update_weights_from_disk", {"model_path": str(path)}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {}),
    ]
    paths = httpx.get(f"{url}/openapi.json").raise_for_status().json()["paths"]
    described = {route: {name for name, _ in fields_of(_answer_schema(paths, route))} for route, _ in bodies}
    absent = {route: {name.rpartition(".")[2] for name in names} for route, names in described.items()}
    for route, body in bodies:
        answer = httpx.post(f"{url}{route}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        jsonschema_rs.validate(_answer_schema(paths, route), answer.json())
        absent[route] -= _names(answer.json())
    assert absent.pop("/generate") == {"routed_experts", "routed_experts_shape"}, "of a mixture of experts"
    assert set().union(*absent.values()) == set(), absent


def _answer_schema(paths: dict[str, Any], route: str) -> dict[str, Any]:
    schema: dict[str, Any] = paths[route]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert [name for name, text in fields_of(schema) if not text] == []
    return schema


def _names(value: Any) -> set[str]:
    """Return every key in a JSON value."""
    if isinstance(value, list):
        return set().union(*map(_names, value))
    return set(value).union(*map(_names, value.values())) if isinstance(value, dict) else set()
