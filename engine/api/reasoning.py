"""ReasoningSplitter: separate `<think>...</think>` reasoning from the answer in streamed text."""

from collections.abc import Iterator

from tapscope.engine.api.deltas import ContentDelta, ReasoningDelta
from tapscope.engine.api.stream_tags import split_at_tag

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Streaming splitter of reasoning and content; whitespace around the reasoning is dropped.

    Only reasoning at the start of the output is recognized: later tags are ordinary text.
    """

    def __init__(self, *, is_open: bool) -> None:
        """``is_open``: the prompt already ends with the opening tag."""
        self._state = "thinking" if is_open else "before"
        self._text = ""
        self._has_begun = False

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[ReasoningDelta | ContentDelta]:
        """Consume ``text`` and yield all deltas that later text cannot change; ``is_final``: no more text follows."""
        self._text += text
        if self._state == "before":
            self._look_for_opening(is_final)
        if self._state == "thinking":
            yield from self._think(is_final)
        if self._state == "answer":
            content = self._text if self._has_begun else self._text.lstrip("\n")
            self._text, self._has_begun = "", self._has_begun or bool(content)
            if content:
                yield ContentDelta(content)

    def _look_for_opening(self, is_final: bool) -> None:
        """Look for the opening tag; any text other than whitespace before it means that there is no reasoning."""
        plain, tag, rest = split_at_tag(self._text, (OPEN,), is_final=is_final)
        if plain.strip() or (is_final and not tag):
            self._state, self._has_begun = "answer", True
        elif tag:
            self._state, self._text = "thinking", rest

    def _think(self, is_final: bool) -> Iterator[ReasoningDelta]:
        """Yield reasoning up to the closing tag; trailing whitespace is held back until more text follows."""
        plain, tag, rest = split_at_tag(self._text, (CLOSE,), is_final=is_final)
        piece = plain.rstrip()
        self._text = rest if tag else plain[len(piece) :] + rest
        piece = piece if self._has_begun else piece.lstrip()
        self._has_begun = self._has_begun or bool(piece)
        if piece:
            yield ReasoningDelta(piece)
        if tag:
            self._state, self._has_begun = "answer", False
