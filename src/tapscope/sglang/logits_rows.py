"""Logits rows: SGLang computes logits for the last row of each request in a step but does not dump the row indices."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tapscope.core.token_rows import Arguments, RowReader
from tapscope.run_format.tensor_layout import Tensor

Array = np.ndarray[Any, Any]
Rows = tuple[tuple[int, int], ...]
LOGITS = "next_token_logits"
_ARGUMENTS = {"input_ids": "ids", "positions": "positions", "seq_lens": "lengths"}


class LogitsRows:
    """Rows of ``next_token_logits``, inferred from the model's arguments in the same step on the same rank."""

    def __init__(self, read: Callable[[str, Tensor], Array]) -> None:
        """``read`` reads a tensor from a file of the dump."""
        self._read = read
        self._arguments: dict[tuple[int, int], dict[str, tuple[str, Tensor]]] = {}
        self._last_rows: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        """(step, rank) -> (number of rows in the step, last row of each request)."""

    def note_argument(self, name: str, place: tuple[int, int], file: str, value: object) -> None:
        """Remember the first argument ``name`` at ``place``, a (step, rank); other names are ignored."""
        if name in _ARGUMENTS and isinstance(value, Tensor):
            self._arguments.setdefault(place, {}).setdefault(_ARGUMENTS[name], (file, value))

    def rows_of(self, place: tuple[int, int], shape: tuple[int, ...]) -> Rows | None:
        """Return the rows of logits with this shape as (first row, number of rows) spans.

        None if the logits cover all rows of the step, or if the rows are unknown. Raises RunCorruptError if an argument
        can no longer be read.
        """
        if place not in self._last_rows:
            self._last_rows[place] = self._infer(place)
        count, last = self._last_rows[place]
        return tuple((row, 1) for row in last) if last and len(shape) == 2 and shape[0] == len(last) < count else None

    def _infer(self, place: tuple[int, int]) -> tuple[int, tuple[int, ...]]:
        given = {what: self._read(*stored) for what, stored in self._arguments.get(place, {}).items()}
        if "ids" not in given:
            return 0, ()
        arguments = Arguments(ids=given["ids"], positions=given.get("positions"), lengths=given.get("lengths"))
        info = RowReader().read(place[0], "forward", arguments)
        return given["ids"].size, tuple(row.slot + row.count - 1 for row in info.rows) if info is not None else ()
