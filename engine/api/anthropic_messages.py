"""Anthropic's messages, system text and tools in OpenAI's form, which chat templates read."""

import json
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.api.tools import Tools
from tapscope.engine.params.json_fields import Fields
from tapscope.engine.text.chat_template import Message

_TEXT_ONLY = "only text is supported: this engine reads no images, documents or search results"
_BLOCK = ("type", "text", "cache_control", "citations")


def read_system(fields: Fields) -> list[Message]:
    """``system`` as a message of its own, none when there is none."""
    text = _texts(fields, "system", _TEXT_ONLY) if fields.has("system") else ""
    return [{"role": "system", "content": text}] if text else []


def read_turns(fields: Fields) -> list[Message]:
    """The turns of ``messages``; a turn with tool results becomes one message for each, and one for its text."""
    turns = fields.objects("messages")
    if not turns:
        raise RequestError("messages is missing or empty; give at least one message", param="messages")
    messages: list[Message] = []
    for turn in turns:
        turn.refuse_unknown(("role", "content"))
        if turn.choice("role", ("user", "assistant")) is None:
            raise RequestError(f"{turn.path('role')} is missing; roles are user, assistant", param=turn.path("role"))
        if not turn.has("content"):
            raise RequestError(f"{turn.path('content')} is missing", param=turn.path("content"))
        messages += _user(turn) if turn.values["role"] == "user" else [_assistant(turn)]
    return messages


def read_tools(fields: Fields) -> Tools:
    """From ``tools`` and ``tool_choice``."""
    definitions = tuple(_definition(tool) for tool in fields.objects("tools"))
    names = [tool["function"]["name"] for tool in definitions]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", "no two tools may have the same name")
    choice = fields.object("tool_choice")
    if choice is None:
        return Tools(definitions, "auto" if definitions else "none")
    kind = choice.required_text("type")
    known = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
    if kind not in known:
        raise choice.wrong("type", f"it must be one of {', '.join(known)}")
    if kind in ("any", "tool") and not definitions:
        raise choice.wrong("type", "there are no tools to call; add tools")
    name = choice.required_text("name") if kind == "tool" else ""
    if kind == "tool" and name not in names:
        raise choice.wrong("name", f"the tools are {', '.join(names)}")
    is_parallel = not choice.flag("disable_parallel_tool_use")
    return Tools(definitions, known[kind] if definitions else "none", name, is_parallel)


def _definition(tool: Fields) -> dict[str, Any]:
    if tool.values.get("type") not in (None, "custom"):
        raise tool.wrong("type", "only custom tools are supported: this engine runs none of Anthropic's own")
    tool.refuse_unknown(("name", "description", "input_schema", "type", "strict"), ("cache_control",))
    schema = tool.object("input_schema")
    if schema is None:
        raise RequestError(f"{tool.path('input_schema')} is missing", param=tool.path("input_schema"))
    function: dict[str, Any] = {"name": tool.name("name")}
    if tool.has("description"):
        function["description"] = tool.text("description")
    if tool.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function | {"parameters": schema.values}}


def _texts(fields: Fields, name: str, rule: str) -> str:
    """A text, or the texts of a list of text blocks, one a line."""
    value = fields.values.get(name)
    if isinstance(value, str):
        return value
    return "\n".join(_text(block, rule) for block in fields.objects(name))


def _text(block: Fields, rule: str) -> str:
    if block.required_text("type") != "text":
        raise block.wrong("type", rule)
    block.refuse_unknown(_BLOCK)
    return block.required_text("text")


def _blocks(turn: Fields) -> list[Fields]:
    content = turn.values["content"]
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, turn.path("content"))]
    return turn.objects("content")


def _user(turn: Fields) -> list[Message]:
    """Tool results first, as they answer the turn before; then the text."""
    results: list[Message] = []
    texts = []
    for block in _blocks(turn):
        if block.values.get("type") == "tool_result":
            content = _texts(block, "content", _TEXT_ONLY) if block.has("content") else ""
            if block.flag("is_error"):
                content = f"error: {content}"
            results.append({"role": "tool", "tool_call_id": block.required_text("tool_use_id"), "content": content})
        else:
            texts.append(_text(block, _TEXT_ONLY))
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _assistant(turn: Fields) -> Message:
    texts, thoughts, calls = [], [], []
    for block in _blocks(turn):
        kind = block.required_text("type")
        if kind == "thinking":
            thoughts.append(block.required_text("thinking"))
        elif kind == "tool_use":
            arguments = block.object("input")
            function = {"name": block.required_text("name"), "arguments": {} if arguments is None else arguments.values}
            calls.append({"id": block.required_text("id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, _TEXT_ONLY))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def input_of(arguments: str) -> dict[str, Any] | None:
    """A call's input from the JSON text that the model wrote; None when it is no JSON object (the text was cut)."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
