"""Selection: choose the records and pairs to compare in both runs, whatever name each run gives a site."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.runs.pipeline_stages import NumberedRecords
from tapscope.comparator.runs.series import Key, key_of, sources_of
from tapscope.core.errors import RuleError
from tapscope.core.site import compact_ranges, describe_layers, describe_sites, layer_of, module_of
from tapscope.expr.site_pattern import site_pattern
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run


def select(
    runs: tuple[Run, Run], given: tuple[NumberedRecords, NumberedRecords], options: CompareOptions
) -> tuple[Records, Records]:
    """Return the records of both runs in the selected steps and ranks.

    Raises RuleError for a glob that matches no site of either run, and for steps or ranks that one run lacks: a typo
    must not look like agreement.
    """
    every = {*given[0].records.distinct_sites(), *given[1].records.distinct_sites()}
    where = f"{runs[0].path} or {runs[1].path}"
    choice = SiteSelection(options)
    for glob in (*choice.wanted, *choice.unwanted, *map(site_pattern, (*options.allow_differ, *options.allow_missing))):
        if not any(map(glob.matches, every)):
            hint = f"{describe_sites(glob.text, every)} (see: tapscope ls {runs[0].path})"
            raise RuleError(f"no site matches {glob.text!r} in {where}; {hint}")
    if every and not any(choice.means((site,)) for site in every):
        raise RuleError(f"the selection leaves no site of {where}; {describe_layers(every)}")
    for side, (run, one) in enumerate(zip(runs, given, strict=True)):
        known = one.records.per_step()
        _check_numbers(run, "step", options.steps_of(side), {step for _, step in known})
        _check_numbers(run, "rank", options.ranks, {rank for rank, _ in known})
    return given[0].records.of(options.steps_of(0), options.ranks), given[1].records.of(
        options.steps_of(1), options.ranks
    )


def _check_numbers(run: Run, what: str, wanted: frozenset[int] | None, known: set[int]) -> None:
    if wanted is not None and known and not known & wanted:
        raise RuleError(f"no {what} {compact_ranges(wanted)} in {run.path}; {what}s are {compact_ranges(known)}")


def select_pairs(pairs: Sequence[Pair], options: CompareOptions) -> list[Pair]:
    """Return the pairs with at least one selected side."""
    choice = SiteSelection(options)
    return list(pairs) if choice.is_everything else [pair for pair in pairs if choice.means(pair.names())]


class SiteSelection:
    """The site selection given by the options: globs to include, globs to skip, and layers."""

    def __init__(self, options: CompareOptions) -> None:
        # A glob that names one call selects all calls of the site.
        self.wanted = [site_pattern(text, any_call=True) for text in options.sites]
        self.unwanted = [site_pattern(text) for text in options.skip]
        self._layers = options.layers

    @property
    def is_everything(self) -> bool:
        """Whether every site is selected."""
        return not (self.wanted or self.unwanted) and self._layers is None

    def means(self, names: Collection[str]) -> bool:
        """Return whether a site with these names is selected: any name is wanted, and none is skipped."""
        if self.wanted and not any(glob.matches(name) for glob in self.wanted for name in names):
            return False
        if self._layers is not None and not any(layer_of(module_of(n)) in self._layers for n in names):
            return False
        return not any(glob.matches(name) for glob in self.unwanted for name in names)


def non_tensors(records: Records) -> list[int]:
    """Return the indices of records of objects without a comparable value, such as a cache or a config."""
    plain = records.which(lambda kind: kind.dtype is None).tolist()
    values = ((at, records[at].value) for at in plain)
    return [at for at, value in values if not (isinstance(value, dict) and "value" in value)]


def without_non_tensors(records: Records) -> Records:
    """Return the records without those listed by :func:`non_tensors`."""
    left_out = non_tensors(records)
    return records.take(np.delete(np.arange(len(records)), left_out)) if left_out else records


def num_non_tensors(records: Records, options: CompareOptions) -> int:
    """Return the number of selected records of objects without a comparable value."""
    choice = SiteSelection(options)
    return sum(choice.means((records.site_at(at),)) for at in non_tensors(records))


def num_selected(pairs: Iterable[Pair], side: int) -> int:
    """Return the number of distinct records of one side in these pairs."""
    counts: dict[Key, int] = {}
    for pair in pairs:
        one = pair.target if side else pair.baseline
        for source in sources_of(one) if one else ():
            counts[key_of(source)] = source.num_records
    return sum(counts.values())
