"""Detokenizer: the text of one request as its tokens come, cut where it stops. Torch-free: a front end uses it too.

Two things are held back: half a character, whose other bytes are tokens to come, and text that may be the beginning of
a stop string or expression. Everything that has been given out stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.stop_text import StopText
from tapscope.engine.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_MAX_HALF = 4  # tokens without one whole character: UTF-8 takes at most four bytes, so these are no text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added."""

    text: str
    """New text that is certain."""
    num_tokens: int
    """Tokens taken: fewer than were given when the text ended before the last."""
    matched: str | None = None
    """The stop string or expression that ended the text."""


class Detokenizer:
    """One request's; ``params`` says what ends its text and whether special tokens show."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = _Decoder(tokenizer, params.skip_special_tokens)
        self._params = params
        self._stops = StopText(params) if params.stops_on_text else None
        self._num_tokens = 0
        self._done = False

    def push(self, ids: Sequence[int], *, final: bool = False, end_token: int | None = None) -> TextDelta:
        """Take new tokens; ``final`` gives out what is held back. Nothing comes after a match or a final push.

        ``end_token``: the token that ended the generation, the last one; it shows only under
        ``include_stop_str_in_output``.
        """
        if self._done:
            return TextDelta("", 0)
        texts: list[str] = []
        shown = len(ids)
        if end_token is not None and ids and ids[-1] == end_token and not self._params.include_stop_str_in_output:
            shown -= 1
        for count, token in enumerate(ids[:shown], start=1):
            matched = self._take(self._decoder.push(token), texts)
            if matched is not None:
                return TextDelta("".join(texts), count, matched)
        matched = self._take(self._decoder.flush(), texts, final=True) if final else None
        return TextDelta("".join(texts), len(ids), matched)

    def _take(self, new: str, texts: list[str], *, final: bool = False) -> str | None:
        """Put what is certain after ``new`` to ``texts``; what ended the text, if something did."""
        self._num_tokens += 1
        if self._stops is None:
            text, matched = new, None
        elif self._num_tokens <= self._params.min_new_tokens:
            text, matched = self._stops.skip(new), None
        else:
            text, matched = self._stops.take(new, final=final)
        texts.append(text)
        self._done = final or matched is not None
        return matched


class _Decoder:
    """Tokens to text without decoding everything again: the last few tokens, with and without the newest.

    Tokens are decoded behind the ones before them, because a decoder may treat its first token in a way of its own
    (SentencePiece strips a space). Text that ends in U+FFFD waits: the next token may complete the character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        """Tokens given out last."""
        self._open: list[int] = []
        """Tokens since; their text ends in half a character, or there is none."""
        self._num_given = 0
        """Characters of the open tokens' text that have been given out."""
        self._num_half = 0
        """Tokens since a whole character ended the text."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        self._open.append(token)
        text = self._text()
        if not text.endswith(_UNKNOWN):
            self._num_half = 0
            return self._give(text, len(text))
        self._num_half += 1
        # Before so many tokens a byte-fallback decoder may take back every U+FFFD; later only the last is open.
        return self._give(text, len(text) - 1) if self._num_half > _MAX_HALF else ""

    def flush(self) -> str:
        """What waits, with U+FFFD for the half character that nothing completes."""
        text = self._text()
        return self._give(text, len(text))

    def _text(self) -> str:
        """Text of the open tokens."""
        before = self._decode(self._context)
        return self._decode(self._context + self._open)[len(before) :]

    def _give(self, text: str, end: int) -> str:
        new = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if text and end == len(text):  # a token without text is no context: the next one is behind the last shown
            self._context, self._open, self._num_given = self._open, [], 0
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
