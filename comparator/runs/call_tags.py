"""Call tags: number the calls of a site by tags that its records have in both runs.

``dump("x", value, stage="pre")`` and ``dump("x", value, stage="post")`` are two calls of one site. One run may execute
the stages in another order, or only one of them. The call number then does not identify the stage, but the tag does.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.runs.pipeline_stages import NumberedRecords
from tapscope.run_format.records import Records

_Site = tuple[str, str, str]
"""(site, model, pass)."""
_Place = tuple[int, int, int]
"""(step, micro, rank)."""
_Calls = dict[_Place, dict[int, Mapping[str, Any]]]
"""Place -> occurrence -> tags."""
_Numbers = dict[_Place, dict[int, int]]
"""Place -> occurrence -> number that identifies the same call in both runs."""


def index_calls_by_tags(given: tuple[NumberedRecords, NumberedRecords]) -> tuple[NumberedRecords, NumberedRecords]:
    """Return the records of both runs, with the calls of each site renumbered by identifying tags, where there are
    any."""
    again = [
        set(one.records.take(one.records.which(lambda kind: kind.occurrence > 0)).distinct_sites()) for one in given
    ]
    if not any(again):
        return given
    sites = set.union(*again)
    left, right = (_tagged_calls(one.records, sites) for one in given)
    numbers: tuple[dict[_Site, _Numbers], dict[_Site, _Numbers]] = ({}, {})
    for site in left.keys() & right.keys():
        if names := _identifying_tags(left[site], right[site]):
            numbers[0][site], numbers[1][site] = _number(left[site], right[site], names)
    return _renumbered(given[0], numbers[0]), _renumbered(given[1], numbers[1])


def _tagged_calls(records: Records, sites: set[str]) -> dict[_Site, _Calls]:
    """Return the calls of those ``sites`` whose records all have tags."""
    calls: dict[_Site, _Calls] = {}
    untagged: set[_Site] = set()
    for record in records.of(sites=sites):
        key = record.key
        site = key.site, key.model, key.pass_
        if record.tags:
            calls.setdefault(site, {}).setdefault((key.step, key.micro, key.rank), {})[key.occurrence] = record.tags
        else:
            untagged.add(site)
    return {site: at for site, at in calls.items() if site not in untagged}


def _identifying_tags(left: _Calls, right: _Calls) -> tuple[str, ...]:
    """Return the names of the tags that identify calls.

    Every call of both runs has the tag, the tag distinguishes calls of one step, and one run's values are a subset of
    the other's.
    """
    every = [tags for calls in (left, right) for at in calls.values() for tags in at.values()]
    shared = [name for name in every[0] if all(name in tags for tags in every)]
    return tuple(
        name
        for name in shared
        if any(len({str(tags[name]) for tags in at.values()}) > 1 for at in chain(left.values(), right.values()))
        and (_values(left, name) <= _values(right, name) or _values(left, name) >= _values(right, name))
    )


def _values(calls: _Calls, name: str) -> set[str]:
    return {str(tags[name]) for at in calls.values() for tags in at.values()}


def _number(left: _Calls, right: _Calls, names: tuple[str, ...]) -> tuple[_Numbers, _Numbers]:
    """Return the call numbers of both runs, in order of first occurrence in the target, then in the baseline.

    The target comes first because a report states how to show the target's call.
    """
    order: dict[tuple[object, ...], int] = {}
    numbers: list[_Numbers] = []
    for calls in (right, left):
        mine: _Numbers = {}
        for place, at in sorted(calls.items()):
            turns: dict[tuple[str, ...], int] = {}
            for occurrence, tags in sorted(at.items()):
                call = tuple(str(tags[name]) for name in names)
                turns[call] = turns.get(call, -1) + 1
                mine.setdefault(place, {})[occurrence] = order.setdefault((*call, turns[call]), len(order))
        numbers.append(mine)
    return numbers[1], numbers[0]


def _renumbered(given: NumberedRecords, numbers: Mapping[_Site, _Numbers]) -> NumberedRecords:
    changed = {site for site, mine in numbers.items() if any(old != new for old, new in _both(mine.values()))}
    if not changed:
        return given
    records, names = given.records, {site for site, _, _ in changed}
    is_other = ~records.of_sites(lambda site: site in names)
    kept = records.take(np.flatnonzero(is_other))
    # Order does not matter: records are ordered by step, call and rank, and sites by their first sequence number.
    for record in records.take(np.flatnonzero(~is_other)):
        key = record.key
        mine = numbers.get((key.site, key.model, key.pass_), {}) if (key.site, key.model, key.pass_) in changed else {}
        number = mine.get((key.step, key.micro, key.rank), {}).get(key.occurrence, key.occurrence)
        kept.append(record._replace(key=key._replace(occurrence=number)))
    return structs.replace(given, records=kept)


def _both(places: Iterable[Mapping[int, int]]) -> Iterable[tuple[int, int]]:
    return chain.from_iterable(at.items() for at in places)
