"""Required tool calls: a JSON schema constrains the whole text to a call's arguments, or to a list of calls."""

from collections.abc import Iterator

from tapscope.engine.api.deltas import ContentDelta, Delta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.tool_call_stream import JsonValue, ToolCallStream


class NamedToolCall:
    """One call of the tool that the request named; the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._value = JsonValue()
        self._is_done = False

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Deltas that are certain after ``text``."""
        before = len(self._value.text)
        for char in text:
            self._is_done = self._is_done or self._value.take(char) != "more"
        fresh = self._value.text[before:]
        if fresh and not before:
            yield ToolCallStart(0, self._name)
        if fresh:
            yield ToolCallArguments(0, fresh)


class RequiredToolCalls:
    """A JSON list of `{"name": ..., "parameters": {...}}`."""

    def __init__(self) -> None:
        self._scanner = ToolCallStream(0)
        self._text = ""

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Deltas that are certain after ``text``; text that is not a call (of a truncated list) is content."""
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
