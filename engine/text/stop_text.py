"""StopText: where a generation's text ends by what it says: stop strings and stop expressions, as text comes.

Torch-free: a front end uses it too.
"""

from collections.abc import Iterator

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.params.stop_regex import StopRegex


class StopText:
    """Of one request. Text is held back while it may be the beginning of something that ends it."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop
        self._searches = [StopRegex(text) for text in params.stop_regex]
        self._include = params.include_stop_str_in_output
        self._held = ""
        self._num_given = 0
        """Characters given out, before what is held back."""

    def skip(self, new: str) -> str:
        """Give ``new`` out, and what was held back, whatever it says."""
        for search in self._searches:
            search.skip(new)
        self._held += new
        return self._give(len(self._held))

    def take(self, new: str, *, final: bool = False) -> tuple[str, str | None]:
        """What is certain once ``new`` has come, and the stop string or expression that ended the text, if one did.

        What is complete first ends it, and the longest of those. ``final``: nothing more will come.
        """
        self._held += new
        if ends := list(self._ends(new, final)):
            end, start, matched = min(ends)
            return self._give(end if self._include else start), matched
        return self._give(len(self._held) if final else min(self._starts(), default=len(self._held))), None

    def _ends(self, new: str, final: bool) -> Iterator[tuple[int, int, str]]:
        """(end, start, what it is) within what is held back, of the first of each that is complete."""
        for stop in self._stops:
            if (start := self._held.find(stop)) >= 0:
                yield start + len(stop), start, stop
        for search in self._searches:
            found = search.feed(new)
            if found is None and final:
                found = search.finish()
            if found is not None:
                yield found[1] - self._num_given, found[0] - self._num_given, search.text

    def _starts(self) -> Iterator[int]:
        """Where what is not complete may have begun, within what is held back."""
        for stop in self._stops:
            sizes = range(min(len(self._held), len(stop) - 1), 0, -1)
            yield from (len(self._held) - size for size in sizes if self._held.endswith(stop[:size]))
        for search in self._searches:
            if search.pending_start is not None:
                yield search.pending_start - self._num_given

    def _give(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        self._num_given += end
        return given
