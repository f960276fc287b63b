"""Detokenizer: incremental detokenization of one request, with stop strings. Torch-free, for the HTTP process.

Two kinds of text are held back: an incomplete UTF-8 character, and text that may be the start of a stop string or of a
match of a stop expression. Emitted text never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.stop_text import StopText
from tapscope.engine.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_MAX_INCOMPLETE = 4  # maximum number of tokens per incomplete character, as UTF-8 characters have at most four bytes
_NUM_PROMPT_TOKENS = 5  # prompt tokens used as decoding context, as in vLLM and SGLang


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text added by new tokens."""

    text: str
    """New text, without held-back text."""
    num_tokens: int
    """Number of tokens used; smaller than the number of pushed tokens if a stop condition ended the text."""
    matched: str | None = None
    """The stop string or stop expression that ended the text."""


class Detokenizer:
    """Incremental detokenizer of one request; ``params`` sets stop conditions and the handling of special tokens.

    The text continues the text of ``prompt_ids``. Decoders that strip the space before the first word, such as Llama
    2's, therefore keep the space before the first word of the output.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = _Decoder(tokenizer, params.skip_special_tokens, prompt_ids)
        self._params = params
        self._stops = StopText(params) if params.stops_on_text else None
        self._num_tokens = 0
        self._done = False

    def push(self, ids: Sequence[int], *, final: bool = False, end_token: int | None = None) -> TextDelta:
        """Add tokens and return the new text; ``final`` also emits held-back text.

        Pushes after a match or a final push return no text. ``end_token`` is the last token if it ended the generation;
        its text is emitted only with ``include_stop_str_in_output``.
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
        """Add ``new`` text, append the emitted text to ``pieces``, and return the matched stop condition, if any."""
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
    """Incremental decoder that decodes the last few tokens with and without the newest tokens.

    New tokens are decoded after a context of preceding tokens, because a decoder may treat the first token differently
    (SentencePiece strips a space). Text that ends in U+FFFD is held back: the next token may complete the character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context = self._tail(list(prompt_ids[-_NUM_PROMPT_TOKENS:]))
        """Tokens of the last emitted text; initially, the end of the prompt."""
        self._open: list[int] = []
        """Tokens after the context whose text is empty or ends in an incomplete character."""
        self._num_emitted = 0
        """Number of emitted characters of the open tokens' text."""
        self._num_incomplete = 0
        """Number of tokens since the text last ended in a complete character."""

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self._open.append(token)
        text = self._text()
        if not text.endswith(_UNKNOWN):
            self._num_incomplete = 0
            return self._emit(text, len(text))
        self._num_incomplete += 1
        # Within _MAX_INCOMPLETE tokens a byte-fallback decoder may still replace every U+FFFD; later only the last one.
        return self._emit(text, len(text) - 1) if self._num_incomplete > _MAX_INCOMPLETE else ""

    def flush(self) -> str:
        """Return the held-back text, with U+FFFD for an incomplete character."""
        text = self._text()
        return self._emit(text, len(text))

    def _tail(self, ids: list[int]) -> list[int]:
        """Return the longest suffix of ``ids`` that decodes to complete characters."""
        return next((ids[start:] for start in range(len(ids)) if _UNKNOWN not in self._decode(ids[start:])), [])

    def _text(self) -> str:
        """Decode the open tokens in their context."""
        before = self._decode(self._context)
        return self._decode(self._context + self._open)[len(before) :]

    def _emit(self, text: str, end: int) -> str:
        new = text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        if text and end == len(text):  # tokens without text do not become the context
            self._context, self._open, self._num_emitted = self._open, [], 0
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
