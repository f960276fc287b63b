"""Validate OpenAI's chat messages and convert them to the format of chat templates."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import must_be
from tapscope.core.errors import RequestError
from tapscope.engine.text.chat_template import Message


class TextPart(msgspec.Struct, kw_only=True, tag="text"):
    """Text part of a message."""

    text: str
    """The text."""


class RefusalPart(msgspec.Struct, kw_only=True, tag="refusal"):
    """A refusal from an earlier turn."""

    refusal: str
    """Text of the refusal, which becomes part of the message."""


class FunctionCall(msgspec.Struct, kw_only=True):
    """Name and arguments of a function call; OpenAI encodes the arguments as a JSON string."""

    name: str
    """Name of the function."""
    arguments: str | dict[str, Any] | None = None
    """An object, or its JSON encoding as in OpenAI's API."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call from an earlier turn."""

    function: FunctionCall
    """The called function and its arguments."""
    id: str | None = None
    """Id of the call, which a tool message refers to."""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message; images, audio and files are not supported."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Role of the author; ``developer`` becomes ``system`` if the chat template has no ``developer`` role."""
    content: str | list[TextPart | RefusalPart] | None = None
    """A string, or text parts, which are joined by newlines."""
    name: str | None = None
    """Name of the author, for the chat template."""
    tool_calls: list[ToolCall] | None = None
    """Tool calls of an assistant message."""
    tool_call_id: str | None = None
    """In a tool message: id of the call that it answers."""
    reasoning_content: str | None = None
    """Reasoning of an assistant message."""
    reasoning: str | None = None
    """Newer name of ``reasoning_content`` in vLLM."""
    refusal: str | None = None
    """Used as the content if ``content`` is missing."""
    type: Literal["text", "message"] | None = None
    """Without effect; sent by lm-evaluation-harness."""
    annotations: Annotated[list[Any], Meta(max_length=0), must_be("empty")] | None = None
    """Part of OpenAI's responses that clients send back; must be empty, as citations are not supported."""


def read_messages(messages: list[ChatMessage], *, has_developer_role: bool) -> list[Message]:
    """Convert chat messages to the format of chat templates; the RequestError names the message and field.

    Unless the template has a ``developer`` role, developer messages become system messages (the role's former name).
    """
    read = [_read(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for message in read:
        if message["role"] == "developer" and not has_developer_role:
            message["role"] = "system"
    return read


def _read(given: ChatMessage, where: str) -> Message:
    message: Message = {"role": given.role, "content": _content(given)}
    message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(given, name)) is not None}
    reasoning = given.reasoning_content or given.reasoning
    calls = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given.tool_calls or ())]
    if given.role != "assistant" and (reasoning or calls):
        rule = "only an assistant's message has tool_calls or reasoning_content"
        raise RequestError(f"{where}.role={given.role!r}: {rule}", param=f"{where}.role")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if given.role != "assistant" and given.content is None:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    return message


def _content(given: ChatMessage) -> str:
    """Return the content as one string; parts are joined by newlines."""
    if isinstance(given.content, list):
        return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in given.content)
    return given.content if given.content is not None else given.refusal or ""


def _read_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Convert a tool call and decode its arguments to an object, as chat templates expect."""
    arguments: Any = call.function.arguments or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        name = f"{where}.function.arguments"
        raise RequestError(f"{name}={call.function.arguments!r:.80}: must be the JSON text of an object", param=name)
    named = {} if call.id is None else {"id": call.id}
    return named | {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
