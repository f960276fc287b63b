"""Parser for tool calls with one XML element per argument: GLM-4.5 and Qwen3-Coder.

Formats, from the models' chat templates:

- GLM-4.5: `<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument, then
  `</tool_call>`;
- Qwen3-Coder: `<tool_call><function=NAME>`, then `<parameter=KEY>VALUE</parameter>` for each argument, then
  `</function></tool_call>`.

String values are written without quotes, so the tool's schema determines the type of a value.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapscope.engine.api.deltas import Delta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_call_stream import ToolCallStream
from tapscope.engine.api.tool_parsers import CALL_CLOSE, CALL_OPEN, HermesParser
from tapscope.engine.api.tools import Tools, parameters_of


@dataclass(frozen=True, slots=True)
class XmlCallTags:
    """Patterns of a format; each pattern matches only complete elements."""

    name: re.Pattern[str]
    argument: re.Pattern[str]
    """Pattern of an argument, with two groups: the key and the value."""
    argument_open: str
    argument_close: str
    end: str


GLM45 = XmlCallTags(
    re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|</tool_call>)"),
    re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    "<arg_key>",
    "</arg_value>",
    CALL_CLOSE,
)
QWEN3_CODER = XmlCallTags(
    re.compile(r"\s*<function=([^>\s]+)>"),
    re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    "<parameter=",
    "</parameter>",
    "</function>",
)


class XmlCallParser(HermesParser):
    """Streaming parser that emits each argument once its element is complete."""

    def __init__(self, tags: XmlCallTags, tools: Tools) -> None:
        super().__init__()
        self._tags = tags
        self._schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools.definitions}
        self._properties: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._steps |= {"call": self._read_name, "arguments": self._read_arguments}

    def _read_name(self, is_final: bool) -> Iterator[Delta]:
        match = self._tags.name.match(self._text)
        if match:
            self._text, self._state, self._num_arguments = self._text[match.end() :], "arguments", 0
            properties = self._schemas.get(match[1], {}).get("properties")
            self._properties = properties if isinstance(properties, dict) else {}
            self._content.call()
            yield ToolCallStart(self._scanner.index, match[1])
        elif is_final or CALL_CLOSE in self._text:
            yield from self._content.write(CALL_OPEN)
            self._state = "text"

    def _read_arguments(self, is_final: bool) -> Iterator[Delta]:
        """Read arguments; text between elements is content. The JSON of a truncated call stays incomplete."""
        index, tags = self._scanner.index, (self._tags.argument_open, self._tags.end)
        while True:
            between, tag, rest = split_at_tag(self._text, tags, is_final=is_final)
            yield from self._content.write(between)
            self._text = tag + rest
            if tag:
                self._content.call()
            if tag == self._tags.end:
                yield ToolCallArguments(index, "}" if self._num_arguments else "{}")
                self._text, self._state, self._scanner = rest, "close", ToolCallStream(index + 1)
                return
            if self._tags.argument_close not in self._text:  # skips the regex while a long value streams in
                return
            match = self._tags.argument.match(self._text)
            if not match:
                return
            value = argument_value(match[2], self._properties.get(match[1]))
            element = f"{json.dumps(match[1], ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
            yield ToolCallArguments(index, (", " if self._num_arguments else "{") + element)
            self._text, self._num_arguments = self._text[match.end() :], self._num_arguments + 1


_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def argument_value(text: str, schema: object) -> object:
    """Convert an unquoted argument to a value: a literal of a type allowed by ``schema``, otherwise a string."""
    types = _types(schema)
    if types == {"string"}:
        return text
    value = _literal(text.strip(), (json.loads, ast.literal_eval) if types else (json.loads,))
    is_allowed = not types or any(name in types for name in _TYPES[type(value)])
    return value if is_allowed or "string" not in types else text


def _types(schema: object) -> set[str]:
    """Return the type names that ``schema`` allows; empty if the schema does not restrict the type."""
    if not isinstance(schema, dict):
        return set()
    if "type" in schema:
        kind = schema["type"]
        return set(kind) if isinstance(kind, list) else {str(kind)}
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    by_choice = [_types(each) for each in choices] if isinstance(choices, list) else []
    return set().union(*by_choice) if all(by_choice) else set()


def _literal(text: str, parsers: Sequence[Callable[[str], object]]) -> object:
    """Return the value of the first parser that accepts ``text`` as a JSON-compatible value; otherwise ``text``."""
    for parse in parsers:
        try:
            value = parse(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if type(value) in _TYPES:
            return value
    return text
