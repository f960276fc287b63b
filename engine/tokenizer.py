"""Tokenizer: text to ids and back, through a checkpoint's tokenizer.json."""

from pathlib import Path

import tokenizers

from tapscope.errors import CheckpointError


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

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the file's post-processor adds."""
        return list(self._inner.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; special tokens are left out."""
        return str(self._inner.decode(ids, skip_special_tokens=True))
