"""Match: which site of the target is which site of the baseline. Passes go from exact to generous, and each pair
remembers the pass that made it."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tapscope.comparator.fusions import Fusions
from tapscope.comparator.hints import Hints
from tapscope.comparator.mapfile import MapFile
from tapscope.comparator.names import FAMILIES, common, is_partial, reduced, unique
from tapscope.comparator.renames import renamed
from tapscope.comparator.series import Key, Series, key_of, origins
from tapscope.comparator.sums import sums
from tapscope.comparator.usermap import UserMap

ARGUMENTS = frozenset({"input_ids", "position_ids", "positions", "attention_mask", "residual", "rotary_pos_emb"})
"""Names that mean one thing: an input that is called one of these is no input that is called another."""
_MASK = re.compile(r":in\[(?:attention_)?mask\]$")
IDENTITIES = ("Identity", "IdentityOp", "IdentityFuncOp")
"""Modules that stand where another configuration has one that works; only their equals are their partners."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A matched pair, or an orphan that has one side only."""

    baseline: Series | None
    target: Series | None
    matched_by: str = ""
    """The pass: ``exact``, ``map``, a family of :data:`~.names.FAMILIES`, ``sum``, ``argument``, ``fused …``, ``only
    input`` or ``partial sum``; empty for an orphan."""
    site: str = ""
    """What the finding is called; empty: as its baseline, or as what it has."""
    note: str = ""
    """Why an orphan has no partner, where several would do."""

    def names(self) -> set[str]:
        """Every name that either run has for it."""
        return {self.site} - {""} | {site for one in (self.baseline, self.target) if one for _, site in origins(one)}


@dataclass(slots=True)
class Matching:
    """The series of one model and pass on both sides, by name, while they are matched."""

    left: dict[str, Series]
    right: dict[str, Series]
    fusions: Fusions
    hints: tuple[Hints, Hints]
    pairs: list[Pair] = field(default_factory=list)
    everything: tuple[Mapping[str, Series], Mapping[str, Series]] = field(init=False)
    _offered: list[tuple[dict[str, Series], str, dict[str, Series]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.everything = dict(self.left), dict(self.right)

    def take(self, a: str, b: str, how: str) -> None:
        """Pair what is left under two names; part by part, where both are fused and lie differently."""
        one, two = self.left.pop(a), self.right.pop(b)
        parts = self.fusions.apart(one, two)
        if parts:
            self.pairs += [Pair(x, y, f"{how}, {what}", site) for x, y, what, site in parts]
        else:
            self.pairs.append(Pair(one, two, self._how(one, two, a, how)))

    def _how(self, one: Series, two: Series, name: str, how: str) -> str:
        if one.recipe or two.recipe:
            return "sum"
        if how != "exact" or one.site == two.site == name:
            return how
        return "argument" if any(name == offer for _, offer, _ in self._offered) else "map"

    def are_other_masks(self, name: str) -> bool:
        """Whether ``name`` is an attention mask of two frameworks of which one, Megatron, marks what is hidden."""
        frameworks = {hints.framework for hints in self.hints}
        return len(frameworks) > 1 and "megatron" in frameworks and _MASK.search(name) is not None

    def families(self) -> None:
        """Meet by common spelling, from the least generous family to the most."""
        for family in FAMILIES:
            if not (self.left and self.right):
                return
            names = unique(self._nameable(0), family)
            for spelling, site in unique(self._nameable(1), family).items():
                if spelling in names:
                    self.take(names[spelling], site, family.name)

    def _nameable(self, side: int) -> Iterator[str]:
        """Names whose meaning their spelling tells: an identity copies, a transposed weight is another tensor."""
        hints = self.hints[side]
        for name, one in (self.left, self.right)[side].items():
            kind = hints.class_of(one.site)
            transposed = kind == "Conv1D" and ":param[weight]" in name
            if kind not in IDENTITIES and not transposed and not self.are_other_masks(name):
                yield name

    def offer_sums(self) -> None:
        """Put sums in place of their summands, and hidden states in place of numbered arguments."""
        for mine, others in ((self.left, self.right), (self.right, self.left)):
            for name, pair, total in list(sums(mine, others)):
                self._offered.append((mine, name, {one: mine.pop(one) for one in pair}))
                mine[name] = total

    def withdraw_sums(self) -> None:
        """Take back the sums that nothing came to meet."""
        for mine, name, pieces in self._offered:
            if name in mine:
                del mine[name]
                mine.update(pieces)

    def only_inputs(self) -> None:
        """A module's only unmatched tensor input meets the other side's: argument names are the frameworks' own."""
        sides = [
            _single_inputs({name: one for name, one in side.items() if not self.are_other_masks(name)}, everything)
            for side, everything in zip((self.left, self.right), self.everything, strict=True)
        ]
        for path in sides[1]:
            if path in sides[0] and not {_argument(side[path]) for side in sides} <= ARGUMENTS:
                self.take(sides[0][path], sides[1][path], "only input")

    def partials(self) -> None:
        """Summands that only one side recorded meet the other side's sum, beside that sum's own pair."""
        for side, mine in enumerate((self.right, self.left)):
            others = self.everything[side]
            summands = [site for site in mine if is_partial(site)]
            names = unique(others, FAMILIES[-1]) if summands else {}
            for site in summands:
                whole = names.get(common(reduced(site)))
                if whole is not None and others[whole].first.dtype is not None:
                    one = mine.pop(site)
                    both = (others[whole], one) if side == 0 else (one, others[whole])
                    self.pairs.append(Pair(*both, "partial sum", one.site if side == 0 else both[0].site))

    def orphans(self) -> None:
        """What is left, and where several of the other side would have done, which."""
        spelled = [_by_spelling(self._nameable(side)) for side in (0, 1)]
        for side, mine in enumerate((self.left, self.right)):
            for name, one in mine.items():
                note = self._note(name, spelled[side], spelled[1 - side])
                self.pairs.append(Pair(one, None, note=note) if side == 0 else Pair(None, one, note=note))

    def _note(self, name: str, own: Mapping[str, list[str]], others: Mapping[str, list[str]]) -> str:
        """Why a name that the other side has as well, or nearly, found no partner."""
        if self.are_other_masks(name):
            return "not compared: Megatron's masks mark what is hidden, other frameworks' what is seen"
        alike = others.get(common(name), []) if name in own.get(common(name), ()) else []
        if not alike:
            return ""
        rivals = ", ".join(other for other in own[common(name)] if other != name)
        also = f", and so could {rivals}" if rivals else ""
        return f"could be {' or '.join(alike[:3])}{also}: say which by rename in --map"


def match(
    baseline: Sequence[Series],
    target: Sequence[Series],
    mapping: MapFile | None = None,
    hints: tuple[Hints, Hints] | None = None,
) -> list[Pair]:
    """Pairs and orphans, in the target's execution order; a baseline orphan follows its predecessor's partner.

    Raises ConfigError for an entry of the ``mapping`` that matches nothing.
    """
    hints = hints or (Hints(), Hints())
    mapping = mapping or MapFile()
    names = renamed(baseline, target, mapping.rename)
    fusions = Fusions(hints)
    user = UserMap(fusions, mapping.fuse)
    pairs: list[Pair] = []
    for left, right in _groups(baseline, target):
        both = [{names[i][one.site]: one for one in side} for i, side in enumerate((left, right))]
        pairs += _match_group(Matching(both[0], both[1], fusions, hints), user)
    user.check(baseline, target)
    return _in_order(pairs, baseline, target)


def _match_group(group: Matching, user: UserMap) -> list[Pair]:
    group.pairs += [Pair(*given) for given in user.pairs(group.left, group.right)]
    group.offer_sums()  # before the names: what one run calls hidden_states may be only a summand in the other
    for name in [name for name in group.right if name in group.left and not group.are_other_masks(name)]:
        group.take(name, name, "exact")
    group.families()
    group.pairs += [Pair(*given) for given in group.fusions.built_in(group.left, group.right)]
    group.only_inputs()
    group.withdraw_sums()
    group.partials()
    group.orphans()
    return group.pairs


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


def _single_inputs(series: Mapping[str, Series], everything: Mapping[str, Series]) -> dict[tuple[str, bool], str]:
    """(common path, whether of gradients) -> name of the only tensor input that a module has, where it has no partner.

    One of several inputs whose others have found theirs is not meant: what is left over may be anything.
    """
    inputs = Counter(_input_of(name) for name, one in everything.items() if one.first.dtype is not None)
    found: dict[tuple[str, bool], list[str]] = {}
    for name, one in series.items():
        place = _input_of(name)
        if place is not None and one.first.dtype is not None and inputs[place] == 1:
            found.setdefault((common(f"{place[0]}:"), place[1]), []).append(name)
    return {path: names[0] for path, names in found.items() if len(names) == 1}


def _argument(name: str) -> str:
    return name.rpartition(":in[")[2].removesuffix(".grad").removesuffix("]")


def _input_of(name: str) -> tuple[str, bool] | None:
    """(module path, whether a gradient) of an input's site."""
    path, _, port = name.rpartition(":")
    return (path, port.endswith(".grad")) if port.startswith("in[") else None


def _by_spelling(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(common(name), []).append(name)
    return found


def _in_order(pairs: list[Pair], baseline: Sequence[Series], target: Sequence[Series]) -> list[Pair]:
    """By the place of the target, or of what it was made of; a lone baseline comes after what came before it."""
    places = {key_of(s): (i, 0) for i, s in enumerate(target)}
    partner = {
        key: max(places[k] for k in origins(p.target))
        for p in pairs
        if p.baseline and p.target
        for key in origins(p.baseline)
    }
    lone: dict[Key, tuple[int, int]] = {}
    last = (-1, 0)
    for i, one in enumerate(baseline):
        last = partner.get(key_of(one), (last[0], i + 1))
        lone[key_of(one)] = last

    def place(pair: Pair) -> tuple[int, int]:
        one = pair.target or pair.baseline
        assert one is not None
        return max((places if pair.target else lone)[key] for key in origins(one))

    return sorted(pairs, key=place)
