"""Anthropic's messages, system text and tools in OpenAI's form, which chat templates read."""

import json
from typing import Any, Literal

import msgspec

from tapscope.core.convert import NonEmptyStr
from tapscope.core.errors import RequestError
from tapscope.engine.api.tools import Tools, check_unique
from tapscope.engine.text.chat_template import Message


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Text; this engine reads no images, documents or search results."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of an earlier turn."""

    thinking: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call of an earlier turn."""

    id: str
    name: str
    input: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class UserTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A turn of the user."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """A turn of the model."""

    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A custom tool; this engine runs none of Anthropic's own."""

    name: NonEmptyStr
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


def read_system(system: str | list[TextBlock] | None) -> list[Message]:
    """``system`` as a message of its own, none when there is none."""
    text = _text(system)
    return [{"role": "system", "content": text}] if text else []


def read_turns(turns: list[UserTurn | AssistantTurn]) -> list[Message]:
    """The turns of ``messages``; a turn with tool results becomes one message for each, and one for its text."""
    messages: list[Message] = []
    for turn in turns:
        messages += _user(turn) if isinstance(turn, UserTurn) else [_assistant(turn)]
    return messages


def read_tools(tools: list[AnthropicTool], choice: AnthropicToolChoice | None) -> Tools:
    """From ``tools`` and ``tool_choice``."""
    definitions = tuple(map(_definition, tools))
    names = [tool.name for tool in tools]
    check_unique(names)
    if choice is None:
        return Tools(definitions, "auto" if definitions else "none")
    if choice.type in ("any", "tool") and not definitions:
        name = "tool_choice.type"
        raise RequestError(f"{name}={choice.type!r}: there are no tools to call; add tools", param=name)
    if choice.type == "tool" and choice.name not in names:
        name = "tool_choice.name"
        raise RequestError(f"{name}={choice.name!r}: must be one of {', '.join(names)}", param=name)
    kind = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}[choice.type]
    named = choice.name if choice.type == "tool" else ""
    return Tools(definitions, kind if definitions else "none", named, not choice.disable_parallel_tool_use)


def _definition(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _text(content: str | list[TextBlock] | None) -> str:
    """A string, or the texts of a list of blocks, one a line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _user(turn: UserTurn) -> list[Message]:
    """Tool results first, as they answer the turn before; then the text."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    results: list[Message] = []
    texts = []
    for block in turn.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        content = _text(block.content)
        content = f"error: {content}" if block.is_error else content
        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _assistant(turn: AssistantTurn) -> Message:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, thoughts, calls = [], [], []
    for block in turn.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
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
