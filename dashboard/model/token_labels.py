"""TokenLabels: ids and text of the tokens of rows, to be shown after their positions."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tapscope.comparator.report.token_text import TokenText, find_tokenizer
from tapscope.run_format.ledger import StepLine
from tapscope.run_format.run import Run

_Tokens = dict[tuple[str, int], dict[int, int]]


class TokenLabels:
    """The token at a position: its id, and its text where the tokenizer is known."""

    def __init__(self, tokens: _Tokens | None = None, text: TokenText | None = None) -> None:
        """``tokens`` are (request, branch) -> position -> token id."""
        self._tokens, self._text = tokens or {}, text
        self._texts: dict[int, str] = {}

    @classmethod
    def of(cls, runs: Sequence[Run], steps: Iterable[StepLine], tokenizer: Path | None = None) -> "TokenLabels":
        """The tokens of ``steps``, of which later ones count, with the tokenizer of this path, else of a checkpoint
        that one of the runs names as its model."""
        tokens: _Tokens = {}
        for line in steps:
            ids = iter(line.info.token_ids)
            for span in line.rows:
                positions = range(span.position, span.position + span.count)
                tokens.setdefault((span.request, span.branch), {}).update(zip(positions, ids, strict=False))
        return cls(tokens, find_tokenizer(runs, tokenizer) if tokens else None)

    def of_place(self, request: str, position: int, branch: int = 0) -> str:
        """``" #1820"``, or ``" #1820 ' the'"``; empty for an unknown token."""
        token = self._tokens.get((request, branch), {}).get(position)
        if token is None:
            return ""
        if token not in self._texts:
            text = self._text.of(token) if self._text is not None else ""
            self._texts[token] = f" #{token} {text!r}" if text else f" #{token}"
        return self._texts[token]
