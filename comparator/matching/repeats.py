"""Repeats: modules that are called several times in a step, call by call.

T5 has one dropout for what its encoder begins with and what it ends with, an RNN one cell for every token, ALBERT one
layer for all depths: what such a module is given the second time was made of what it gave the first time. So each call
is a site of its own, where both runs call it as often: ``in[input]`` the first, ``in[input]#1`` the next, as the dumper
numbers occurrences, and its gradient ``in[input]#1.grad``.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.series import Series
from tapscope.records import Records

MOST = 64
"""Calls in a step; of a module that is called more often all are one site."""

_STATE = ("param[", "buffer[")
_Place = tuple[int, str, int]
"""(step, pass, rank)."""


def call_by_call(pairs: Sequence[Pair], records: Sequence[Records]) -> list[Pair]:
    """The pairs in execution order, a pair for each call where a step has several; ``records`` of both runs."""
    if not all(len(each.which(lambda kind: kind.occurrence)) for each in records):
        return list(pairs)
    parts = [_calls(pair) for pair in pairs]
    if all(len(each) == 1 for each in parts):
        return list(pairs)
    known = _order([each[0] for each in parts])
    found = [((i, 0), each[0]) for i, each in enumerate(parts)]
    found += [(_after(pair, i, known), pair) for i, each in enumerate(parts) for pair in each[1:]]
    return [pair for _, pair in sorted(found, key=lambda one: one[0])]


def _calls(pair: Pair) -> list[Pair]:
    """The calls of a pair, the first under its own name; the pair itself where there is one, or nobody knows which is
    which."""
    one, two = pair.baseline, pair.target
    if one is None or two is None or one.sources or two.sources or not (one.is_float and two.is_float):
        return [pair]
    if one.site.rpartition(":")[2].startswith(_STATE) or (count := _count(one)) < 2 or count != _count(two):
        return [pair]
    each = zip(_split(one, count), _split(two, count), strict=True)
    site = pair.site or one.site
    return [structs.replace(pair, baseline=a, target=b, site=_named(site, i)) for i, (a, b) in enumerate(each)]


def _count(series: Series) -> int:
    """Calls in each step and micro-batch, all of one shape; 0 where that is not so of all."""
    if not any(firing.turn[1] for firing in series.firings):
        return 1
    calls: dict[tuple[int, int], list[Firing]] = {}
    for firing in series.firings:
        calls.setdefault((firing.step, firing.turn[0]), []).append(firing)
    counts = {len(each) for each in calls.values()}
    alike = all(len({_shapes(firing) for firing in each}) == 1 for each in calls.values())
    return min(counts) if len(counts) == 1 and alike and max(counts) <= MOST else 0


def _shapes(firing: Firing) -> tuple[tuple[int, ...], ...]:
    return tuple(record.shape for record in firing.records)


def _split(series: Series, count: int) -> Iterator[Series]:
    for i in range(count):
        yield structs.replace(series, firings=tuple(series.firings[i::count]))


def _named(site: str, call: int) -> str:
    if not call:
        return site
    value = site.removesuffix(".grad")
    return f"{value}#{call}{site[len(value) :]}"


def _order(pairs: Sequence[Pair]) -> Mapping[_Place, list[tuple[int, int]]]:
    """Place -> (seq, index) of what both runs or the target began there, in order of both."""
    found: dict[_Place, list[tuple[int, int]]] = {}
    for i, pair in enumerate(pairs):
        if pair.target is not None:
            place, seq = _begin(pair.target)
            found.setdefault(place, []).append((seq, i))
    return {place: sorted(each) for place, each in found.items()}


def _after(pair: Pair, index: int, known: Mapping[_Place, list[tuple[int, int]]]) -> tuple[int, int]:
    """Where a later call stands among the others: behind the last that began before it."""
    assert pair.target is not None
    place, seq = _begin(pair.target)
    here = known.get(place, [])
    before = [i for _, i in here[: bisect_right(here, (seq, -1))]]
    return max((index, *before)), 1 + seq


def _begin(series: Series) -> tuple[_Place, int]:
    first = series.first
    return (first.key.step, first.key.pass_, first.key.rank), first.seq
