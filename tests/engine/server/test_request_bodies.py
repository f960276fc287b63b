"""Arbitrary bodies: an invalid request raises a one-sentence error, and no other exception ever occurs."""

import copy
from collections.abc import Callable
from typing import Any

import pydantic_core
import pytest
from chat_templates import write_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.errors import UsageError
from tapscope.engine.api.chat_request import ChatRequest
from tapscope.engine.api.completions import CompletionRequest
from tapscope.engine.api.embeddings import EmbeddingRequest
from tapscope.engine.api.messages_request import MessagesRequest, parse_count
from tapscope.engine.api.prompting import encode_conversation, make_prompt
from tapscope.engine.api.responses_request import ResponsesRequest
from tapscope.engine.api.served_model import ServedModel

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "$defs": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "seed": 3,
    "stop": ["a"],
    "n": 2,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "chat_template_kwargs": {"enable_thinking": False},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "truncate_prompt_tokens": 500,
    "add_special_tokens": True,
    "priority": 1,
    "rid": "x",
    "user": "me",
}
COMPLETION = {
    "prompt": ["a", [1, 2]],
    "echo": True,
    "logprobs": 1,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    **{name: CHAT[name] for name in ("max_tokens", "stream", "stream_options", "seed", "stop", "n", "logit_bias")},
}
MASKED = {"prompt": "a", "allowed_token_ids": [5, 6, 7], "bad_words": ["a"], "return_token_ids": True, "stream": True}
GUIDED = {
    "prompt": "a",
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_decoding_backend": "auto",
    "prompt_logprobs": 2,
    "truncate_prompt_tokens": -1,
}
EMBEDDING = {"model": "tiny", "input": ["a", [1, 2]], "encoding_format": "base64", "pooling": "mean", "dimensions": 4}
MESSAGES = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y", "is_error": True}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 4},
    "metadata": {"user_id": "me"},
    "stream": False,
}
RESPONSE = {
    "model": "tiny",
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": {"type": "function", "name": "f"},
    "max_output_tokens": 9,
    "text": {"format": {"type": "text"}},
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "store": True,
}
COUNT = {name: MESSAGES[name] for name in ("model", "system", "messages", "tools", "tool_choice", "thinking")}
KINDS: dict[str, tuple[dict[str, Any], Callable[[Any, ServedModel], Any]]] = {
    "chat": (CHAT, lambda body, model: make_prompt(model, ChatRequest.parse(body, model).conversation)),
    "completion": (COMPLETION, CompletionRequest.parse),
    "masked": (MASKED, CompletionRequest.parse),
    "guided": (GUIDED, CompletionRequest.parse),
    "embedding": (EMBEDDING, EmbeddingRequest.parse),
    "messages": (MESSAGES, lambda body, model: make_prompt(model, MessagesRequest.parse(body, model).conversation)),
    "response": (RESPONSE, lambda body, model: make_prompt(model, ResponsesRequest.parse(body, model).conversation)),
    "count": (COUNT, lambda body, model: encode_conversation(model, parse_count(body, model))),
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**63, 10**400, 0.5, -0.0, 1e308, 1e-320, "", "a", "auto", "text", "required", [], {}]),
    st.sampled_from([[[]], [{}], {"type": "text"}, {"type": "function"}, ["", 1], {"$defs": 3}, "\x00", "\U0010ffff"]),
    st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2), max_leaves=4),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_chat(tmp_path_factory.mktemp("chat"), "qwen")
    return ServedModel.read(folder, name="tiny", max_positions=4096)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, item in items for place in places(item, (*path, key))]


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of ``body`` with ``value`` at ``path``."""
    if not path:
        return value
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def refusal(parse: Callable[[Any, ServedModel], Any], body: Any, model: ServedModel) -> str:
    """Return the error message for ``body``, empty if it is valid; other exceptions propagate."""
    try:
        parse(body, model)
    except UsageError as error:
        return str(error)
    return ""


def check_refusal(text: str) -> None:
    """Check that the message is one short sentence."""
    assert "\n" not in text
    assert len(text) < 1500


@pytest.mark.parametrize("kind", KINDS)
def test_parse_reads_a_complete_body(model: ServedModel, kind: str) -> None:
    body, parse = KINDS[kind]
    assert parse(body, model)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_parse_reads_or_refuses_arbitrary_values(model: ServedModel, kind: str, data: st.DataObject) -> None:
    body, parse = KINDS[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        body = changed(body, data.draw(st.sampled_from(places(body))), data.draw(ODD))
    check_refusal(refusal(parse, body, model))


@pytest.mark.parametrize("kind", KINDS)
def test_parse_reads_or_refuses_deep_bodies(model: ServedModel, kind: str) -> None:
    body, parse = KINDS[kind]
    deep: Any = {}
    for _ in range(190):
        deep = {"properties": {"a": deep}}
    name = "tools" if "tools" in body else "logit_bias"
    tools = ([{"name": "f", "input_schema": deep}], [{"function": {"name": "f", "parameters": deep}}])
    for value in (deep, [deep], *tools):
        check_refusal(refusal(parse, body | {name: value}, model))


def test_decode_json_refuses_lone_surrogates() -> None:
    with pytest.raises(ValueError):
        pydantic_core.from_json(b'{"a": "\\ud800"}')
