"""Repeated calls: compare modules that are called several times in a step call by call.

T5 uses one dropout module for the first and the last operation of its encoder, an RNN one cell for every token, and
ALBERT one layer for all depths: the second input of such a module depends on its first output. If both runs make the
same number of calls, each call therefore becomes a site of its own. ``in[input]`` is the first call, ``in[input]#1``
the next (numbered like the dumper's occurrences), and ``in[input]#1.grad`` its gradient. Calls of several shapes (one
activation for an image and for its time embedding) are separated if both runs have the same shapes in the same order.
Calls in a loop over experts are instead matched by token and expert (:mod:`~..alignment.expert_rows`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.routers import is_of_experts
from tapscope.comparator.runs.series import Series
from tapscope.core.site import is_parameter
from tapscope.run_format.records import Records

MAX_CALLS = 64
"""Maximum number of calls per step; the calls of a module with more remain one site."""
_Place = tuple[int, str, int]
"""(step, pass, rank)."""


def split_calls(pairs: Sequence[Pair], records: Sequence[Records]) -> list[Pair]:
    """Return the pairs in execution order, with one pair per call of modules that are called several times in a step.

    ``records`` are the records of both runs.
    """
    if not all(len(each.which(lambda kind: kind.occurrence)) for each in records):
        return list(pairs)
    parts = [_calls(pair) for pair in pairs]
    if all(len(each) == 1 for each in parts):
        return list(pairs)
    known = _order([each[0] for each in parts])
    ordered = [((i, 0), each[0]) for i, each in enumerate(parts)]
    ordered += [(_after(pair, i, known), pair) for i, each in enumerate(parts) for pair in each[1:]]
    return [pair for _, pair in sorted(ordered, key=lambda one: one[0])]


def _calls(pair: Pair) -> list[Pair]:
    """Return one pair per call, the first under its own name; only the pair itself if there is one call or calls do not
    match."""
    one, two = pair.baseline, pair.target
    if one is None or two is None or one.sources or two.sources or not (one.is_float and two.is_float):
        return [pair]
    if is_parameter(one.site):
        return [pair]
    calls = _by_step(one), _by_step(two)
    counts = [{len(step) for step in side} for side in calls]
    if max(max(side) for side in counts) > MAX_CALLS or counts == [{1}, {1}]:
        return [pair]
    is_alike = counts[0] == counts[1] and len(counts[0]) == 1 and all(map(_are_alike, (*calls[0], *calls[1])))
    if not is_alike and (_is_routed(one) or list(map(_shapes, calls[0])) != list(map(_shapes, calls[1]))):
        return [pair]
    each = zip(_split(one, calls[0]), _split(two, calls[1]), strict=True)
    site = pair.site or one.site
    return [structs.replace(pair, baseline=a, target=b, site=_named(site, i)) for i, (a, b) in enumerate(each)]


def _by_step(series: Series) -> list[list[Firing]]:
    """Return the calls of each step and microbatch, in order."""
    calls: dict[tuple[int, int], list[Firing]] = {}
    for firing in series.firings:
        calls.setdefault((firing.step, firing.call[0]), []).append(firing)
    return list(calls.values())


def has_repeated_calls(series: Series) -> bool:
    """Return whether the series contains several calls of one step (calls that were not separated)."""
    return any(len(step) > 1 for step in _by_step(series))


def _are_alike(calls: Sequence[Firing]) -> bool:
    return len(set(_shapes(calls))) == 1


def _shapes(calls: Sequence[Firing]) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(record.shape for record in firing.records) for firing in calls]


def _is_routed(series: Series) -> bool:
    return any(map(is_of_experts, series.site.partition(":")[0].split(".")))


def _split(series: Series, steps: Sequence[Sequence[Firing]]) -> Iterator[Series]:
    for i in range(max(map(len, steps))):
        yield structs.replace(series, firings=tuple(step[i] for step in steps if len(step) > i))


def _named(site: str, call: int) -> str:
    if not call:
        return site
    value = site.removesuffix(".grad")
    return f"{value}#{call}{site[len(value) :]}"


def _order(pairs: Sequence[Pair]) -> Mapping[_Place, list[tuple[int, int]]]:
    """Return (seq, index) of the pairs that begin at each place, sorted."""
    calls: dict[_Place, list[tuple[int, int]]] = {}
    for i, pair in enumerate(pairs):
        if pair.target is not None:
            place, seq = _begin(pair.target)
            calls.setdefault(place, []).append((seq, i))
    return {place: sorted(each) for place, each in calls.items()}


def _after(pair: Pair, index: int, known: Mapping[_Place, list[tuple[int, int]]]) -> tuple[int, int]:
    """Return the sort key of a later call: after the last site that began before the call."""
    assert pair.target is not None
    place, seq = _begin(pair.target)
    here = known.get(place, [])
    before = [i for _, i in here[: bisect_right(here, (seq, -1))]]
    return max((index, *before)), 1 + seq


def _begin(series: Series) -> tuple[_Place, int]:
    first = series.first
    return (first.key.step, first.key.pass_, first.key.rank), first.seq
