"""Chat templates render as in transformers; reasoning and tool calls are parsed however the text is split."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from chat_templates import LLAMA3, QWEN, SPECIAL, write_chat
from engine_http import served
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from scripted import make_scripted
from transformers import AutoTokenizer

from tapscope.core.errors import CheckpointError, RequestError
from tapscope.engine.api.anthropic_messages import read_system, read_turns
from tapscope.engine.api.chat_messages import read_messages
from tapscope.engine.api.chat_request import ChatBody
from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.harmony_parser import HarmonyParser
from tapscope.engine.api.messages_request import CountBody
from tapscope.engine.api.prompting import Conversation, make_prompt
from tapscope.engine.api.reasoning import ReasoningSplitter
from tapscope.engine.api.reply import Reply, ReplyFormat
from tapscope.engine.api.served_model import ServedModel, ToolFormatName
from tapscope.engine.api.tagged_call_parser import DEEPSEEK, KIMI_K2, MISTRAL, TaggedCallParser
from tapscope.engine.api.tool_formats import TOOL_FORMATS, tool_format_of
from tapscope.engine.api.tool_parsers import HermesParser, LlamaParser, NamedToolCall, RequiredToolCalls
from tapscope.engine.api.tools import Tools
from tapscope.engine.api.xml_call_parser import GLM45, QWEN3_CODER, XmlCallParser, argument_value
from tapscope.engine.text.chat_template import ChatTemplate
from tapscope.engine.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is the weather in <Köln> & 'Bonn'?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TALKS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "three turns": [USER, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "And\n\nnow?"}],
    "thoughts": [USER, {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nhm\n"}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather, <b>bold</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    named = [{"name": "default", "template": LLAMA3}, {"name": "tool_use", "template": QWEN}]
    return {
        "qwen": write_chat(root / "qwen", "qwen"),
        "llama3": write_chat(root / "llama3", "llama3"),
        "mistral": write_chat(root / "mistral", "mistral"),
        "named": write_chat(root / "named", "llama3", named),
    }


def _rendered(theirs: Any, conversation: Any, tools: Any, options: dict[str, Any]) -> tuple[str, str]:
    """Render with transformers; return (prompt, error message), one of which is empty."""
    try:
        return theirs.apply_chat_template(conversation, tools=tools, tokenize=False, **options), ""
    except TemplateError as error:
        return "", str(error)


@pytest.mark.parametrize("style", ["qwen", "llama3", "mistral", "named"])
def test_chat_template_matches_transformers(folders: dict[str, Path], style: str) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folders[style]), ChatTemplate.find(folders[style])
    tokenizer = Tokenizer.find(folders[style])
    compared = refused = 0
    for conversation in TALKS.values():
        for tools in (None, [TOOL]):
            for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False, "date_string": "today"}):
                options = {"add_generation_prompt": True} | options
                expected, refusal = _rendered(theirs, conversation, tools, options)
                if refusal:
                    with pytest.raises(RequestError, match="the chat template rejects these messages") as caught:
                        ours.render(conversation, tools=tools, **options)
                    assert refusal in str(caught.value)
                    refused += 1
                    continue
                text = ours.render(conversation, tools=tools, **options)
                assert text == expected
                ids = theirs.apply_chat_template(conversation, tools=tools, tokenize=True, return_dict=False, **options)
                assert tokenizer.encode(text, add_special_tokens=False) == ids
                compared += 1
    assert compared >= 15
    assert refused == (12 if style == "mistral" else 0)


def test_chat_template_continues_the_final_message_like_transformers(folders: dict[str, Path]) -> None:
    for style in ("qwen", "llama3"):
        theirs, ours = AutoTokenizer.from_pretrained(folders[style]), ChatTemplate.find(folders[style])
        for prefill in ("The weather", "The weather \n", "{"):
            conversation = [USER, {"role": "assistant", "content": prefill}]
            expected = theirs.apply_chat_template(conversation, tokenize=False, continue_final_message=True)
            assert ours.render(conversation, add_generation_prompt=False, continue_final_message=True) == expected


def test_chat_template_find_looks_where_transformers_does(folders: dict[str, Path], tmp_path: Path) -> None:
    write_chat(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ChatTemplate.find(tmp_path)
    for tools in (None, [TOOL]):
        assert ours.render([USER], tools=tools) == theirs.apply_chat_template([USER], tools=tools, tokenize=False)
    assert ours.reads("tools", tools=True)
    assert not ours.reads("tools")
    assert ChatTemplate.find(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not readable JSON"),
        ('{"chat_template": "{% if %}"}', "is not valid Jinja"),
        ('{"chat_template": [{"name": "default"}]}', "chat_template must be a string or a list"),
        ("[]", "must contain a JSON object"),
    ],
)
def test_chat_template_raises_checkpoint_error_when_broken(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.find(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set x = cycler.__init__.__globals__ %}{{ x.os }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_chat_template_sandbox_refuses_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template rejects"):
        ChatTemplate({"default": source}, {}, "here").render([USER])


def test_tokenizer_token_bytes_concatenate_to_the_text(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.find(folders["qwen"])
    text = "naïve 漢字 \U0001f600\n\tdef f(x): <think>"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert any(b"\xf0" in tokenizer.token_bytes(i) or tokenizer.token_bytes(i) == b"\x9f" for i in ids)
    assert tokenizer.token_bytes(10**6) == b""


def test_read_messages_and_read_turns_give_equal_messages() -> None:
    openai = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "so?"},
    ]
    anthropic = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = CountBody.parse({"model": "tiny", "system": system, "messages": anthropic})
    expected = read_messages(ChatBody.parse({"messages": openai}).messages, has_developer_role=False)
    assert [*read_system(body.system), *read_turns(body.messages)] == expected


Parser = Any
CITY = '{"city": "a \\"</tool_call>\\" {", "n": [1, {}]}'
HERMES = (
    f'Sure. <tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "time"}</tool_call> Done.\n'
)
CALLS = [
    ToolCallStart(0, "weather"),
    ToolCallArguments(0, CITY),
    ToolCallStart(1, "time"),
    ToolCallArguments(1, "{}"),
]
XML_CALLS = [
    ToolCallStart(0, "weather"),
    ToolCallArguments(0, '{"city": "12 </tool_call> {", "days": [1, true]}'),
    ToolCallStart(1, "time"),
    ToolCallArguments(1, "{}"),
]
TYPED = Tools(definitions=(TOOL,), choice="auto")
REPLIES: list[tuple[Callable[[], Parser], str, list[Delta]]] = [
    (
        HermesParser,
        HERMES,
        [
            ContentDelta("Sure."),
            ToolCallStart(0, "weather"),
            ToolCallArguments(0, CITY),
            ToolCallStart(1, "time"),
            ToolCallArguments(1, "{}"),
            ContentDelta("Done.\n"),
        ],
    ),
    (HermesParser, "<tool_call>oops</tool_call>", [ContentDelta("<tool_call>oops</tool_call>")]),
    (HermesParser, '<tool_call>{"name": "f", "arg', [ToolCallStart(0, "f")]),
    (HermesParser, '<tool_call>{"nam', [ContentDelta('<tool_call>{"nam')]),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"} tail',
        [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": 1}'), ContentDelta("tail")],
    ),
    (
        lambda: LlamaParser(["f", "g"]),
        ' {"name": "f", "parameters": {"a": 1}};\n{"name": "g"}',
        [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": 1}'), ToolCallStart(1, "g"), ToolCallArguments(1, "{}")],
    ),
    (lambda: LlamaParser(["f"]), '{"name": "Bob", "age": 3}', [ContentDelta('{"name": "Bob", "age": 3}')]),
    (
        lambda: LlamaParser(["f"]),
        'Look: <|python_tag|>{"name": "f", "parameters": {}}',
        [ContentDelta("Look:"), ToolCallStart(0, "f"), ToolCallArguments(0, "{}")],
    ),
    (
        lambda: LlamaParser(["f"]),
        '<|python_tag|>brave.call(query="x;y", n=3)',
        [ToolCallStart(0, "brave"), ToolCallArguments(0, '{"query": "x;y", "n": 3}')],
    ),
    (lambda: LlamaParser(["f"]), "<|python_tag|>print(1)", [ContentDelta("print(1)")]),
    (
        lambda: ReasoningSplitter(is_open=False),
        "\n<think>\nfirst </thin\n\nsecond\n</think>\n\nAnswer <think>",
        [ReasoningDelta("first </thin\n\nsecond"), ContentDelta("Answer <think>")],
    ),
    (lambda: ReasoningSplitter(is_open=True), " hm </think>", [ReasoningDelta("hm")]),
    (lambda: ReasoningSplitter(is_open=False), "  plain <think>x</think>", [ContentDelta("  plain <think>x</think>")]),
    (lambda: NamedToolCall("f"), f" {CITY} ", [ToolCallStart(0, "f"), ToolCallArguments(0, CITY)]),
    (
        RequiredToolCalls,
        '[{"name": "f", "parameters": {"a": [1]}},\n {"name": "g", "parameters": {}}]',
        [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": [1]}'), ToolCallStart(1, "g"), ToolCallArguments(1, "{}")],
    ),
    (
        lambda: TaggedCallParser(DEEPSEEK),
        "Sure.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [ContentDelta("Sure."), *CALLS],
    ),
    (
        lambda: TaggedCallParser(DEEPSEEK),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>Done.",
        [*CALLS, ContentDelta("Done.")],
    ),
    (
        lambda: TaggedCallParser(KIMI_K2),
        f"Look. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4<|tool_call_argument_begin|>{CITY}"
        "<|tool_call_end|><|tool_call_begin|>functions.time:5<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            ContentDelta("Look."),
            ToolCallStart(0, "weather", "functions.weather:4"),
            CALLS[1],
            ToolCallStart(1, "time", "functions.time:5"),
            CALLS[3],
        ],
    ),
    (lambda: TaggedCallParser(KIMI_K2), "<|tool_call_begin|>oops", [ContentDelta("<|tool_call_begin|>oops")]),
    (
        lambda: TaggedCallParser(MISTRAL),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}}}, {{"name": "time", "arguments": {{}}}}]',
        CALLS,
    ),
    (
        lambda: TaggedCallParser(MISTRAL),
        f"Look.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{CITY}[TOOL_CALLS]time[ARGS]{{}}",
        [ContentDelta("Look."), ToolCallStart(0, "weather", "abcdefghi"), *CALLS[1:]],
    ),
    (
        lambda: XmlCallParser(GLM45, TYPED),
        "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12 </tool_call> {</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1, true]</arg_value>\n</tool_call>\n<tool_call>time</tool_call> Done.",
        [ContentDelta("Sure."), *XML_CALLS, ContentDelta("Done.")],
    ),
    (
        lambda: XmlCallParser(QWEN3_CODER, TYPED),
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\n12 </tool_call> {\n</parameter>\n<parameter=days>\n"
        "[1, true]\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=time></function></tool_call> Done.",
        [ContentDelta("Sure."), *XML_CALLS, ContentDelta("Done.")],
    ),
    (
        lambda: XmlCallParser(GLM45, TYPED),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>da",
        [ToolCallStart(0, "weather"), ToolCallArguments(0, '{"city": "x"')],
    ),
    (
        HarmonyParser,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|><|call|>",
        [ReasoningDelta("hm"), ContentDelta("Look."), *CALLS],
    ),
    (
        lambda: HarmonyParser(separates_reasoning=False),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [ContentDelta("hm\nYes.")],
    ),
    (HarmonyParser, "<|channel|>analysis to=python", []),
    (HarmonyParser, "plain", [ContentDelta("plain")]),
]


def read(parser: Parser, pieces: Sequence[str]) -> list[Delta]:
    """Feed ``pieces`` to a parser and return its deltas, with adjacent deltas of the same kind joined."""
    joined: list[Delta] = []
    for index, piece in enumerate([*pieces, ""]):
        for delta in parser.feed(piece, is_final=index == len(pieces)):
            last = joined[-1] if joined else None
            if (
                isinstance(delta, ToolCallArguments)
                and isinstance(last, ToolCallArguments)
                and last.index == delta.index
            ):
                joined[-1] = ToolCallArguments(delta.index, last.text + delta.text)
            elif isinstance(delta, ContentDelta | ReasoningDelta) and type(last) is type(delta):
                joined[-1] = type(delta)(last.text + delta.text)
            else:
                joined.append(delta)
    return joined


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Split ``text`` at ``places`` (modulo its length)."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("make", "text", "expected"), REPLIES, ids=[text[:20].strip() for _, text, _ in REPLIES])
@settings(max_examples=25)
@given(places=st.lists(st.integers(0, 400), max_size=8))
def test_reply_is_independent_of_chunking(
    make: Callable[[], Parser], text: str, expected: list[Delta], places: list[int]
) -> None:
    assert read(make(), cut(text, places)) == expected
    assert read(make(), list(text)) == expected


ALPHABET = st.sampled_from(
    [
        *'{}[]":, \n;',
        "name",
        "arguments",
        "f",
        "1",
        "\\",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
    ]
)
MAKERS: dict[str, Callable[[], Parser]] = {
    "reasoning": lambda: ReasoningSplitter(is_open=False),
    "required": RequiredToolCalls,
} | {name: functools.partial(form.make_parser, TYPED) for name, form in TOOL_FORMATS.items()}
_OWN_WORDS = {
    "deepseek": (*DEEPSEEK.all, "```json"),
    "kimi_k2": (*KIMI_K2.all, "functions.f:0"),
    "mistral": (*MISTRAL.all, "[CALL_ID]"),
    "glm45": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "qwen3_coder": ("<function=f>", "<parameter=a>", "</parameter>", "</function>"),
    "gpt_oss": (*TOOL_FORMATS["gpt_oss"].tags, "analysis", "to=functions.f "),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=100)
@given(data=st.data(), places=st.lists(st.integers(0, 400), max_size=8))
def test_tool_parsers_are_independent_of_chunking(name: str, data: st.DataObject, places: list[int]) -> None:
    make, own = MAKERS[name], _OWN_WORDS.get(name)
    word = st.one_of(ALPHABET, st.sampled_from(own)) if own else ALPHABET
    text = "".join(data.draw(st.lists(word, max_size=25)))
    assert read(make(), cut(text, places)) == read(make(), [text]) == read(make(), list(text))


def test_tool_parser_streams_arguments() -> None:
    parser = HermesParser()
    assert list(parser.feed('Hi <tool_call>{"name": "weather", "arguments": {"city": "Kö')) == [
        ContentDelta("Hi"),
        ToolCallStart(0, "weather"),
        ToolCallArguments(0, '{"city": "Kö'),
    ]
    assert list(parser.feed("ln")) == [ToolCallArguments(0, "ln")]


def test_tools_schema_has_every_tool_and_lifts_definitions() -> None:
    described = {
        "name": "f",
        "parameters": {"$defs": {"X": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/X"}}},
    }
    tools = ({"type": "function", "function": described}, {"type": "function", "function": {"name": "g"}})
    schema = json.loads(Tools(tools, "required", is_parallel=False).schema())
    assert schema["$defs"] == {"X": {"type": "integer"}}
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["f", "g"]
    assert json.loads(Tools(tools, "named", "f").schema())["properties"] == {"x": {"$ref": "#/$defs/X"}}
    clash = ({"type": "function", "function": {"name": "h", "parameters": {"$defs": {"X": {}}}}},)
    with pytest.raises(RequestError, match=r"two tools define \$defs.X differently"):
        Tools(tools + clash, "required").schema()


GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
SCRIPTS = {
    "default": ["Hello", "<|eom_id|>", " there"],
    "weather": ["<|python_tag|>", '{"name": "weather", ', '"parameters": {"city": ', '"Paris"', "}}"],
}


def test_make_prompt_hides_llama_special_tokens_from_the_text(tmp_path: Path) -> None:
    path = make_scripted(tmp_path / "m", LLAMA3, SCRIPTS, SPECIAL["llama3"])
    with served(path, settings={"model_name": "tiny"}) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for tools in ({"tools": [TOOL]}, {}):
            body: dict[str, Any] = GREEDY | tools
            conversation = [{"role": "user", "content": "hi"}]
            assert (
                client.chat.completions.create(messages=conversation, **body).choices[0].message.content
                == "Hello there"
            )
            chunks = client.chat.completions.create(messages=conversation, stream=True, **body)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there"
        called = client.chat.completions.create(
            messages=[{"role": "user", "content": "weather"}], tools=[TOOL], **GREEDY
        )
        call = called.choices[0].message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
        assert called.choices[0].finish_reason == "tool_calls"
        city = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
        strict: Any = {"name": "weather", "strict": True, "parameters": city | {"additionalProperties": False}}
        called = client.chat.completions.create(
            messages=[{"role": "user", "content": "weather"}],
            tools=[{"type": "function", "function": strict}],
            parallel_tool_calls=False,
            **GREEDY,
        )
        assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}
        client.close()


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1.5", "1.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        (None, '{"a": [1]}', {"a": [1]}),
        (None, "two words", "two words"),
        (None, "'quoted'", "'quoted'"),
    ],
)
def test_argument_value_follows_the_schema(schema: object, text: str, value: object) -> None:
    assert argument_value(text, schema) == value


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ call | tojson }}", "hermes"),
        ("{{ '<tool_call>' + call.name }}<arg_key>", "glm45"),
        ("{{ '<tool_call><function=' }}<parameter=", "qwen3_coder"),
        ("{{ '<|start|>assistant<|channel|>' }}", "gpt_oss"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
        ("{{ '<|tool_call_begin|>' + call.id }}", "kimi_k2"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        (LLAMA3, "llama3"),
        (QWEN, "hermes"),
        ("{{ message.content }}", None),
    ],
)
def test_tool_format_of_recognizes_the_template(template: str, name: str | None) -> None:
    form = tool_format_of(template)
    assert (form and form.name) == name


def test_tool_formats_are_the_choices_of_the_setting() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", "none", *TOOL_FORMATS}
    assert all(name == form.name for name, form in TOOL_FORMATS.items())


def test_reply_gives_calls_the_identifiers_of_their_format() -> None:
    tools = Tools(definitions=(TOOL,), choice="auto")
    call = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    deltas = Reply(ReplyFormat(tools=tools, tool_format=TOOL_FORMATS["kimi_k2"])).feed(call * 2, is_final=True)
    ids = [delta.id for delta in deltas if isinstance(delta, ToolCallStart)]
    assert ids == ["functions.weather:0", "functions.weather:1"]
    forced = Tools(definitions=(TOOL,), choice="named", named="weather")
    deltas = Reply(ReplyFormat(tools=forced, tool_format=TOOL_FORMATS["mistral"])).feed("{}", is_final=True)
    assert isinstance(deltas[0], ToolCallStart)
    assert len(deltas[0].id) == 9
    assert deltas[0].id.isalnum()


GPT_OSS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{#- calls: <|start|>assistant<|channel|>commentary to=functions.NAME #}
"""
GPT_OSS_SCRIPT = [
    *("<|channel|>", "analysis", "<|message|>", "Two", " plus", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>commentary to=functions.weather ", "<|constrain|>", "json<|message|>", '{"city": ', '"Paris"', "}"),
]


def test_gpt_oss_channels_reach_openai_clients(tmp_path: Path) -> None:
    path = make_scripted(tmp_path / "m", GPT_OSS, {"default": GPT_OSS_SCRIPT}, list(TOOL_FORMATS["gpt_oss"].tags))
    with served(path, settings={"model_name": "tiny"}) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        talk: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(messages=talk, tools=[TOOL], **GREEDY)
        choice = answer.choices[0]
        assert choice.message.reasoning_content == "Two plus"
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2
        assert not choice.message.content
        call = choice.message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
        assert choice.finish_reason == "tool_calls"
        chunks = client.chat.completions.create(messages=talk, tools=[TOOL], stream=True, **GREEDY)
        pieces = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "Two plus"
        plain = client.chat.completions.create(messages=talk, **GREEDY).choices[0]
        assert (plain.message.reasoning_content, plain.message.content) == ("Two plus", '{"city": "Paris"}')
        schema = {"type": "object", "properties": {"n": {"const": 4}}, "required": ["n"], "additionalProperties": False}
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        made = client.chat.completions.create(messages=talk, response_format=wanted, **GREEDY).choices[0].message
        assert json.loads(made.content) == {"n": 4}
        strict: Any = TOOL["function"] | {"strict": True, "parameters": schema}
        tools: Any = [{"type": "function", "function": strict}]
        called = client.chat.completions.create(messages=talk, tools=tools, parallel_tool_calls=False, **GREEDY)
        assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"n": 4}
        client.close()


@pytest.mark.parametrize(
    ("variables", "sampling", "thinks"),
    [
        ({"reasoning_effort": "none"}, {}, False),
        ({"reasoning_effort": "low"}, {}, True),
        ({"reasoning_effort": "high", "enable_thinking": False}, {}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, {}, True),
        ({"reasoning_effort": "high"}, {"regex": "a"}, False),  # constrained from the first token
    ],
)
@pytest.mark.parametrize("reads_effort", [False, True])
def test_reasoning_effort_enables_thinking_unless_it_is_none(
    tmp_path: Path, variables: dict[str, Any], sampling: dict[str, Any], thinks: bool, reads_effort: bool
) -> None:
    effort = "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}" if reads_effort else ""
    model = ServedModel.read(write_chat(tmp_path / "m", "qwen", effort + QWEN), name="tiny", max_positions=512)
    prompt = make_prompt(model, Conversation(messages=[USER], sampling=sampling, variables=variables))
    assert model.tokenizer is not None
    text = model.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (not thinks))
    assert text.startswith(f"Effort: {variables['reasoning_effort']}\n") == reads_effort


def test_reasoning_effort_is_refused_if_the_template_does_not_reason(tmp_path: Path) -> None:
    model = ServedModel.read(write_chat(tmp_path / "m", "llama3"), name="tiny", max_positions=512)
    with pytest.raises(RequestError, match="the chat template of tiny does not use 'reasoning_effort'") as caught:
        make_prompt(model, Conversation(messages=[USER], sampling={}, variables={"reasoning_effort": "low"}))
    assert caught.value.param == "reasoning_effort"


def test_make_prompt_refuses_strict_tools_without_json_arguments(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "m", "qwen")
    model = ServedModel.read(path, name="tiny", max_positions=512, tool_format="glm45")
    strict = TOOL | {"function": TOOL["function"] | {"strict": True}}
    tools = Tools(definitions=(strict,), choice="auto")
    with pytest.raises(RequestError, match=r"writes calls in the format glm45; set strict to false"):
        make_prompt(model, Conversation(messages=[USER], sampling={}, tools=tools))
