"""ExpressionUsage: which expressions of rules and filters were evaluated, and which were ever true."""

from collections.abc import Callable
from typing import Any


class ExpressionUsage:
    """Results of the expressions of one run; an expression that was never true is probably a mistake."""

    def __init__(self) -> None:
        self._asked: dict[str, None] = {}
        self._held: set[str] = set()

    def record(self, text: str, holds: bool) -> None:
        """Record one result."""
        self._asked[text] = None
        if holds:
            self._held.add(text)

    def recording(self, text: str, test: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``test``, with its results recorded until it has been true once."""
        held, note = self._held, self.record

        def noted(context: Any) -> Any:
            value = test(context)
            if text not in held:
                note(text, bool(value))
            return value

        return noted

    def never_held(self) -> list[str]:
        """Expressions that were evaluated and never true, in order."""
        return [text for text in self._asked if text not in self._held]
