"""Tokenizer: encode text to token ids and decode ids to text with a checkpoint's tokenizer.json."""

import json
import re
from functools import cached_property
from pathlib import Path

import tokenizers

from tapscope.core.errors import CheckpointError
from tapscope.engine.params.json_file import lfs_pointer_error

_LONG_TEXT_CHARACTERS = 4096  # characters
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A Hugging Face fast tokenizer; raises CheckpointError if its file cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
            reason = lfs_pointer_error(path) or f"{path} is not a readable tokenizer.json: {error}"
            raise CheckpointError(reason) from None

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """Read the tokenizer of a checkpoint; None if the checkpoint has no tokenizer.json."""
        path = folder / "tokenizer.json"
        return cls(path) if path.exists() else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, by default with the special tokens that the post-processor adds."""
        if len(text) < _LONG_TEXT_CHARACTERS:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        # encode holds the GIL, encode_batch releases it
        return list(self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, by default without special tokens; ids outside the vocabulary have no text."""
        try:
            return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))
        except OverflowError:  # the library accepts unsigned 32-bit ids only
            ids = [each for each in ids if 0 <= each < 1 << 32]
            return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, regardless of its neighbors; they may be a part of a UTF-8 character.

        Byte-level vocabularies (GPT-2's byte-to-character table) and SentencePiece vocabularies (``▁``, ``<0xE2>``) are
        decoded as by their decoders; an id outside the vocabulary has no bytes.
        """
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in token if char in _BYTES)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def token_string(self, token_id: int) -> str:
        """Return the token as spelled in tokenizer.json, such as ``Ġthe``; empty for an id outside the vocabulary."""
        return self._inner.id_to_token(token_id) or ""

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self._inner.get_vocab()), default=1)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens as strings."""
        return tuple(token.content for token in self._inner.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def plain_ids(self) -> tuple[int, ...]:
        """Ids of ordinary text tokens, without added tokens."""
        return tuple(token for token in range(self._inner.get_vocab_size()) if token not in self._added)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])


def _byte_table() -> dict[str, int]:
    """Return GPT-2's table from character to byte, where unprintable bytes are characters from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in prints}
    others = (byte for byte in range(0x100) if byte not in set(prints))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_table()
