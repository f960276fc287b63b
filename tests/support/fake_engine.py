"""A fake model: each cache entry is a digest of the prefix, and the next token is computed from the last entry.

A page that is mapped wrongly, stale, or freed too early therefore changes a token, and is detected before that.
"""

from collections.abc import Sequence

from tapscope.core.wire import decode, encode
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan

VOCAB = 5


def digests(tokens: Sequence[int]) -> list[int]:
    """Return the cache entry of each position."""
    found, last = [], 0
    for token in tokens:
        last = (last * 1_000_003 + token + 1) % (1 << 61)
        found.append(last)
    return found


def next_token(digest: int) -> int:
    return digest // 7 % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the output tokens of a request that runs alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(digests(tokens)[-1]))
    return tokens[len(prompt) :]


class FakeRank:
    """Executes plans like a rank; it knows page tables only from the plans."""

    def __init__(self, page_size: int, window: int | None = None, windowed: Sequence[int] = ()) -> None:
        """Create a rank; ``window`` is that of the primary cache group, ``windowed`` those of further groups."""
        self._size, self._windows = page_size, (window, *windowed)
        self._pool: dict[tuple[int, int, int], int] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self._states: dict[int, int] = {-1: 0}  # recurrent state slot -> digest of the last position

    def execute(self, plan: StepPlan, requests: dict[str, Request]) -> list[int]:
        plan = StepPlan.from_message(decode(encode(plan.to_message())))
        for item in plan.scheduled:
            updates = [(item.page_start, item.pages), *((start, pages) for start, *pages in item.windowed_pages)]
            assert len(updates) == len(self._windows)
            for group, (start, pages) in enumerate(updates):
                self._tables.setdefault((group, item.row), {}).update(enumerate(pages, start))
        for item in plan.scheduled:
            for i, digest in enumerate(self._expected(item, requests)[item.position :]):
                for group in range(len(self._windows)):
                    self._pool[self._slot(group, item, item.position + i)] = digest
        tokens = []
        for item in plan.scheduled:
            expected = self._expected(item, requests)
            for group, window in enumerate(self._windows):
                first = 0 if window is None else max(0, item.position - window + 1)
                seen = [self._pool.get(self._slot(group, item, position)) for position in range(first, len(expected))]
                assert seen == expected[first:], f"{item.request} reads what is not its own in group {group}"
            if item.states:
                read, write = item.states
                before = expected[item.position - 1] if item.position else 0
                assert self._states.get(read) == before, f"{item.request} continues from a state that is not its own"
                assert (read < 0) == (not item.position)
                self._states[write] = expected[-1]
            if item.samples:
                tokens.append(next_token(seen[-1]))
        return tokens

    def _expected(self, item: ScheduledRequest, requests: dict[str, Request]) -> list[int]:
        end = item.position + len(item.tokens)
        known = requests[item.request].tokens
        assert tuple(known[item.position : end]) == item.tokens
        return digests(known[:end])

    def _slot(self, group: int, item: ScheduledRequest, position: int) -> tuple[int, int, int]:
        return group, self._tables[group, item.row][position // self._size], position % self._size
