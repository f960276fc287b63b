"""OpenAI's chat messages, checked, in the form that chat templates read."""

import json
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.params.json_fields import Fields
from tapscope.engine.text.chat_template import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal")


def read_messages(fields: Fields, *, has_developer_role: bool) -> list[Message]:
    """The conversation of a body; raises RequestError naming the message and field.

    A template that knows no developer gets a system message instead, which is what the role was called before.
    """
    given = fields.objects("messages")
    if not given:
        raise RequestError("messages is missing or empty; give at least one message", param="messages")
    messages = [_read(message) for message in given]
    for message in messages:
        if message["role"] == "developer" and not has_developer_role:
            message["role"] = "system"
    return messages


def _read(fields: Fields) -> Message:
    fields.refuse_unknown(_FIELDS)
    if fields.choice("role", _ROLES) is None:
        raise RequestError(
            f"{fields.path('role')} is missing; roles are {', '.join(_ROLES)}", param=fields.path("role")
        )
    role = fields.required_text("role")
    message: Message = {"role": role, "content": _content(fields)}
    for name in ("name", "tool_call_id"):
        if fields.has(name):
            message[name] = fields.text(name)
    thoughts = fields.text("reasoning_content") or fields.text("reasoning")
    calls = [_read_call(call) for call in fields.objects("tool_calls")]
    if role != "assistant" and (thoughts or calls):
        raise fields.wrong("role", "only an assistant's message has tool_calls or reasoning_content")
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    if role != "assistant" and not fields.has("content"):
        raise RequestError(f"{fields.path('content')} is missing", param=fields.path("content"))
    return message


def _content(fields: Fields) -> str:
    """A text, or the texts of a list of parts, one a line."""
    content = fields.values.get("content")
    if content is None:
        return fields.text("refusal") or ""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part) for part in fields.objects("content"))


def _part(part: Fields) -> str:
    kind = part.required_text("type")
    if kind not in ("text", "refusal"):
        raise part.wrong("type", "only text parts are supported: this engine reads no images, audio or files")
    return part.required_text(kind)


def _read_call(call: Fields) -> dict[str, Any]:
    """A call of an earlier turn; templates want its arguments as an object, OpenAI sends them as a JSON text."""
    function = call.object("function")
    if call.values.get("type", "function") != "function" or function is None:
        raise RequestError(f"{call.where} must be a call of the type function", param=call.where)
    text = function.values.get("arguments") or "{}"
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong("arguments", "it must be the JSON text of an object")
    called = {"name": function.required_text("name"), "arguments": arguments}
    named = {"id": call.text("id")} if call.has("id") else {}
    return named | {"type": "function", "function": called}
