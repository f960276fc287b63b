"""Tool calls in a model's own words, found while the text still comes: Hermes (Qwen) and Llama 3.

Forms: Qwen's and Hermes' chat templates write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; Llama 3.1's
model card (prompt format) has a bare `{"name": ..., "parameters": {...}}` and `<|python_tag|>name.call(key=value)`.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from tapscope.engine.api.deltas import ContentDelta, Delta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.python_tool_call import read_python_call
from tapscope.engine.api.stream_tags import split_at_tag
from tapscope.engine.api.tool_call_stream import ToolCallStream

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(Protocol):
    """Finds tool calls in a text that comes in pieces; what is no call is text of the answer."""

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """What is certain by now; ``is_final`` when no more text comes. The pieces do not change the sum."""
        ...


class ContentBuffer:
    """Text beside calls: blanks next to a call are part of the form and are left out."""

    def __init__(self) -> None:
        self._blanks = ""
        self._is_after_call = False

    def say(self, text: str, *, is_final: bool = False) -> Iterator[ContentDelta]:
        """Text; blanks at its end wait for what follows."""
        text = self._blanks + text
        if self._is_after_call:
            text = text.lstrip()
        kept = text if is_final and not self._is_after_call else text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._is_after_call = False
            yield ContentDelta(kept)

    def call(self) -> None:
        """A call comes here."""
        self._blanks, self._is_after_call = "", True


class _Machine:
    """Takes of the text what its state can, until the state stays the same."""

    def __init__(self, state: str, after_call: str, names: Collection[str] | None = None) -> None:
        """``after_call`` is the state after a call; ``names`` are those that make an object a call, None for any."""
        self._text = ""
        self._lead = ""
        """What came before the object that may be a call; part of the text if it is none."""
        self._state = state
        self._after_call = after_call
        self._names = names
        self._speech = ContentBuffer()
        self._scanner = ToolCallStream(0, names)
        self._steps: dict[str, Callable[[bool], Iterator[Delta]]] = {"call": self._inside}

    def feed(self, text: str, *, is_final: bool = False) -> Iterator[Delta]:
        """What is certain by now."""
        self._text += text
        state = ""
        while state != self._state:
            state = self._state
            yield from self._steps[state](is_final)
        if is_final:
            yield from self._speech.say("", is_final=True)

    def _inside(self, is_final: bool) -> Iterator[Delta]:
        """A call ends with its object; one that was never named is text as it stands."""
        scanner = self._scanner
        deltas, self._text = scanner.feed(self._text)
        if deltas and isinstance(deltas[0], ToolCallStart):
            self._speech.call()
        yield from deltas
        if scanner.state not in ("done", "broken") and not is_final:
            return
        if not scanner.has_begun:
            yield from self._speech.say(self._lead + scanner.raw)
        self._state = self._after_call if scanner.has_begun else "text"
        self._scanner = ToolCallStream(scanner.index + scanner.has_begun, self._names)


class HermesParser(_Machine):
    """Calls between tags, text between the calls."""

    def __init__(self) -> None:
        super().__init__("text", after_call="close")
        self._lead = CALL_OPEN
        self._steps |= {"text": self._outside, "close": self._close}

    def _outside(self, is_final: bool) -> Iterator[Delta]:
        plain, tag, self._text = split_at_tag(self._text, (CALL_OPEN,), is_final=is_final)
        yield from self._speech.say(plain)
        if tag:
            self._state = "call"

    def _close(self, is_final: bool) -> Iterator[Delta]:
        """The closing tag; models that forget it go on with text."""
        text = self._text.lstrip()
        if text.startswith(CALL_CLOSE):
            self._state, self._text = "text", text[len(CALL_CLOSE) :]
        elif is_final or not CALL_CLOSE.startswith(text):
            self._state = "text"
        yield from ()


class LlamaParser(_Machine):
    """A whole answer that is a call, several split by `;`, or a call behind the python tag."""

    def __init__(self, names: Collection[str]) -> None:
        """``names`` of the tools that may be called: a bare object that names none of them is an answer in JSON."""
        super().__init__("start", after_call="start", names=names)
        self._steps |= {"start": self._begin, "text": self._outside, "python": self._python}

    def _begin(self, is_final: bool) -> Iterator[Delta]:
        """At the beginning, and behind a call: blanks or `;`, then a call or anything else."""
        text = self._text.lstrip(" \t\r\n;" if self._scanner.index else None)
        if text.startswith("{"):
            self._lead = self._text[: len(self._text) - len(text)]
            self._state, self._text = "call", text
        elif is_final or not PYTHON_TAG.startswith(text):
            self._state = "text"
        yield from ()

    def _outside(self, is_final: bool) -> Iterator[Delta]:
        plain, tag, self._text = split_at_tag(self._text, (PYTHON_TAG,), is_final=is_final)
        yield from self._speech.say(plain)
        if tag:
            self._state = "python"

    def _python(self, is_final: bool) -> Iterator[Delta]:
        """JSON as without the tag; else one line of Python, which means nothing before it is whole."""
        text = self._text.lstrip()
        if text.startswith("{"):
            self._lead, self._text, self._state = "", text, "call"
        elif is_final:
            call = read_python_call(text)
            self._text = ""
            if call is None:
                yield from self._speech.say(text)
            else:
                self._speech.call()
                yield ToolCallStart(self._scanner.index, call[0])
                yield ToolCallArguments(self._scanner.index, call[1])
