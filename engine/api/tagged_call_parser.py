"""Parser of tagged tool calls whose name precedes the JSON arguments: DeepSeek, Kimi K2, Mistral.

Formats, from the models' chat templates (``chat_template`` of tokenizer_config.json), where SEP is `<｜tool▁sep｜>`:

- DeepSeek-V3, R1: `<｜tool▁call▁begin｜>function SEP NAME`, then the arguments in a ```` ```json ```` block,
  `<｜tool▁call▁end｜>`; V3.1: `<｜tool▁call▁begin｜>NAME SEP {...}<｜tool▁call▁end｜>`; section tags enclose all calls.
- Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, also in a section.
- Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models: `[TOOL_CALLS]NAME[ARGS]{...}` per call.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tapscope.engine.api.deltas import Delta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_call_stream import JsonValue, ToolCallStream
from tapscope.engine.api.tool_parsers import StreamingParser


class CallHeader(NamedTuple):
    """Name and id of a call, parsed from the text before its arguments."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of a tool call format."""

    begin: str
    """Tag that opens each call, before the header and the arguments."""
    separator: str
    """Tag between the header and the arguments."""
    ends: tuple[str, ...]
    """Other tags, removed from the content: the first closes a call, the others open or close a section of calls."""
    read_header: Callable[[str], CallHeader]

    @property
    def all(self) -> tuple[str, ...]:
        """All tags of the format."""
        return (self.begin, self.separator, *self.ends)


_DEEPSEEK_SEPARATOR, _KIMI_SEPARATOR = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"


def _deepseek_header(text: str) -> CallHeader:
    first, _, second = text.partition(_DEEPSEEK_SEPARATOR)
    return CallHeader(second.strip().removesuffix("```json").strip() or first.strip())


def _kimi_header(text: str) -> CallHeader:
    identifier = text.partition(_KIMI_SEPARATOR)[0].strip()
    return CallHeader(re.sub(r":\d+$", "", identifier.removeprefix("functions.")), identifier)


def _mistral_header(text: str) -> CallHeader:
    name, *fields = re.split(r"\[(?:CALL_ID|ARGS)\]", text)
    return CallHeader(name.strip(), fields[0].strip() if "[CALL_ID]" in text else "")


DEEPSEEK = CallTags(
    "<｜tool▁call▁begin｜>",
    _DEEPSEEK_SEPARATOR,
    ("<｜tool▁call▁end｜>", "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    _deepseek_header,
)
KIMI_K2 = CallTags(
    "<|tool_call_begin|>",
    _KIMI_SEPARATOR,
    ("<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    _kimi_header,
)
MISTRAL = CallTags("[TOOL_CALLS]", "[ARGS]", (), _mistral_header)


class TaggedCallParser(StreamingParser):
    """Streaming parser that reads a call's header up to the first brace, then streams the arguments."""

    def __init__(self, tags: CallTags) -> None:
        super().__init__("text", after_call="list")
        self._tags = tags
        self._value = JsonValue()
        self._steps |= {
            "text": self._read_text,
            "header": self._read_header,
            "arguments": self._read_arguments,
            "list": self._read_list,
        }

    def _read_text(self, is_final: bool) -> Iterator[Delta]:
        tag = "any"
        while tag and self._state == "text":
            tags = (self._tags.begin, *self._tags.ends)
            plain, tag, self._text = split_at_tag(self._text, tags, is_final=is_final)
            yield from self._content.write(plain)
            if tag == self._tags.begin:
                self._state = "header"
            elif tag:
                self._content.call()

    def _read_header(self, is_final: bool) -> Iterator[Delta]:
        """Read a header; a bracket instead opens a list of call objects, and a closing tag means no arguments."""
        if self._text.lstrip().startswith("["):
            self._text, self._state = self._text.lstrip()[1:], "list"
            return
        before, tag, rest = split_at_tag(self._text, ("{", *self._tags.ends), is_final=is_final)
        if not tag and not is_final:
            return
        header = self._tags.read_header(before)
        if not tag or not header.name:
            yield from self._content.write(self._tags.begin + before)
            self._text, self._state = tag + rest, "text"
            return
        self._content.call()
        yield ToolCallStart(self._scanner.index, header.name, header.id)
        if tag == "{":
            self._text, self._state, self._value = tag + rest, "arguments", JsonValue()
        else:
            self._text, self._state = rest, "text"
            yield self._end("{}")

    def _read_arguments(self, is_final: bool) -> Iterator[Delta]:
        for at, char in enumerate(self._text):
            if self._value.take(char) == "last":
                text, self._text, self._state = self._text[: at + 1], self._text[at + 1 :], "text"
                yield self._end(text)
                return
        if self._text:
            text, self._text = self._text, ""
            yield ToolCallArguments(self._scanner.index, text)

    def _end(self, arguments: str) -> ToolCallArguments:
        """Return the last delta of a call's arguments, and advance to the index of the next call."""
        last = ToolCallArguments(self._scanner.index, arguments)
        self._scanner = ToolCallStream(last.index + 1)
        return last

    def _read_list(self, is_final: bool) -> Iterator[Delta]:
        """Skip the separator between two objects of a list, or leave the list at its end."""
        text = self._text.lstrip(" \t\r\n,")
        if text.startswith("{"):
            self._lead, self._text, self._state = "", text, "call"
        elif text or is_final:
            self._text, self._state = text.removeprefix("]"), "text"
        yield from ()
