"""ReasoningTokens: count the reasoning tokens of an output."""

from tapscope.engine.api import reasoning
from tapscope.engine.api.harmony_parser import CHANNEL, ENDS, MESSAGE
from tapscope.engine.api.reply import ReplyFormat
from tapscope.engine.text.tokenizer import Tokenizer

_OPEN, _CLOSE = reasoning.OPEN.encode(), reasoning.CLOSE.encode()
_MESSAGE, _CHANNEL, _ENDS = MESSAGE.encode(), CHANNEL.encode(), tuple(each.encode() for each in ENDS)


class ReasoningTokens:
    """Streaming counter of the tokens between the reasoning tags; the tags themselves do not count, as in vLLM.

    Tags are matched on the bytes of the tokens, so a tag may span several tokens and outputs may be split anywhere.
    """

    def __init__(self, form: ReplyFormat, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_harmony = form.reasoning_format == "gpt_oss"
        # a fourth state, "other": inside a gpt-oss message that is not reasoning
        self._state = "ended" if form.reasoning_format is None else "inside" if form.is_thinking else "before"
        self._closes = _ENDS if self._is_harmony else (_CLOSE,)
        self._bytes = bytearray()  # bytes since the last state change
        self._starts: list[int] = []  # offset of each token in _bytes
        self._counted = 0  # reasoning tokens of earlier messages

    @property
    def count(self) -> int:
        """Number of reasoning tokens so far; tokens of a closing tag count until the tag is complete."""
        return self._counted + (len(self._starts) if self._state == "inside" else 0)

    def push(self, token_ids: tuple[int, ...]) -> None:
        """Append the next tokens of the output."""
        for token in token_ids:
            if self._state == "ended":
                return
            start = len(self._bytes)
            self._bytes += self._tokenizer.token_bytes(token)
            self._starts.append(start)
            if self._state == "before":
                self._look_for_start()
            else:
                self._look_for_end(start)

    def _look_for_start(self) -> None:
        if self._is_harmony:
            if _MESSAGE in self._bytes:
                header = bytes(self._bytes).partition(_MESSAGE)[0]
                is_reasoning = header.partition(_CHANNEL)[2].strip().startswith(b"analysis")
                self._enter("inside" if is_reasoning else "other")
            return
        text = self._bytes.lstrip()
        if text.startswith(_OPEN):
            self._enter("inside")
        elif text and not _OPEN.startswith(text):
            self._enter("ended")

    def _look_for_end(self, start: int) -> None:
        positions = [self._bytes.find(tag, max(0, start - len(tag))) for tag in self._closes]
        matches = [position for position in positions if position >= 0]
        if matches:
            self._counted += sum(each < min(matches) for each in self._starts) if self._state == "inside" else 0
            self._enter("before" if self._is_harmony else "ended")

    def _enter(self, state: str) -> None:
        self._state = state
        self._bytes.clear()
        self._starts.clear()
