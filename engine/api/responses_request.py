"""The body of POST /v1/responses (OpenAI), and its conversion to a conversation."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tapscope.core.convert import NonEmptyStr, NonNegative, Positive, PositiveInt, must_be
from tapscope.core.errors import RequestError
from tapscope.engine.api.chat_messages import ChatMessage, read_messages
from tapscope.engine.api.prompting import Conversation
from tapscope.engine.api.request_model import SENDER_FIELDS, RequestModel, read_as
from tapscope.engine.api.sampling_fields import LogitBias, Priority, Strings, TokenId, TopK, response_constraint
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.tools import NamedFunction, NamedToolChoice, Tools, read_tools
from tapscope.engine.params.sampling_params import Fraction, Penalty, Seed, TopP


class TextContent(msgspec.Struct, kw_only=True):
    """Text part of an item; images, files and audio are not supported."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    """The text."""


class InputItem(msgspec.Struct, kw_only=True):
    """An item of ``input``: a message, an earlier call, the output of a call, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Role of the author of a message."""
    content: str | list[TextContent] | None = None
    """Text of a message or of reasoning."""
    call_id: str | None = None
    """Id shared by a call and its output."""
    name: str | None = None
    """Name of the called function."""
    arguments: str | None = None
    """Arguments of the call, as a JSON string."""
    output: str | list[TextContent] | None = None
    """Result of the call."""


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; OpenAI's built-in tools are not supported."""

    type: Literal["function"]
    name: NonEmptyStr
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """A choice of one function."""

    type: Literal["function"]
    name: str
    """Name of the function."""


class TextFormat(msgspec.Struct, kw_only=True):
    """Constraint on the text of the response."""

    type: Literal["text", "json_object", "json_schema"]
    """``json_schema`` requires ``schema``."""
    name: str | None = None
    """Without effect."""
    schema: dict[str, Any] | None = None
    """JSON schema of the answer."""
    strict: bool | None = None
    """Without effect."""
    description: str | None = None
    """Without effect."""


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options for the text of the response."""

    format: TextFormat | None = None
    """Constraint on the answer."""
    verbosity: Literal["medium"] | None = None
    """Only the default is supported."""


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning options; summaries are not supported."""

    effort: str | None = None
    """Sets ``reasoning_effort`` of the chat template."""
    summary: str | None = None
    """Without effect."""


class ResponsesBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /v1/responses; responses are not stored."""

    IGNORED = (*SENDER_FIELDS, "include", "store")
    NEUTRAL = {  # noqa: RUF012
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
    }

    input: Annotated[
        NonEmptyStr | Annotated[list[InputItem], Meta(min_length=1)],
        must_be("a string or a non-empty list of items"),
    ]
    """A string, or items: messages, function calls, their outputs, and reasoning."""
    model: str | None = None
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter. None: the served model."""
    instructions: str | None = None
    """System message that precedes the conversation."""
    max_output_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, reasoning included. None: all that fit."""
    stream: bool = False
    """Respond with server-sent events, as in OpenAI's API."""
    temperature: NonNegative | None = None
    """Divisor of the logits; 0 is greedy. None: the value in generation_config.json, or 1."""
    top_p: TopP | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call; OpenAI's built-in tools are not supported."""
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedTool,
            must_be('"none", "auto", "required" or {"type": "function", "name": ...}'),
        ]
        | None
    ) = None
    """``none``, ``auto``, ``required`` or one function. None: ``auto`` with tools, otherwise ``none``."""
    parallel_tool_calls: bool = True
    """Allow several calls in one answer."""
    text: TextOptions | None = None
    """``format``: ``text``, ``json_object`` or ``json_schema``."""
    reasoning: ReasoningOptions | None = None
    """``effort`` sets ``reasoning_effort`` of the chat template."""
    service_tier: Literal["auto", "default"] | None = None
    """Without effect."""
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Positive | None = None
    logit_bias: LogitBias | None = None
    """Map from token id (a string in JSON) to the value added to its logit."""
    stop: Strings | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; variables that the template does not read are rejected (vLLM, SGLang)."""
    priority: Priority = 0
    """Requests of higher priority are scheduled first, as in SGLang; vLLM schedules lower values first."""
    cache_salt: NonEmptyStr = ""
    """Cached prefixes are shared only between requests with the same salt (vLLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A validated request to POST /v1/responses."""

    conversation: Conversation
    fields: ResponsesBody

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "ResponsesRequest":
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        include = body.get("include") if isinstance(body, dict) else None
        if isinstance(include, list) and "message.output_text.logprobs" in include:
            text = "include: message.output_text.logprobs is not supported; /v1/chat/completions returns logprobs"
            raise RequestError(text, param="include", code="unsupported_parameter")
        for name in ("previous_response_id", "conversation"):
            if isinstance(body, dict) and body.get(name) is not None:
                text = f"{name} is not supported: responses are not stored; send the earlier items in input"
                raise RequestError(text, param=name, code="unsupported_parameter")
        fields = ResponsesBody.parse(body)
        model.check_name(fields.model)
        template = model.require_template()
        messages = read_as(list[ChatMessage], list(as_chat_messages(fields)), "input")
        variables = dict(fields.chat_template_kwargs or {})
        if fields.reasoning is not None and fields.reasoning.effort is not None:
            variables["reasoning_effort"] = fields.reasoning.effort
        given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
        conversation = Conversation(
            messages=read_messages(messages, has_developer_role="developer" in template.sources["default"]),
            sampling={"temperature": 1.0} | dict(model.sampling) | given | _constraint(fields.text),
            tools=_tools(fields),
            max_tokens=fields.max_output_tokens,
            max_tokens_name="max_output_tokens",
            messages_name="input",
            constraint_field="text.format",
            variables=variables,
        )
        return cls(conversation=conversation, fields=fields)


T = TypeVar("T")
_FOLLOWED_BY = {"message": {"content"}, "reasoning": {"content", "tool_calls"}}
"""Item type -> parts of an assistant message after which an item of this type starts a new message."""
_SAMPLING: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_SAMPLING += ("repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
_SAMPLING += ("skip_special_tokens",)


def as_chat_messages(fields: ResponsesBody) -> Iterable[dict[str, Any]]:
    """Convert the items to chat messages; adjacent reasoning, text and calls become one assistant message."""
    if fields.instructions:
        yield {"role": "system", "content": fields.instructions}
    if isinstance(fields.input, str):
        yield {"role": "user", "content": fields.input}
        return
    turn: dict[str, Any] = {}
    for index, item in enumerate(fields.input):
        where = f"input[{index}]"
        if item.type == "function_call_output" or (item.type == "message" and item.role != "assistant"):
            if turn:
                yield turn
                turn = {}
            yield _other_message(item, where)
            continue
        if turn.keys() & _FOLLOWED_BY.get(item.type, set()):
            yield turn
            turn = {}
        _extend(turn, item, where)
    if turn:
        yield turn


def _other_message(item: InputItem, where: str) -> dict[str, Any]:
    """Convert a message of another role than the assistant, or the output of a call."""
    if item.type == "function_call_output":
        call_id = _required(item.call_id, f"{where}.call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(item.output, f"{where}.output")}
    content = _text(item.content, f"{where}.content")
    return {"role": _required(item.role, f"{where}.role"), "content": content}


def _extend(turn: dict[str, Any], item: InputItem, where: str) -> None:
    """Add an item to the assistant message ``turn``."""
    turn.setdefault("role", "assistant")
    match item.type:
        case "message":
            turn["content"] = _text(item.content, f"{where}.content")
        case "reasoning":
            if text := _text(item.content or "", where):
                turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), text)))
        case _:
            name = _required(item.name, f"{where}.name")
            function = {"name": name, "arguments": _required(item.arguments, f"{where}.arguments")}
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": _required(item.call_id, f"{where}.call_id"), "function": function})


def _required(value: T | None, where: str) -> T:
    if value is None:
        raise RequestError(f"{where} is missing", param=where)
    return value


def _text(content: str | Sequence[TextContent] | None, where: str) -> str:
    """Return the content as one string; parts are joined by newlines. Raises RequestError if it is missing."""
    if content is None:
        raise RequestError(f"{where} is missing", param=where)
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tools(fields: ResponsesBody) -> Tools:
    """Convert the functions and the tool choice to the format of chat completions."""
    tools = [read_as(FunctionTool, tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())]
    definitions = []
    for tool in tools:
        values = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
        function = {name: value for name, value in values.items() if value is not None}
        definitions.append({"type": "function", "function": function})
    choice = fields.tool_choice
    if isinstance(choice, NamedTool):
        named = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
        return read_tools(definitions, named, is_parallel=fields.parallel_tool_calls)
    return read_tools(definitions, choice, is_parallel=fields.parallel_tool_calls)


def _constraint(options: TextOptions | None) -> dict[str, str]:
    """Return the constraint of ``text.format`` as sampling arguments; empty without a constraint."""
    if options is None or options.format is None:
        return {}
    if options.format.type != "json_schema":
        return response_constraint({"type": options.format.type})
    return {"json_schema": json.dumps(_required(options.format.schema, "text.format.schema"))}
