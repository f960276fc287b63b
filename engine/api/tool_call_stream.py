"""ToolCallStream: incremental parser of one tool call, `{"name": ..., "arguments": {...}}`."""

import json
from collections.abc import Collection

from tapscope.engine.api.deltas import Delta, ToolCallArguments, ToolCallStart

_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """Incremental scanner for one JSON value; brackets are counted, their kinds are not checked."""

    def __init__(self) -> None:
        self.text = ""
        """The value so far, without leading whitespace."""
        self._depth = 0
        self._in_string = self._is_escaped = False

    def take(self, char: str) -> str:
        """Consume one character and return ``more``, ``last`` or ``after``.

        ``last``: ``char`` completes the value. ``after``: the value ended before ``char``, which was not consumed.
        """
        if not self.text and char in _BLANKS:
            return "more"
        if not self._in_string and self._depth == 0 and self.text and char in _BLANKS + ",]}:":
            return "after"
        self.text += char
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        is_closed = not self._in_string and self._depth <= 0
        return "last" if is_closed and char in '"}]' else "more"

    def decoded(self) -> object:
        """Return the decoded value; None if the text is not valid JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class ToolCallStream:
    """Streaming parser that emits a call's start once its name is complete, then its arguments as they arrive."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """``names``: an object counts as a call only if its name is one of these; None accepts every name."""
        self.index = index
        self.raw = ""
        """All consumed text; callers treat it as content if the object turns out not to be a call."""
        self.state = "open"
        """``done`` after the closing brace, ``broken`` if this is not a call; before that an intermediate state."""
        self.has_begun = False
        """Whether the tool's name is known."""
        self._names = names
        self._key = ""
        self._value = JsonValue()
        self._arguments: str | None = None
        self._sent = 0

    def feed(self, text: str) -> tuple[list[Delta], str]:
        """Consume ``text``; return the deltas and the unconsumed text.

        The unconsumed text follows the object, or starts with the character that is invalid in a call.
        """
        deltas: list[Delta] = []
        at = 0
        while at < len(text) and self.state not in ("done", "broken"):
            deltas += self._step(text[at])
            at += self.state != "broken"
        self.raw += text[:at]
        return deltas + self._stream(), text[at:]

    def _step(self, char: str) -> list[Delta]:
        if self.state in ("key", "value"):
            return self._in_value(char)
        if char in _BLANKS:
            return []
        expected = {"open": ("{", "key"), "colon": (":", "value"), "next": (",", "key")}
        symbol, following = expected[self.state]
        if char == symbol:
            self.state, self._value = following, JsonValue()
            return []
        return self._close() if char == "}" and self.state == "next" else self._break()

    def _in_value(self, char: str) -> list[Delta]:
        """Consume ``char`` while in a key or value, which may end with ``char`` or before it."""
        if self.state == "key" and not self._value.text and char not in _BLANKS + '"':
            return self._break()
        result = self._value.take(char)
        if result == "more":
            return []
        deltas = self._end_value()
        return deltas + self._step(char) if result == "after" and self.state == "next" else deltas

    @property
    def _is_arguments(self) -> bool:
        return self.state == "value" and self._key in _ARGUMENTS

    def _end_value(self) -> list[Delta]:
        value = self._value.decoded()
        if self.state == "key":
            self._key, self.state = str(value), "colon"
            return []
        if self._is_arguments:  # some models encode the arguments as a JSON string
            self._arguments = value if isinstance(value, str) else self._value.text
        self.state = "next"
        return self._begin(value) if self._key == "name" and not self.has_begun else []

    def _begin(self, name: object) -> list[Delta]:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            return self._break()
        self.has_begun = True
        return [ToolCallStart(self.index, name)]

    def _stream(self) -> list[Delta]:
        """Return the not yet emitted part of the arguments; empty until the tool's name is known."""
        text = self._arguments
        if text is None:
            text = "" if not self._is_arguments or self._value.text.startswith('"') else self._value.text
        fresh = text[self._sent :]
        if not self.has_begun or not fresh:
            return []
        self._sent += len(fresh)
        return [ToolCallArguments(self.index, fresh)]

    def _close(self) -> list[Delta]:
        if not self.has_begun:
            return self._break()
        self.state = "done"
        if self._arguments is None:
            self._arguments = "{}"
        return []

    def _break(self) -> list[Delta]:
        self.state = "broken"
        return []
