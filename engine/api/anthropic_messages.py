"""Convert Anthropic's messages, system prompt and tools to OpenAI's format, which chat templates use."""

import json
from collections import deque
from typing import Any, Literal

import msgspec

from tapscope.core.convert import NonEmptyStr
from tapscope.core.errors import RequestError
from tapscope.engine.api.tools import Tools, check_unique
from tapscope.engine.text.chat_template import Message


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Text block; images, documents and search results are not supported."""

    text: str
    """The text."""
    cache_control: Any = None
    """Without effect."""
    citations: Any = None
    """Without effect."""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning from an earlier turn."""

    thinking: str
    """The reasoning."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A tool call from an earlier turn."""

    id: str
    """Id of the call, which its result refers to."""
    name: str
    """Name of the called tool."""
    input: dict[str, Any] | None = None
    """Arguments of the call."""


class ToolResultBlock(msgspec.Struct, kw_only=True, tag="tool_result"):
    """Result of a tool call."""

    tool_use_id: str
    """Id of the call."""
    content: str | list[TextBlock] | None = None
    """The result, as a string or text blocks."""
    is_error: bool | None = None
    """Whether the call failed; if so, "error: " is put before the content."""


class UserTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A turn of the user."""

    content: str | list[TextBlock | ToolResultBlock]
    """A string, or blocks."""


class AssistantTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """A turn of the model."""

    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]
    """A string, or blocks."""


class SystemTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """An instruction in the middle of a conversation."""

    content: str | list[TextBlock]
    """A string, or text blocks."""


Turn = UserTurn | AssistantTurn | SystemTurn


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A custom tool; Anthropic's server-side tools are not supported."""

    name: NonEmptyStr
    """Name of the tool."""
    input_schema: dict[str, Any]
    """JSON schema of the arguments."""
    description: str | None = None
    """Description of the tool, for the model."""
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """Whether calls must match the schema."""
    cache_control: Any = None
    """Without effect."""


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Choice of the tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    """Name of the tool to call, with type ``tool``."""
    disable_parallel_tool_use: bool | None = None
    """Allow at most one call."""


def read_system(system: str | list[TextBlock] | None) -> list[Message]:
    """Convert ``system`` to a list of one system message; empty if there is no system prompt."""
    text = _text(system)
    return [{"role": "system", "content": text}] if text else []


def read_turns(turns: list[Turn]) -> list[Message]:
    """Convert Anthropic's turns to chat messages.

    A user turn with tool results becomes one ``tool`` message per result, then one ``user`` message for its text.
    """
    messages: list[Message] = []
    for turn in turns:
        match turn:
            case UserTurn():
                messages += _user(turn)
            case AssistantTurn():
                messages.append(_assistant(turn))
            case SystemTurn():
                messages.append({"role": "system", "content": _text(turn.content)})
    return messages


def read_tools(tools: list[AnthropicTool], choice: AnthropicToolChoice | None) -> Tools:
    """Convert Anthropic's ``tools`` and ``tool_choice``; raises RequestError."""
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
    """Return the content as one string; text blocks are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _user(turn: UserTurn) -> list[Message]:
    """Convert a user turn: first the tool results, which answer the previous turn, then the text."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    results: list[Message] = []
    lines = []
    for block in turn.content:
        if isinstance(block, TextBlock):
            lines.append(block.text)
            continue
        content = _text(block.content)
        content = f"error: {content}" if block.is_error else content
        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    return results + ([{"role": "user", "content": "\n".join(lines)}] if lines or not results else [])


def _assistant(turn: AssistantTurn) -> Message:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    content, reasoning, calls = [], [], []
    for block in turn.content:
        match block:
            case TextBlock():
                content.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": "\n".join(content)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def input_of(arguments: str) -> dict[str, Any] | None:
    """Decode the model's JSON ``arguments`` to the input of a tool call; None if they are not a JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def input_of_truncated(arguments: str) -> dict[str, Any]:
    """Decode the complete members of a tool call's input that ``max_tokens`` cut off.

    Follows the streaming parser of Anthropic's Python package. The result is empty if no member is complete, or if
    ``arguments`` is not a prefix of a JSON object.
    """
    closing = ""
    cuts: deque[tuple[int, str]] = deque(maxlen=2)  # the last cut may follow a key without a value
    in_string = is_escaped = False
    for index, char in enumerate(arguments):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            closing = ("}" if char == "{" else "]") + closing
        elif char in "}]":
            closing = closing[1:]
        if not in_string and char in '{[}]",':
            cuts.append((index if char == "," else index + 1, closing))
    values = (input_of(arguments[:end] + brackets) for end, brackets in reversed(cuts))
    return next((value for value in values if value is not None), {})
