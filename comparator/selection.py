"""Selection: which records and which pairs a comparison is about, in both runs, whatever each calls a site."""

from collections.abc import Collection, Iterable, Sequence

from tapscope.comparator.match import Pair
from tapscope.comparator.options import CompareOptions
from tapscope.comparator.series import Key, key_of, recorded
from tapscope.comparator.stages import Numbered
from tapscope.errors import RuleError
from tapscope.record import Record
from tapscope.run import Run
from tapscope.site import Glob, compact_ranges, describe_layers, layer_of


def select(
    runs: tuple[Run, Run], given: tuple[Numbered, Numbered], options: CompareOptions
) -> tuple[list[Record], list[Record]]:
    """The records of both runs in the steps and ranks asked for.

    A glob that matches a site of neither run raises RuleError, and so do steps or ranks of which one has none: a typing
    error must not look like sameness.
    """
    every = {r.key.site for one in given for r in one.records}
    where = f"{runs[0].path} or {runs[1].path}"
    choice = Choice(options)
    for glob in (*choice.wanted, *choice.unwanted):
        if not any(map(glob.matches, every)):
            raise RuleError(
                f"no site matches {glob.text!r} in {where}; {describe_layers(every)} (see: tapscope ls {runs[0].path})"
            )
    if every and not any(choice.means((site,)) for site in every):
        raise RuleError(f"the selection leaves no site of {where}; {describe_layers(every)}")
    for side, (run, one) in enumerate(zip(runs, given, strict=True)):
        _check_numbers(run, "step", options.steps_of(side), {r.key.step for r in one.records})
        _check_numbers(run, "rank", options.ranks, {r.key.rank for r in one.records})
    return _records(given[0], options, 0), _records(given[1], options, 1)


def _check_numbers(run: Run, what: str, wanted: frozenset[int] | None, known: set[int]) -> None:
    if wanted is not None and known and not known & wanted:
        raise RuleError(f"no {what} {compact_ranges(wanted)} in {run.path}; {what}s are {compact_ranges(known)}")


def select_pairs(pairs: Sequence[Pair], options: CompareOptions) -> list[Pair]:
    """Pairs of which the selection means either side."""
    choice = Choice(options)
    return list(pairs) if choice.is_everything else [pair for pair in pairs if choice.means(pair.names())]


class Choice:
    """The sites that are asked for."""

    def __init__(self, options: CompareOptions) -> None:
        self.wanted, self.unwanted = [Glob(g) for g in options.sites], [Glob(g) for g in options.skip]
        self._layers = options.layers

    @property
    def is_everything(self) -> bool:
        """Whether nothing in particular is asked for."""
        return not (self.wanted or self.unwanted) and self._layers is None

    def means(self, names: Collection[str]) -> bool:
        """Whether it means a site that goes by these names: one of them is asked for, and none is to be skipped."""
        if self.wanted and not any(glob.matches(name) for glob in self.wanted for name in names):
            return False
        if self._layers is not None and not any(layer_of(n.rpartition(":")[0]) in self._layers for n in names):
            return False
        return not any(glob.matches(name) for glob in self.unwanted for name in names)


def is_object(record: Record) -> bool:
    """Whether it is of an object that has no value to compare: a cache, a config."""
    return record.dtype is None and not (isinstance(record.value, dict) and "value" in record.value)


def num_objects(records: Iterable[Record], options: CompareOptions) -> int:
    """Records of objects without a value that the selection means."""
    choice = Choice(options)
    return sum(is_object(record) and choice.means((record.key.site,)) for record in records)


def num_selected(pairs: Iterable[Pair], side: int) -> int:
    """Records of one side in these pairs, each once."""
    found: dict[Key, int] = {}
    for pair in pairs:
        one = pair.target if side else pair.baseline
        for source in recorded(one) if one else ():
            found[key_of(source)] = source.num_records
    return sum(found.values())


def _records(given: Numbered, options: CompareOptions, side: int) -> list[Record]:
    steps = options.steps_of(side)
    return [
        r
        for r in given.records
        if (steps is None or r.key.step in steps) and (options.ranks is None or r.key.rank in options.ranks)
    ]
