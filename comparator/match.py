"""Match: which site of the target is which site of the baseline. Passes go from exact to generous, and each pair
remembers the pass that made it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tapscope.comparator.names import FAMILIES, is_partial, reduced, unique
from tapscope.record import Record
from tapscope.run import Run


@dataclass(frozen=True, slots=True)
class Firing:
    """One firing of a site, on all ranks."""

    step: int
    turn: tuple[int, int]
    """(micro-batch, occurrence) within the step."""
    records: tuple[Record, ...]
    """One a rank, in rank order."""


@dataclass(frozen=True, slots=True)
class Series:
    """All firings of one site in one pass of one model, by step."""

    site: str
    group: tuple[str, str]
    """(model, pass)."""
    order: tuple[int, int]
    """(pipeline stage, seq) of the first firing: execution order."""
    firings: tuple[Firing, ...]

    @property
    def first(self) -> Record:
        """The first record; its dtype and shape stand for the site where one is shown."""
        return self.firings[0].records[0]

    @property
    def num_records(self) -> int:
        """Records on all ranks."""
        return sum(len(f.records) for f in self.firings)


@dataclass(frozen=True, slots=True)
class Pair:
    """A matched pair, or an orphan that has one side only."""

    baseline: Series | None
    target: Series | None
    matched_by: str = ""
    """``exact``, ``hf port``, ``hf root``, ``only input`` or ``partial sum``; empty for an orphan."""


def series_of(run: Run, records: Sequence[Record]) -> list[Series]:
    """Group records into series, in execution order."""
    piles: dict[tuple[str, str, str], dict[tuple[int, int, int], list[Record]]] = {}
    for record in records:
        key = record.key
        pile = piles.setdefault((key.model, key.pass_, key.site), {})
        pile.setdefault((key.step, key.micro, key.occurrence), []).append(record)
    stages = {rank: run.coords(rank).get("pp", 0) for rank in run.ranks}
    found = []
    for (model, pass_, site), pile in piles.items():
        firings = tuple(
            Firing(step, (micro, turn), tuple(sorted(pile[step, micro, turn], key=lambda r: r.key.rank)))
            for step, micro, turn in sorted(pile)
        )
        first = firings[0].records[0]
        found.append(Series(site, (model, pass_), (stages.get(first.key.rank, 0), first.seq), firings))
    return sorted(found, key=lambda s: (s.group[1] == "backward", s.order, s.site))


def match(baseline: Sequence[Series], target: Sequence[Series]) -> list[Pair]:
    """Pairs and orphans, in the target's execution order; a baseline orphan follows its predecessor's partner."""
    pairs: list[Pair] = []
    for left, right in _groups(baseline, target):
        pairs += _match_group(left, right)
    return _in_order(pairs, baseline, target)


def _groups(baseline: Sequence[Series], target: Sequence[Series]) -> Iterator[tuple[list[Series], list[Series]]]:
    """Series of one model and pass on both sides; a run's only model meets the other run's, whatever it is called."""
    models = [{s.group[0] for s in side} for side in (baseline, target)]
    sole = all(len(names) == 1 for names in models)
    split: dict[tuple[str, str], tuple[list[Series], list[Series]]] = {}
    for side, series in enumerate((baseline, target)):
        for one in series:
            group = ("" if sole else one.group[0], one.group[1])
            split.setdefault(group, ([], []))[side].append(one)
    yield from split.values()


def _match_group(baseline: Sequence[Series], target: Sequence[Series]) -> list[Pair]:
    left, right = {s.site: s for s in baseline}, {s.site: s for s in target}
    everything = dict(left), dict(right)
    pairs: list[Pair] = []

    def take(a: str, b: str, how: str) -> None:
        pairs.append(Pair(left.pop(a), right.pop(b), how))

    for site in [site for site in right if site in left]:
        take(site, site, "exact")
    for family in FAMILIES:
        names = unique(left, family)
        for common, site in unique(right, family).items():
            if common in names:
                take(names[common], site, family.name)
    for a, b in _only_inputs(left, right):
        take(a, b, "only input")
    pairs += _partials(left, right, *everything)
    pairs += [Pair(one, None) for one in left.values()] + [Pair(None, one) for one in right.values()]
    return pairs


def _only_inputs(left: dict[str, Series], right: dict[str, Series]) -> list[tuple[str, str]]:
    """A module's only unmatched tensor input meets the other side's: argument names are the frameworks' own."""
    sides = [_single_inputs(s for s in side.values() if s.first.dtype is not None) for side in (left, right)]
    return [(sides[0][path], sides[1][path]) for path in sides[1] if path in sides[0]]


def _single_inputs(series: Iterable[Series]) -> dict[str, str]:
    """Common path -> site, for modules that have exactly one input here."""
    found: dict[str, list[str]] = {}
    for one in series:
        path, _, port = one.site.rpartition(":")
        if port.startswith("in[") and not port.endswith(".grad"):
            found.setdefault(FAMILIES[-1].common(f"{path}:"), []).append(one.site)
    return {path: sites[0] for path, sites in found.items() if len(sites) == 1}


def _partials(
    left: dict[str, Series], right: dict[str, Series], all_left: dict[str, Series], all_right: dict[str, Series]
) -> list[Pair]:
    """Summands that only one side recorded meet the other side's sum, beside that sum's own pair."""
    family = FAMILIES[-1]
    pairs = []
    for mine, others, is_target in ((right, all_left, True), (left, all_right, False)):
        names = unique(others, family)
        for site in [s for s in mine if is_partial(s)]:
            whole = names.get(family.common(reduced(site)))
            if whole is None or others[whole].first.dtype is None:
                continue
            one = mine.pop(site)
            pairs.append(
                Pair(others[whole], one, "partial sum") if is_target else Pair(one, others[whole], "partial sum")
            )
    return pairs


def _in_order(pairs: list[Pair], baseline: Sequence[Series], target: Sequence[Series]) -> list[Pair]:
    place = {id(s): (i, 0) for i, s in enumerate(target)}
    partner = {id(p.baseline): place[id(p.target)] for p in pairs if p.baseline and p.target}
    last = (-1, 0)
    for i, one in enumerate(baseline):
        last = partner.get(id(one), (last[0], i + 1))
        place.setdefault(id(one), last)
    return sorted(pairs, key=lambda p: place[id(p.target)] if p.target else place[id(p.baseline)])
