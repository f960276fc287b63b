"""HarmonyParser: split the output of gpt-oss models into reasoning, content and tool calls.

Format (OpenAI's "harmony response format"): messages of `<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT <|constrain|>json
<|message|>BODY` that end with `<|end|>`, `<|return|>` or `<|call|>`. Channels: `analysis` (reasoning), `commentary`
(calls of `functions.NAME`, and text before them) and `final` (the answer). The prompt ends with `<|start|>assistant`.
"""

import re
from collections.abc import Generator, Iterator

from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.stream_tags import split_at_tag

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL_CHANNEL = f"{CHANNEL}final{MESSAGE}"
"""Suffix of a prompt with a constrained answer, so that the model generates only the answer."""
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
TAGS = (*ENDS, CHANNEL, MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser:
    """Streaming parser that alternates between message headers and message bodies."""

    def __init__(self, *, has_tools: bool = True, separates_reasoning: bool = True) -> None:
        """Without ``has_tools``, tool calls are content; without ``separates_reasoning``, reasoning is content."""
        self._has_tools = has_tools
        self._reasoning = ReasoningDelta if separates_reasoning else ContentDelta
        self._text = ""
        self._is_header = True
        self._kind: type[ReasoningDelta] | type[ContentDelta] | None = None
        """Delta type of the current body; None in a tool call."""
        self._written: set[object] = set()
        """Delta types that already had a body; later bodies of the same type start with a newline."""
        self._num_calls = 0
        self._has_begun = False

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """Consume ``text`` and yield all deltas that later text cannot change; ``is_final``: no more text follows."""
        self._text += text
        is_complete = True
        while is_complete:
            is_complete = yield from (self._read_header if self._is_header else self._read_body)(is_final)

    def _read_header(self, is_final: bool) -> Generator[Delta, None, bool]:
        """Parse a header; return whether it was complete. An output without any header is content."""
        header, tag, rest = split_at_tag(self._text, (MESSAGE,), is_final=is_final)
        if not tag:
            if is_final and header.strip() and not any(each in header for each in (CHANNEL, START)):
                yield ContentDelta(header)
            return False
        self._text, self._is_header, self._has_begun = rest, False, False
        called = _RECIPIENT.search(header) if self._has_tools else None
        if called is not None:
            self._kind = None
            yield ToolCallStart(self._num_calls, called[1])
        else:
            is_reasoning = header.partition(CHANNEL)[2].strip().startswith("analysis")
            self._kind = self._reasoning if is_reasoning else ContentDelta
        return True

    def _read_body(self, is_final: bool) -> Generator[Delta, None, bool]:
        """Parse a body, yielding its deltas; return whether it was complete."""
        body, tag, self._text = split_at_tag(self._text, ENDS, is_final=is_final)
        if self._kind is not None:
            if body:
                yield self._kind(body if self._has_begun or self._kind not in self._written else "\n" + body)
                self._written.add(self._kind)
        elif body:
            yield ToolCallArguments(self._num_calls, body)
        elif tag and not self._has_begun:
            yield ToolCallArguments(self._num_calls, "{}")
        self._has_begun = self._has_begun or bool(body)
        if tag:
            self._is_header = True
            self._num_calls += self._kind is None
        return bool(tag)
