"""Detokenizer: incremental text of one request, cut at its stop condition. Torch-free: the HTTP process uses it too.

Two kinds of text are held back: an incomplete UTF-8 character, and text that may be the beginning of a stop string or
a match of a stop expression. Emitted text never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.stop_text import StopText
from tapscope.engine.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_MAX_HALF = 4  # tokens without a complete character; UTF-8 characters have at most four bytes
_NUM_PROMPT_TOKENS = 5  # before the output, as in vLLM and SGLang


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that new tokens add."""

    text: str
    """New text, without text that is held back."""
    num_tokens: int
    """Number of tokens used; less than were given if the text ended before the last one."""
    matched: str | None = None
    """The stop string or expression that ended the text."""


class Detokenizer:
    """Detokenizer of one request; ``params`` has its stop conditions and whether special tokens are skipped.

    The text continues that of ``prompt_ids``: a decoder that strips the space in front of the first word, such as
    Llama 2's, keeps it before the first word of the output.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = _Decoder(tokenizer, params.skip_special_tokens, prompt_ids)
        self._params = params
        self._stops = StopText(params) if params.stops_on_text else None
        self._num_tokens = 0
        self._done = False

    def push(self, ids: Sequence[int], *, final: bool = False, end_token: int | None = None) -> TextDelta:
        """Add tokens; ``final`` emits text that is held back. Nothing follows a match or a final push.

        ``end_token``: the last token, if it ended the generation; it is shown only with
        ``include_stop_str_in_output``.
        """
        if self._done:
            return TextDelta("", 0)
        pieces: list[str] = []
        shown = len(ids)
        if end_token is not None and ids and ids[-1] == end_token and not self._params.include_stop_str_in_output:
            shown -= 1
        for count, token in enumerate(ids[:shown], start=1):
            matched = self._take(self._decoder.push(token), pieces)
            if matched is not None:
                return TextDelta("".join(pieces), count, matched)
        matched = self._take(self._decoder.flush(), pieces, final=True) if final else None
        return TextDelta("".join(pieces), len(ids), matched)

    def _take(self, new: str, pieces: list[str], *, final: bool = False) -> str | None:
        """Add ``new`` and append the emitted text to ``pieces``; returns the stop string that matched, or None."""
        self._num_tokens += 1
        if self._stops is None:
            text, matched = new, None
        elif self._num_tokens <= self._params.min_new_tokens:
            text, matched = self._stops.skip(new), None
        else:
            text, matched = self._stops.take(new, final=final)
        pieces.append(text)
        self._done = final or matched is not None
        return matched


class _Decoder:
    """Incremental decoding: decodes the last few tokens with and without the newest.

    Tokens are decoded after the preceding ones, because a decoder may treat the first token differently (SentencePiece
    strips a space). Text that ends in U+FFFD is held back: the next token may complete the character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context = self._tail(list(prompt_ids[-_NUM_PROMPT_TOKENS:]))
        """Tokens of the last emitted text, at first of the prompt's end."""
        self._open: list[int] = []
        """Tokens after these; their text is empty or ends in an incomplete character."""
        self._num_given = 0
        """Characters of the open tokens' text that were emitted."""
        self._num_half = 0
        """Tokens since the text ended in a complete character."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        self._open.append(token)
        text = self._text()
        if not text.endswith(_UNKNOWN):
            self._num_half = 0
            return self._give(text, len(text))
        self._num_half += 1
        # Up to this many tokens a byte-fallback decoder may still replace every U+FFFD; later only the last one.
        return self._give(text, len(text) - 1) if self._num_half > _MAX_HALF else ""

    def flush(self) -> str:
        """The text that is held back, with U+FFFD for an incomplete character."""
        text = self._text()
        return self._give(text, len(text))

    def _tail(self, ids: list[int]) -> list[int]:
        """The longest end of ``ids`` that consists of complete characters."""
        return next((ids[start:] for start in range(len(ids)) if _UNKNOWN not in self._decode(ids[start:])), [])

    def _text(self) -> str:
        """Text of the open tokens."""
        before = self._decode(self._context)
        return self._decode(self._context + self._open)[len(before) :]

    def _give(self, text: str, end: int) -> str:
        new = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if text and end == len(text):  # tokens without text do not become the context
            self._context, self._open, self._num_given = self._open, [], 0
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
