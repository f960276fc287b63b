"""Ids and text of tokens, displayed after the position of a row."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tapscope.comparator.report.token_text import TokenText, find_tokenizer
from tapscope.run_format.ledger import StepLine
from tapscope.run_format.run import Run

_Tokens = dict[tuple[str, int], dict[int, int]]


class TokenLabels:
    """Maps a position to its token: the id, and the text if the tokenizer is known."""

    def __init__(self, tokens: _Tokens | None = None, text: TokenText | None = None) -> None:
        """``tokens`` maps (request, branch) -> position -> token id."""
        self._tokens, self._text = tokens or {}, text
        self._texts: dict[int, str] = {}

    @classmethod
    def of(cls, runs: Sequence[Run], steps: Iterable[StepLine], tokenizer: Path | None = None) -> "TokenLabels":
        """Collect the tokens of ``steps``; a later step overrides an earlier one.

        The tokenizer is loaded from the given path, or else from the checkpoint that one of the runs names as its
        model.
        """
        tokens: _Tokens = {}
        for line in steps:
            ids = iter(line.info.token_ids)
            for span in line.rows:
                positions = range(span.position, span.position + span.count)
                tokens.setdefault((span.request, span.branch), {}).update(zip(positions, ids, strict=False))
        return cls(tokens, find_tokenizer(runs, tokenizer) if tokens else None)

    def of_place(self, request: str, position: int, branch: int = 0) -> str:
        """Return ``" #1820"``, or ``" #1820 ' the'"`` with text; empty for an unknown token."""
        token = self._tokens.get((request, branch), {}).get(position)
        if token is None:
            return ""
        if token not in self._texts:
            text = self._text.of(token) if self._text is not None else ""
            self._texts[token] = f" #{token} {text!r}" if text else f" #{token}"
        return self._texts[token]
