"""Holding: which expressions of rules and filters were asked, and which ever held."""

from collections.abc import Callable
from typing import Any


class ExpressionUsage:
    """What became of the expressions of one run; those that never held are most likely not what was meant."""

    def __init__(self) -> None:
        self._asked: dict[str, None] = {}
        self._held: set[str] = set()

    def record(self, text: str, holds: bool) -> None:
        """It was asked, and that was the answer."""
        self._asked[text] = None
        if holds:
            self._held.add(text)

    def recording(self, text: str, test: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``test``, with every answer noted until it has held once."""
        held, note = self._held, self.record

        def noted(context: Any) -> Any:
            value = test(context)
            if text not in held:
                note(text, bool(value))
            return value

        return noted

    def never_held(self) -> list[str]:
        """Those that were asked, in that order, and never held."""
        return [text for text in self._asked if text not in self._held]
