"""Tokenizer: text to ids and back, through a checkpoint's tokenizer.json."""

import json
import re
from functools import cached_property
from pathlib import Path

import tokenizers

from tapscope.core.errors import CheckpointError

_LONG = 4096  # characters
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A Hugging Face fast tokenizer; raises CheckpointError when its file cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
            raise CheckpointError(f"{path} is no readable tokenizer.json: {error}") from None

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint, or None when it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        return cls(path) if path.exists() else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the file's post-processor adds unless told otherwise."""
        if len(text) < _LONG:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        # encode holds the GIL until it is done, encode_batch does not
        return list(self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; special tokens are left out unless told otherwise."""
        return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; none of the neighbours is needed, so a character may be cut in two.

        Byte-level vocabularies (GPT-2's table of printable stand-ins) and SentencePiece's (``▁``, ``<0xE2>``) are
        read as their decoders read them; an id beyond the vocabulary has no bytes.
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

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for at most."""
        return max(map(len, self._inner.get_vocab()), default=1)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(token.content for token in self._inner.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def plain_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that are plain text: no added ones, which mean something to the model."""
        return tuple(token for token in range(self._inner.get_vocab_size()) if token not in self._added)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])


def _stand_ins() -> dict[str, int]:
    """Printable character -> byte, as GPT-2 maps bytes that do not print to characters from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in prints}
    others = (byte for byte in range(0x100) if byte not in set(prints))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _stand_ins()
