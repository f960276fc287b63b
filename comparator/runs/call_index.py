"""Call index: number the calls of a module by a plain argument that identifies them within a step.

Gemma 3 calls ``rotary_emb`` once per layer type, and transformers iterates over a set of strings, whose order differs
between processes. If both runs recorded the same values of such an argument, the value identifies the call.
"""

from collections.abc import Iterable, Mapping

from msgspec import structs

from tapscope.comparator.runs.pipeline_stages import NumberedRecords
from tapscope.core.site import module_of
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records

_Place = tuple[str, str, int, int, str, int]
"""(path, model, step, micro, pass, rank)."""
_Calls = dict[_Place, dict[int, str]]
"""Place -> occurrence -> value of the argument."""


def index_calls_by_argument(given: tuple[NumberedRecords, NumberedRecords]) -> tuple[NumberedRecords, NumberedRecords]:
    """Return the records of both runs, with the calls of a step renumbered by the string argument that identifies them.

    Unchanged if the runs share no such argument.
    """
    left, right = (_named_calls(one.records) for one in given)
    shared = [port for port in left if port in right and _values(left[port]) == _values(right[port])]
    return _renumbered(given[0], [left[port] for port in shared]), _renumbered(
        given[1], [right[port] for port in shared]
    )


def _named_calls(records: Records) -> dict[str, _Calls]:
    """Return port -> calls, for each place that was called with at least two different strings at that port."""
    by_port: dict[str, _Calls] = {}
    for record in records.take(records.which(lambda kind: kind.dtype is None)):
        if isinstance(record.value, Mapping) and record.value.get("type") == "str":
            path, _, port = record.key.site.rpartition(":")
            if port.startswith("in["):
                at = by_port.setdefault(port, {}).setdefault(_place(path, record), {})
                at[record.key.occurrence] = str(record.value.get("value"))
    several = {port: {p: at for p, at in calls.items() if len(set(at.values())) > 1} for port, calls in by_port.items()}
    return {port: calls for port, calls in several.items() if calls}


def _values(calls: _Calls) -> set[str]:
    return {value for at in calls.values() for value in at.values()}


def _renumbered(given: NumberedRecords, named: Iterable[_Calls]) -> NumberedRecords:
    turns: dict[_Place, dict[int, int]] = {}
    for calls in named:
        for place, at in calls.items():
            order = sorted(at, key=lambda turn: (at[turn], turn))
            if order != sorted(at):
                turns.setdefault(place, dict(zip(order, sorted(at), strict=True)))
    if not turns:
        return given
    paths = {place[0] for place in turns}
    records = []
    for record in given.records:
        path = module_of(record.key.site)
        turn = turns.get(_place(path, record), {}).get(record.key.occurrence) if path in paths else None
        records.append(record if turn is None else record._replace(key=record.key._replace(occurrence=turn)))
    return structs.replace(given, records=Records(records))


def _place(path: str, record: Record) -> _Place:
    key = record.key
    return path, key.model, key.step, key.micro, key.pass_, key.rank
