"""Reply: split the streamed text of one generation into reasoning, content and tool calls."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.harmony_parser import HarmonyParser
from tapscope.engine.api.reasoning import ReasoningSplitter
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_formats import ToolFormat
from tapscope.engine.api.tool_parsers import NamedToolCall, RequiredToolCalls, ToolParser
from tapscope.engine.api.tools import NO_TOOLS, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """Format of a reply; the same for all generations of a request."""

    reasoning_format: str | None = None
    """``think`` or ``gpt_oss``; None: the reply contains no reasoning."""
    separate_reasoning: bool = True
    """Whether reasoning is separated from the answer."""
    is_thinking: bool = False
    """Whether the prompt ends with the opening tag of the reasoning."""
    tools: Tools = NO_TOOLS
    tool_format: ToolFormat | None = None
    hidden: tuple[str, ...] = ()
    """Special tokens to strip from the text, where the engine keeps special tokens because the parser needs some."""


class Reply:
    """Streaming parser for the reply of one generation."""

    def __init__(self, form: ReplyFormat) -> None:
        thinks = form.reasoning_format == "think" and form.separate_reasoning
        self._splitter = ReasoningSplitter(is_open=form.is_thinking) if thinks else None
        self._parser = _parser(form)
        self._call_id = form.tool_format.call_id if form.tool_format is not None else None
        self._call_ids: set[str] = set()
        self._hidden = form.hidden
        self._held = ""
        self._most_calls = None if form.tools.is_parallel else 1
        self.num_calls = 0
        """Number of tool calls so far."""

    def feed(self, text: str, *, is_final: bool = False) -> list[Delta]:
        """Consume ``text`` and return all deltas that later text cannot change; ``is_final``: no more text follows."""
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
        """Return the text without hidden special tokens; the start of a possible one is held back."""
        if not self._hidden:
            return text
        shown, tag, self._held = split_at_tag(self._held + text, self._hidden, is_final=is_final)
        while tag:
            plain, tag, self._held = split_at_tag(self._held, self._hidden, is_final=is_final)
            shown += plain
        return shown

    def _parse(self, parser: ToolParser, pieces: list[Delta], is_final: bool) -> Iterator[Delta]:
        """Pass reasoning through and parse the content; tool calls beyond the allowed number are dropped."""
        content = ""
        for piece in pieces:
            if isinstance(piece, ReasoningDelta):
                yield piece
            elif isinstance(piece, ContentDelta):
                content += piece.text
        for delta in parser.feed(content, is_final=is_final):
            index = delta.index if isinstance(delta, ToolCallStart | ToolCallArguments) else 0
            if self._most_calls is None or index < self._most_calls:
                yield self._identified(delta) if isinstance(delta, ToolCallStart) else delta

    def _identified(self, call: ToolCallStart) -> ToolCallStart:
        """Return the call with the model's id; if the format requires ids, a missing or repeated one is replaced."""
        if self._call_id is not None and (not call.id or call.id in self._call_ids):
            call = replace(call, id=self._call_id(call.name, call.index))
        self._call_ids.add(call.id)
        return call


def _parser(form: ReplyFormat) -> ToolParser | None:
    tools = form.tools
    if tools.choice == "named":
        return NamedToolCall(tools.named)
    if tools.choice == "required":
        return RequiredToolCalls()
    if form.reasoning_format == "gpt_oss":
        return HarmonyParser(has_tools=tools.choice != "none", separates_reasoning=form.separate_reasoning)
    if tools.choice == "none" or form.tool_format is None:
        return None
    return form.tool_format.make_parser(tools)
