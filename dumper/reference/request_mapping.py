"""RequestMapping: map live requests to the requests of a reference run with the same tokens."""

from collections.abc import Mapping

from msgspec import structs

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.run_format.run import Run


class RequestMapping:
    """Matches each live request to a reference request by tokens, and truncates it where the tokens diverge.

    Request names differ between runs, because servers generate them. The tokens of the first live rows select the
    reference request; among several candidates, one with the same name is preferred, then one not matched yet.
    """

    def __init__(self, steps: Mapping[int, StepInfo]) -> None:
        """``steps`` are the steps of the reference run by number."""
        self._tokens: dict[tuple[str, int], int] = {}
        self._names: dict[str, None] = {}
        for number in sorted(steps):
            info = steps[number]
            tokens = iter(info.token_ids)
            for span in info.rows:
                self._names[span.request] = None
                for i in range(span.count):
                    if (token := next(tokens, None)) is not None:
                        self._tokens[span.request, span.position + i] = token
        self._matches: dict[str, str | None] = {}
        self.forks: dict[str, int] = {}
        """Live request -> first position at which its token differs from the reference."""

    @classmethod
    def of(cls, run: Run) -> "RequestMapping":
        """Create the mapping to the requests of ``run``."""
        return cls({step: next(iter(lines.values())).info for step, lines in run.steps.items()})

    def translate(self, step: StepInfo) -> StepInfo:
        """Return the step with the request names of the reference, without rows that the reference lacks."""
        if not step.rows:
            return step
        rows: list[RowSpan] = []
        tokens, at = step.token_ids, 0
        for span in step.rows:
            own = list(tokens[at : at + span.count])
            at += span.count
            name = self._name(span, own)
            count = 0 if name is None else self._num_equal(name, span, own)
            if name is not None and count < span.count:
                self.forks.setdefault(span.request, span.position + count)
            if name is not None and count and span.position < self.forks.get(span.request, span.position + 1):
                rows.append(structs.replace(span, request=name, count=count))
        return structs.replace(step, rows=tuple(rows), token_ids=())

    def _name(self, span: RowSpan, tokens: list[int]) -> str | None:
        live = span.request
        if live not in self._matches:
            used = set(self._matches.values())
            same_start = [
                name for name in self._names if not tokens or self._num_equal(name, span, tokens) == span.count
            ]
            if not tokens or not self._tokens:
                same_start = [live] if live in self._names else []
            ranked = sorted(same_start, key=lambda name: (name != live, name in used))
            fallback = live if live in self._names else None
            self._matches[live] = ranked[0] if ranked else fallback
        return self._matches[live]

    def _num_equal(self, name: str, span: RowSpan, tokens: list[int]) -> int:
        """Return the number of leading rows of the span with the reference's tokens; all rows if tokens are unknown."""
        if not tokens or not self._tokens:
            return span.count
        for i, token in enumerate(tokens):
            if self._tokens.get((name, span.position + i)) != token:
                return i
        return span.count
