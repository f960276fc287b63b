"""StopText: find stop strings and stop expressions in streamed text. Torch-free, for the HTTP process."""

from collections.abc import Iterator

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.params.stop_regex import StopRegex


class StopText:
    """Streaming matcher for the stop conditions of one request; text that may start a match is held back."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop
        self._searches = [StopRegex(text) for text in params.stop_regex]
        self._include = params.include_stop_str_in_output
        self._held = ""
        self._num_emitted = 0
        """Number of emitted characters."""

    def skip(self, new: str) -> str:
        """Emit the held-back text and ``new`` without searching ``new`` for stop conditions."""
        for search in self._searches:
            search.skip(new)
        self._held += new
        return self._emit(len(self._held))

    def take(self, new: str, *, final: bool = False) -> tuple[str, str | None]:
        """Add ``new``; return the emitted text and the stop string or expression that ended the text, or None.

        The match that ends first wins; among several, the longest. ``final``: no more text follows.
        """
        self._held += new
        if ends := list(self._ends(new, final)):
            end, start, matched = min(ends)
            return self._emit(end if self._include else start), matched
        return self._emit(len(self._held) if final else min(self._starts(), default=len(self._held))), None

    def _ends(self, new: str, final: bool) -> Iterator[tuple[int, int, str]]:
        """Yield (end, start, condition) of each condition's first complete match, relative to the held-back text."""
        for stop in self._stops:
            if (start := self._held.find(stop)) >= 0:
                yield start + len(stop), start, stop
        for search in self._searches:
            match = search.feed(new)
            if match is None and final:
                match = search.finish()
            if match is not None:
                yield match[1] - self._num_emitted, match[0] - self._num_emitted, search.text

    def _starts(self) -> Iterator[int]:
        """Yield the starts of possible incomplete matches, relative to the held-back text."""
        for stop in self._stops:
            sizes = range(min(len(self._held), len(stop) - 1), 0, -1)
            yield from (len(self._held) - size for size in sizes if self._held.endswith(stop[:size]))
        for search in self._searches:
            if search.pending_start is not None:
                yield search.pending_start - self._num_emitted

    def _emit(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        self._num_emitted += end
        return given
