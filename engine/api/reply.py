"""Reply: splits the streamed text of one generation into reasoning, content and tool calls."""

from collections.abc import Iterator
from dataclasses import dataclass

from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.reasoning import ReasoningSplitter
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_parsers import (
    PYTHON_TAG,
    HermesParser,
    LlamaParser,
    NamedToolCall,
    RequiredToolCalls,
    ToolParser,
)
from tapscope.engine.api.tools import NO_TOOLS, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """Format of a reply; the same for all generations of a request."""

    thinks: bool = False
    """Whether reasoning may come first."""
    is_thinking: bool = False
    """Whether the prompt ends inside the reasoning."""
    tools: Tools = NO_TOOLS
    tool_format: str | None = None
    hidden: tuple[str, ...] = ()
    """Special tokens that the engine keeps in the text for the parser and that are removed from the content."""


class Reply:
    """The reply of one generation."""

    def __init__(self, form: ReplyFormat) -> None:
        self._splitter = ReasoningSplitter(is_open=form.is_thinking) if form.thinks else None
        self._parser = _parser(form)
        self._hidden = tuple(token for token in form.hidden if token != PYTHON_TAG)
        self._held = ""
        self._most_calls = None if form.tools.is_parallel else 1
        self.num_calls = 0
        """Number of tool calls so far."""

    def feed(self, text: str, *, is_final: bool = False) -> list[Delta]:
        """Deltas that are certain after ``text``; ``is_final``: no more text follows."""
        shown = self._show(text, is_final)
        pieces: Iterator[Delta] | list[Delta] = [ContentDelta(shown)] if shown else []
        if self._splitter is not None:
            pieces = self._splitter.feed(shown, is_final=is_final)
        deltas = list(pieces)
        if self._parser is not None:
            deltas = list(self._parse(self._parser, deltas, is_final))
        self.num_calls += sum(isinstance(delta, ToolCallStart) for delta in deltas)
        return deltas

    def _show(self, text: str, is_final: bool) -> str:
        """The text without hidden tokens."""
        if not self._hidden:
            return text
        shown, tag, self._held = split_at_tag(self._held + text, self._hidden, is_final=is_final)
        while tag:
            plain, tag, self._held = split_at_tag(self._held, self._hidden, is_final=is_final)
            shown += plain
        return shown

    def _parse(self, parser: ToolParser, pieces: list[Delta], is_final: bool) -> Iterator[Delta]:
        """Pass reasoning through and parse the content; drops calls beyond the allowed number."""
        content = ""
        for piece in pieces:
            if isinstance(piece, ReasoningDelta):
                yield piece
            elif isinstance(piece, ContentDelta):
                content += piece.text
        for delta in parser.feed(content, is_final=is_final):
            index = delta.index if isinstance(delta, ToolCallStart | ToolCallArguments) else 0
            if self._most_calls is None or index < self._most_calls:
                yield delta


def _parser(form: ReplyFormat) -> ToolParser | None:
    tools = form.tools
    if tools.choice == "named":
        return NamedToolCall(tools.named)
    if tools.choice == "required":
        return RequiredToolCalls()
    if tools.choice == "none" or form.tool_format is None:
        return None
    return HermesParser() if form.tool_format == "hermes" else LlamaParser(tools.names)
