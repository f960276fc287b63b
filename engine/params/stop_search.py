"""StopSearch: one stop expression, looked for in a text as it grows."""

from collections.abc import Iterable

from tapscope.engine.params.stop_regex_nfa import ACCEPT, Program, compiled


class StopSearch:
    """Finds what is complete first; every place where it may have begun is followed at once."""

    def __init__(self, text: str) -> None:
        """Raises UsageError."""
        self._program: Program = compiled(text)
        self._live: dict[int, int] = {}
        """State -> the earliest place where what has led to it began."""
        self._left = ""
        """The character before."""
        self._place = 0

    @property
    def text(self) -> str:
        """The expression as it was written."""
        return self._program.text

    @property
    def first_start(self) -> int | None:
        """Where the earliest of what is not complete began; None when nothing has."""
        return min(self._live.values(), default=None)

    def skip(self, new: str) -> None:
        """Nothing that begins in ``new``, or before, counts."""
        self._live = {}
        self._place += len(new)
        self._left = new[-1:] or self._left

    def take(self, new: str) -> tuple[int, int] | None:
        """[start, end) of what is complete with ``new``; nothing may be taken afterwards."""
        for character in new:
            if (found := self._take(character)) is not None:
                return found
        return None

    def finish(self) -> tuple[int, int] | None:
        """As :meth:`take`, when nothing more will come."""
        live = self._spread(self._live.items(), "")
        return (live[ACCEPT], self._place) if ACCEPT in live else None

    def _take(self, right: str) -> tuple[int, int] | None:
        states = self._program.states
        here = self._spread([*self._live.items(), (self._program.start, self._place)], right)
        if ACCEPT in here:
            return here[ACCEPT], self._place
        taken = [(state, start) for state, start in here.items() if (takes := states[state].takes) and takes(right)]
        self._left, self._place = right, self._place + 1
        after = [(number, start) for state, start in taken for number in states[state].after]
        self._live = self._spread(after, None)
        return (self._live[ACCEPT], self._place) if ACCEPT in self._live else None

    def _spread(self, begun: Iterable[tuple[int, int]], right: str | None) -> dict[int, int]:
        """All states that are reached without a character: those that wait for one, and the last.

        ``right`` is the next character, empty at the end of the text; while it is None conditions on it wait, too.
        """
        reached: dict[int, int] = {}
        seen: set[int] = set()
        for first, start in sorted(begun, key=lambda each: each[1]):
            todo = [first]
            while todo:
                number = todo.pop()
                if number in seen:
                    continue
                seen.add(number)
                state = self._program.states[number]
                if number == ACCEPT or state.takes is not None or (state.looks_ahead and right is None):
                    reached[number] = start
                elif state.holds is None or state.holds(self._left, right or ""):
                    todo += state.after
        return reached
