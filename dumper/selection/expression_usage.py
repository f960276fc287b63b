"""ExpressionUsage: tracks the expressions of rules and filters that were evaluated, and those that were ever true."""

from collections.abc import Callable
from typing import Any


class ExpressionUsage:
    """Usage of the expressions in one run; an expression that was evaluated but never true is probably a mistake."""

    def __init__(self) -> None:
        self._evaluated: dict[str, None] = {}
        self._were_true: set[str] = set()

    def record(self, text: str, holds: bool) -> None:
        """Record one result of the expression ``text``."""
        self._evaluated[text] = None
        if holds:
            self._were_true.add(text)

    def recording(self, text: str, test: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``test``, the expression ``text``, to record its results until it has been true once."""
        were_true, note = self._were_true, self.record

        def recorded_test(context: Any) -> Any:
            value = test(context)
            if text not in were_true:
                note(text, bool(value))
            return value

        return recorded_test

    def never_held(self) -> list[str]:
        """Return the expressions that were evaluated but never true, in order of first evaluation."""
        return [text for text in self._evaluated if text not in self._were_true]
