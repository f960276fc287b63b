"""Request matching: pair each request of the target with its counterpart in the baseline.

A user-given name decides. A plain number does not, because it is a batch index. Tokens decide next: equal tokens first,
then the longest common prefix that covers at least the shorter prompt, each request once. The remaining requests are
matched by number, so that different prompts are reported as different.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field

from tapscope.comparator.alignment.request_history import Request, is_generated_name
from tapscope.core import formatting

Array = np.ndarray[Any, Any]

MAX_TRIES = 40_000
"""Maximum number of pairs of unmatched requests whose tokens are compared; beyond it, requests are reported as not
tried."""

MIN_MOVED = 4
"""Minimum number of equal tokens at shifted positions that rules out chance, unless the requests have no other
tokens."""


NAMED = 4
"""Number of requests listed in one sentence."""


class RequestPair(Struct, frozen=True):
    """A pair of requests, as indices into the requests of both sides."""

    baseline: int
    target: int
    shift: int = 0
    """Target position minus baseline position."""


class RequestMatching(Struct):
    """The paired requests, with sentences on assumptions (notes) and on unpaired requests (problems)."""

    pairs: list[RequestPair]
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    padding: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    """Unpaired requests of (baseline, target) that are padding."""


class _Match(Struct):
    """Work list of the matching: the pairs so far and the requests without a partner."""

    sides: tuple[Sequence[Request], Sequence[Request]]
    rest: tuple[list[int], list[int]]
    pairs: list[tuple[int, int]] = field(default_factory=list)
    num_ambiguous: int = 0

    def take(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Record pairs and remove their requests from :attr:`rest`."""
        new_pairs = list(pairs)
        self.pairs += new_pairs
        for side, taken in enumerate(zip(*new_pairs, strict=True)):
            gone = set(taken)
            self.rest[side][:] = [i for i in self.rest[side] if i not in gone]

    def by(self, key: Callable[[Request], object]) -> list[tuple[list[int], list[int]]]:
        """Group unmatched requests by ``key``; return groups with requests on both sides. A key of None matches
        nothing."""
        groups: dict[object, tuple[list[int], list[int]]] = {}
        for side, rest in enumerate(self.rest):
            for i in rest:
                if (value := key(self.sides[side][i])) is not None:
                    groups.setdefault(value, ([], []))[side].append(i)
        return [group for group in groups.values() if all(group)]


def match_requests(
    names: tuple[str, str],
    left: Sequence[Request],
    right: Sequence[Request],
    padding: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
) -> RequestMatching:
    """Pair the requests of both runs.

    ``names`` are the run names, for messages. ``padding`` are the requests of each run that look like padding; they
    count as padding only if they have no partner.
    """
    work = _Match((left, right), (list(range(len(left))), list(range(len(right)))))
    chosen = _chosen_names(left) & _chosen_names(right)
    work.take((i, j) for (i, *_), (j, *_) in work.by(lambda r: r.name if r.name in chosen else None))
    for group in work.by(lambda r: (r.first, words) if (words := r.text) else None):
        work.num_ambiguous += min(map(len, group)) if max(map(len, group)) > 1 else 0
        work.take(_like_named(work, *group))
    for group in work.by(lambda r: r.first if r.text else None):
        work.take(_by_beginning(work, *group))
    missed = _by_overlap(work)
    for one, two in work.by(lambda r: (r.name, r.part)):
        work.take(zip(one, two, strict=False))
    return _to_matching(work, names, missed, padding)


def _chosen_names(requests: Sequence[Request]) -> set[str]:
    """Return the user-given names that belong to exactly one request."""
    counts = Counter(r.name for r in requests)
    return {name for name, count in counts.items() if count == 1 and not is_generated_name(name)}


def _like_named(work: _Match, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Pair requests with equal tokens: requests with the same name first, the others in order."""
    by_name = {(work.sides[1][j].name, work.sides[1][j].part): j for j in right}
    pairs = [(i, j) for i in left if (j := by_name.get((work.sides[0][i].name, work.sides[0][i].part))) is not None]
    taken = {i for i, _ in pairs}, {j for _, j in pairs}
    others = ([i for i in side if i not in gone] for side, gone in zip((left, right), taken, strict=True))
    return pairs + list(zip(*others, strict=False))


def _by_beginning(work: _Match, left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Pair requests with the same first position by the longest common prefix of their tokens, each once.

    In sorted order the longest common prefix is always shared with a neighbor. Neighboring ranges are joined from the
    longest prefix down, and unpaired requests within a joined range are paired there.
    """
    everyone = sorted(
        (work.sides[side][i].text, side, i) for side, indices in enumerate((left, right)) for i in indices
    )
    common = [_common(a[0], b[0]) for a, b in pairwise(everyone)]
    stretch: list[tuple[list[int], list[int]]] = [([i], []) if side == 0 else ([], [i]) for _, side, i in everyone]
    first_of, last_of = list(range(len(everyone))), list(range(len(everyone)))
    pairs = []
    for at in sorted(range(len(common)), key=lambda k: -common[k]):
        begin, end = first_of[at], last_of[at + 1]
        mine, other = stretch[begin], stretch[at + 1]
        joined = mine[0] + other[0], mine[1] + other[1]
        for i in list(joined[0]):
            fitting = [j for j in joined[1] if common[at] >= _prompt(work.sides[0][i], work.sides[1][j])]
            if fitting:
                j = next((j for j in fitting if work.sides[1][j].name == work.sides[0][i].name), fitting[0])
                pairs.append((i, j))
                joined[0].remove(i)
                joined[1].remove(j)
        stretch[begin] = joined
        last_of[begin], first_of[end] = end, begin
    return pairs


def _common(one: bytes, two: bytes) -> int:
    """Return the length in tokens of the common prefix of two strings of :attr:`.Request.text`."""
    num = min(len(one), len(two)) // 8
    return num_equal(np.frombuffer(one, np.int64, num), np.frombuffer(two, np.int64, num))


def num_equal(one: Array, two: Array) -> int:
    """Return the number of equal elements before the first difference."""
    other = one != two
    return int(other.argmax()) if other.any() else len(one)


def _prompt(one: Request, two: Request) -> int:
    """Return the number of tokens that two requests must share to be paired: the length of the shorter prompt."""
    return min(one.prompt_end - one.first, two.prompt_end - two.first)


def _by_overlap(work: _Match) -> int:
    """Pair requests that begin at different positions (a cached prefix, offset positions), best first.

    Returns the number of requests that were not tried because there are too many.
    """
    left, right = ([i for i in work.rest[side] if work.sides[side][i].tokens] for side in (0, 1))
    if len(left) * len(right) > MAX_TRIES:
        return len(left) + len(right)
    scores = [
        (overlap, -abs(shift), -i, -j)
        for i in left
        for j in right
        for shift, overlap in [best_shift(work.sides[0][i], work.sides[1][j])]
        if overlap and overlap >= _needed(work.sides[0][i], work.sides[1][j], shift)
    ]
    taken: tuple[set[int], set[int]] = set(), set()
    pairs = []
    for _, _, i, j in sorted(scores, reverse=True):
        if -i not in taken[0] and -j not in taken[1]:
            pairs.append((-i, -j))
            taken[0].add(-i)
            taken[1].add(-j)
    work.take(pairs)
    return 0


def _needed(one: Request, two: Request, shift: int) -> int:
    """Return the number of tokens of the shorter prompt that both requests hold, at least 1."""
    begin = max(one.first, two.first - shift)
    return max(1, min(one.prompt_end, two.prompt_end - shift) - begin)


def best_shift(one: Request, two: Request) -> tuple[int, int]:
    """Return (target position minus baseline position, number of equal tokens from the first common position on)."""
    delta = two.first - one.first
    here = _overlap(one, two, 0)
    moved = _overlap(one, two, delta) if delta else 0
    whole = moved == len(one.tokens) == len(two.tokens)
    is_chance = not whole and moved < max(MIN_MOVED, _needed(one, two, delta))
    return (delta, moved) if moved > here and not is_chance else (0, here)


def _shift(one: Request, two: Request) -> int:
    return best_shift(one, two)[0] if one.first != two.first else 0


def _overlap(one: Request, two: Request, shift: int) -> int:
    _, mine, other = one.tokens.shared(two.tokens, shift)
    return num_equal(mine, other)


def _to_matching(
    work: _Match, names: tuple[str, str], num_untried: int, padding: tuple[frozenset[int], frozenset[int]]
) -> RequestMatching:
    left, right = work.sides
    pairs = [RequestPair(i, j, _shift(left[i], right[j])) for i, j in sorted(work.pairs)]
    notes = []
    if renamed := sum(left[p.baseline].name != right[p.target].name for p in pairs):
        notes.append(f"{formatting.plural(renamed, 'request')} with different names paired by equal prompts")
    if work.num_ambiguous:
        has = "has" if work.num_ambiguous == 1 else "have"
        requests = formatting.plural(work.num_ambiguous, "request")
        notes.append(f"{requests} {has} the same tokens as another one: paired in order")
    if shifted := [p for p in pairs if p.shift]:
        first = shifted[0]
        notes.append(
            f"positions of {formatting.plural(len(shifted), 'request')} are offset in {names[1]}, e.g. "
            f"{first.shift:+d} for request {left[first.baseline].label}: aligned by their tokens"
        )
    if num_untried:
        notes.append(f"{num_untried:,} requests that begin at different positions were not matched: too many to try")
    lone_padding = padding[0].intersection(work.rest[0]), padding[1].intersection(work.rest[1])
    problems = []
    for name, side, rest, pads in zip(names, (left, right), work.rest, lone_padding, strict=True):
        if pads:
            notes.append(_padding_note(name, [side[i] for i in sorted(pads)]))
        if others := [i for i in rest if i not in pads]:
            problems.append(_alone(name, side, others))
    return RequestMatching(pairs, notes, problems, lone_padding)


def _padding_note(name: str, pads: Sequence[Request]) -> str:
    _, tokens = pads[0].tokens.columns()
    others = f", and {len(pads) - 1:,} more like it" if len(pads) > 1 else ""
    return (
        f"the last sequence of a packed batch of {name} is {len(tokens)} times token {tokens[0]}{others}: taken for "
        "padding and not compared"
    )


def _alone(name: str, side: Sequence[Request], rest: Sequence[int]) -> str:
    """Return a message about requests that only one run has.

    Under generated names, one growing prompt looks like several requests; the message then says how to record the
    identity.
    """
    listed = formatting.listed([side[i].label for i in rest])
    sentence = f"request {listed} is only in {name}" if len(rest) == 1 else f"requests {listed} are only in {name}"
    for one in (side[i] for i in rest[:NAMED] if is_generated_name(side[i].name) and side[i].text):
        longer = next(
            (o for o in side if o.first == one.first and o.text != one.text and o.text.startswith(one.text)), None
        )
        if longer is not None:
            growing = "if that is one growing prompt, also record rids or req_pool_indices, which identify it"
            return f"{sentence}; request {one.label} is the beginning of request {longer.label}: {growing}"
    return sentence
