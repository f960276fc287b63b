"""Incremental tool call parsers for Hermes (Qwen), Llama 3 and forced calls, and their common state machine.

Formats: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the chat templates of Qwen and Hermes; a bare
`{"name": ..., "parameters": {...}}` or `<|python_tag|>name.call(key=value)` in Llama 3.1's model card (prompt format).
"""

import ast
import json
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from tapscope.engine.api.deltas import ContentDelta, Delta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_call_stream import JsonValue, ToolCallStream

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(Protocol):
    """Streaming parser that splits text into tool calls and content."""

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Consume ``text`` and yield all deltas that later text cannot change; ``is_final``: no more text follows."""
        ...


class ContentBuffer:
    """Buffer for content between calls; whitespace next to a call is dropped."""

    def __init__(self) -> None:
        self._blanks = ""
        self._is_after_call = False

    def write(self, text: str, *, is_final: bool = False) -> Iterator[ContentDelta]:
        """Emit text; trailing whitespace is held back until more text follows."""
        text = self._blanks + text
        if self._is_after_call:
            text = text.lstrip()
        kept = text if is_final and not self._is_after_call else text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._is_after_call = False
            yield ContentDelta(kept)

    def call(self) -> None:
        """Mark the position of a tool call in the content."""
        self._blanks, self._is_after_call = "", True


class StreamingParser:
    """State machine: the handler of each state consumes text, until the state no longer changes."""

    def __init__(self, state: str, after_call: str, names: Collection[str] | None = None) -> None:
        """Start in ``state``; ``after_call`` is the state after a call.

        An object counts as a call only if its name is in ``names``; None: any name.
        """
        self._text = ""
        self._lead = ""
        """Text before an object that may be a call; becomes content if the object is not a call."""
        self._state = state
        self._after_call = after_call
        self._names = names
        self._content = ContentBuffer()
        self._scanner = ToolCallStream(0, names)
        self._steps: dict[str, Callable[[bool], Iterator[Delta]]] = {"call": self._read_call}

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Consume ``text`` and yield all deltas that later text cannot change; ``is_final``: no more text follows."""
        self._text += text
        state = ""
        while state != self._state:
            state = self._state
            yield from self._steps[state](is_final)
        if is_final:
            yield from self._content.write("", is_final=True)

    def _read_call(self, is_final: bool) -> Iterator[Delta]:
        """Read a JSON object as a call; an object without a valid name is content."""
        scanner = self._scanner
        deltas, self._text = scanner.feed(self._text)
        if deltas and isinstance(deltas[0], ToolCallStart):
            self._content.call()
        yield from deltas
        if scanner.state not in ("done", "broken") and not is_final:
            return
        if not scanner.has_begun:
            yield from self._content.write(self._lead + scanner.raw)
        self._state = self._after_call if scanner.has_begun else "text"
        self._scanner = ToolCallStream(scanner.index + scanner.has_begun, self._names)


class HermesParser(StreamingParser):
    """Parser for JSON calls between `<tool_call>` tags, with content between the calls."""

    def __init__(self) -> None:
        super().__init__("text", after_call="close")
        self._lead = CALL_OPEN
        self._steps |= {"text": self._read_text, "close": self._close}

    def _read_text(self, is_final: bool) -> Iterator[Delta]:
        plain, tag, self._text = split_at_tag(self._text, (CALL_OPEN,), is_final=is_final)
        yield from self._content.write(plain)
        if tag:
            self._state = "call"

    def _close(self, is_final: bool) -> Iterator[Delta]:
        """Skip the closing tag, which models may omit."""
        text = self._text.lstrip()
        if text.startswith(CALL_CLOSE):
            self._state, self._text = "text", text[len(CALL_CLOSE) :]
        elif is_final or not CALL_CLOSE.startswith(text):
            self._state = "text"
        yield from ()


class LlamaParser(StreamingParser):
    """Parser for Llama 3: bare JSON calls separated by `;`, or a call after the python tag."""

    def __init__(self, names: Collection[str]) -> None:
        """``names`` are the tool names: a bare object with another name is JSON content, not a call."""
        super().__init__("start", after_call="start", names=names)
        self._steps |= {"start": self._begin, "text": self._read_text, "python": self._python}

    def _begin(self, is_final: bool) -> Iterator[Delta]:
        """Skip whitespace (and `;` after a call), then expect a call or content."""
        text = self._text.lstrip(" \t\r\n;" if self._scanner.index else None)
        if text.startswith("{"):
            self._lead = self._text[: len(self._text) - len(text)]
            self._state, self._text = "call", text
        elif is_final or not PYTHON_TAG.startswith(text):
            self._state = "text"
        yield from ()

    def _read_text(self, is_final: bool) -> Iterator[Delta]:
        plain, tag, self._text = split_at_tag(self._text, (PYTHON_TAG,), is_final=is_final)
        yield from self._content.write(plain)
        if tag:
            self._state = "python"

    def _python(self, is_final: bool) -> Iterator[Delta]:
        """Read the call after the python tag: a JSON call, or a Python call, which is parsed once it is complete."""
        text = self._text.lstrip()
        if text.startswith("{"):
            self._lead, self._text, self._state = "", text, "call"
        elif is_final:
            call = read_python_call(text)
            self._text = ""
            if call is None:
                yield from self._content.write(text)
            else:
                self._content.call()
                yield ToolCallStart(self._scanner.index, call[0])
                yield ToolCallArguments(self._scanner.index, call[1])


def read_python_call(code: str) -> tuple[str, str] | None:
    """Parse ``code`` as a Python call with literal keyword arguments; return (name, JSON arguments), or None."""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        name = ast.unparse(call.func).removesuffix(".call")
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if None in arguments or not name.replace(".", "_").isidentifier():
            return None
        return name, json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class NamedToolCall:
    """Parser for an output that consists of the arguments of one call to the tool that the request named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._value = JsonValue()
        self._is_done = False

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Consume ``text`` and yield the deltas of the call; text after the JSON value is dropped."""
        before = len(self._value.text)
        for char in text:
            self._is_done = self._is_done or self._value.take(char) != "more"
        fresh = self._value.text[before:]
        if fresh and not before:
            yield ToolCallStart(0, self._name)
        if fresh:
            yield ToolCallArguments(0, fresh)


class RequiredToolCalls:
    """Parser for an output that is a JSON list of `{"name": ..., "parameters": {...}}`."""

    def __init__(self) -> None:
        self._scanner = ToolCallStream(0)
        self._text = ""

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Consume ``text`` and yield the deltas of its calls; an incomplete call at the end of the list is content."""
        self._text += text
        while True:
            if self._scanner.state == "open":
                self._text = self._text.lstrip(" \t\r\n[],")
            if not self._text:
                break
            deltas, self._text = self._scanner.feed(self._text)
            yield from deltas
            if self._scanner.state == "broken":
                break
            if self._scanner.state == "done":
                self._scanner = ToolCallStream(self._scanner.index + 1)
        if is_final and not self._scanner.has_begun and self._scanner.raw + self._text:
            yield ContentDelta(self._scanner.raw + self._text)
