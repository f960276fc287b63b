"""ReasoningSplitter: `<think>...</think>` before the answer, told apart while the text still comes."""

from collections.abc import Iterator

from tapscope.engine.api.deltas import ContentDelta, ReasoningDelta
from tapscope.engine.api.stream_tags import split_at_tag

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Reasoning is what stands between the tags; blanks around it belong to the form and are left out.

    Reasoning can only come first: a tag further on is text like any other.
    """

    def __init__(self, *, is_open: bool) -> None:
        """``is_open``: the prompt already ends with the opening tag."""
        self._state = "thinking" if is_open else "before"
        self._text = ""
        self._has_begun = False

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[ReasoningDelta | ContentDelta]:
        """What is certain by now; ``is_final`` when no more text comes."""
        self._text += text
        if self._state == "before":
            self._look_for_opening(is_final)
        if self._state == "thinking":
            yield from self._think(is_final)
        if self._state == "answer":
            said = self._text if self._has_begun else self._text.lstrip("\n")
            self._text, self._has_begun = "", self._has_begun or bool(said)
            if said:
                yield ContentDelta(said)

    def _look_for_opening(self, is_final: bool) -> None:
        """Blanks may come before the opening tag; anything else means that there is no reasoning."""
        plain, tag, rest = split_at_tag(self._text, (OPEN,), is_final=is_final)
        if plain.strip() or (is_final and not tag):
            self._state, self._has_begun = "answer", True
        elif tag:
            self._state, self._text = "thinking", rest

    def _think(self, is_final: bool) -> Iterator[ReasoningDelta]:
        """Blanks are held back until something follows them."""
        plain, tag, rest = split_at_tag(self._text, (CLOSE,), is_final=is_final)
        thought = plain.rstrip()
        self._text = rest if tag else plain[len(thought) :] + rest
        thought = thought if self._has_begun else thought.lstrip()
        self._has_begun = self._has_begun or bool(thought)
        if thought:
            yield ReasoningDelta(thought)
        if tag:
            self._state, self._has_begun = "answer", False
