"""Site matching: pair each site of the target with its counterpart in the baseline.

Passes go from exact to lenient, and each pair records the pass that matched it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from tapscope.comparator.matching.fused_matcher import FusedMatcher
from tapscope.comparator.matching.gated import FUNCTION, PRODUCT, down_proj_inputs, gated, ports_of
from tapscope.comparator.matching.residual_sum import residual_sums
from tapscope.comparator.matching.user_map import UserMap
from tapscope.comparator.options.map_file import MapFile
from tapscope.comparator.options.renames import rename_sites
from tapscope.comparator.runs.hints import Hints
from tapscope.comparator.runs.names import FAMILIES, all_reduced_site, canonical_name, is_partial, unique_names
from tapscope.comparator.runs.series import Key, Series, has_same_content, key_of, source_keys
from tapscope.core.site import module_of, port_of

Names = Mapping[str, Series]

ARGUMENTS = frozenset({"input_ids", "position_ids", "positions", "attention_mask", "residual", "rotary_pos_emb"})
"""Argument names with one meaning: an input with one of these names never matches an input with a different name."""


_MASK = re.compile(r":in\[(?:attention_)?mask\]$")
_NORM = re.compile(r"(?:^|\.)(?:input_layernorm|pre_mlp_layernorm):out")
IDENTITIES = ("Identity", "IdentityOp", "IdentityFuncOp")


class Pair(Struct, frozen=True, gc=False):
    """A matched pair of series, or an orphan that only one run has."""

    baseline: Series | None
    target: Series | None
    matched_by: str = ""
    """Name of the pass: ``exact``, ``map``, a family of :data:`~.names.FAMILIES`, ``sum``, ``argument``, ``fused …``,
    ``only input``, ``partial sum`` or ``product``; empty for an orphan."""
    site: str = ""
    """Site of the finding; if empty, the baseline's site, or that of the only side."""
    note: str = ""
    """Why an orphan has no partner, if a reason is known."""

    @property
    def sides(self) -> tuple[Series, Series]:
        """(baseline, target) of a matched pair; asserts that the pair is not an orphan."""
        assert self.baseline is not None
        assert self.target is not None
        return self.baseline, self.target

    def names(self) -> set[str]:
        """Return every name that the finding or either run has for the pair."""
        return {self.site} - {""} | {
            site for one in (self.baseline, self.target) if one for _, site in source_keys(one)
        }


class SiteMatcher:
    """The unmatched series of one (model, pass) group on both sides, by name; each pass removes the series that it
    matches."""

    def __init__(
        self, left: dict[str, Series], right: dict[str, Series], fusions: FusedMatcher, hints: tuple[Hints, Hints]
    ) -> None:
        self.left, self.right, self.fusions, self.hints = left, right, fusions, hints
        self.pairs: list[Pair] = []
        self.everything = dict(left), dict(right)
        self._offered: list[tuple[dict[str, Series], str, dict[str, Series]]] = []
        self._products: tuple[dict[str, Series], dict[str, Series]] = ({}, {})

    def take(self, baseline_name: str, target_name: str, matched_by: str) -> None:
        """Match the series of two names, part by part if both are fused in different orders."""
        baseline, target = self.left.pop(baseline_name), self.right.pop(target_name)
        parts = self.fusions.match_parts(baseline, target)
        if parts:
            self.pairs += [Pair(x, y, f"{matched_by}, {what}", site) for x, y, what, site in parts]
        else:
            self.pairs.append(Pair(baseline, target, self._pass_of(baseline, target, baseline_name, matched_by)))

    def _pass_of(self, baseline: Series, target: Series, name: str, matched_by: str) -> str:
        if baseline.derivation or target.derivation:
            return "sum"
        if matched_by != "exact" or baseline.site == target.site == name:
            return matched_by
        return "argument" if any(name == offer for _, offer, _ in self._offered) else "map"

    def set_aside(self) -> None:
        """Make orphans of sites whose equal names would be misleading."""
        for side, mine in enumerate((self.left, self.right)):
            for name in list(mine):
                if note := name_exception(name, self.hints[side].class_of(mine[name].site)):
                    self._alone(side, mine.pop(name), note)

    def set_root_aside(self) -> None:
        """Make an orphan of a root output that equals the decoder's output: vLLM returns hidden states there, others
        logits."""
        for side, (mine, others) in enumerate(((self.left, self.right), (self.right, self.left))):
            if ":out" in mine and ":out" not in others and has_same_content(mine[":out"], mine.get("model:out")):
                self._alone(
                    side, mine.pop(":out"), "not compared: equals model:out; other frameworks return logits here"
                )

    def set_masks_aside(self) -> None:
        """Make orphans of attention masks if the frameworks' masks have opposite meanings."""
        if not are_masks_inverted(self.hints):
            return
        for side, mine in enumerate((self.left, self.right)):
            for name in list(filter(is_mask, mine)):
                note = "not compared: Megatron's masks mark hidden positions, those of other frameworks visible ones"
                self._alone(side, mine.pop(name), note)

    def set_products_aside(self) -> None:
        """Prevent gated activations from matching plain activations."""
        both = (self.left, self.right)
        gated_paths = [gated(mine, self.hints[side]) for side, mine in enumerate(both)]
        for side, mine in enumerate(both):
            for spelling in gated_paths[side].keys() - gated_paths[1 - side].keys():
                others = both[1 - side]
                for name in ports_of(gated_paths[side][spelling], mine):
                    if port_of(name).startswith("out"):
                        self._products[side][name] = mine.pop(name)
                    else:
                        self._alone(side, mine.pop(name), PRODUCT)
                for name in [name for name in others if canonical_name(f"{module_of(name)}:") == spelling]:
                    self._alone(1 - side, others.pop(name), FUNCTION)

    def products(self) -> None:
        """Match the output of a gated activation with the input of the other run's down projection."""
        for side, mine in enumerate(self._products):
            for name, other in list(down_proj_inputs(mine, self.everything[1 - side])):
                one = mine.pop(name)
                both = (one, other) if side == 0 else (other, one)
                self.pairs.append(Pair(*both, "product", one.site))
            for one in mine.values():
                self._alone(side, one, PRODUCT)

    def _alone(self, side: int, one: Series, note: str) -> None:
        self.pairs.append(Pair(one, None, note=note) if side == 0 else Pair(None, one, note=note))

    def families(self) -> None:
        """Match names by their common spelling, from the strictest naming family to the most lenient."""
        for family in FAMILIES:
            if not (self.left and self.right):
                return
            names = unique_names(self.left, family)
            for spelling, site in unique_names(self.right, family).items():
                if spelling in names:
                    self.take(names[spelling], site, family.name)

    def offer_sums(self) -> None:
        """Replace partial residuals by their sums, and positional arguments by hidden states.

        Skipped between two runs of one framework: there, a residual in only one run means that the other did not record
        it.
        """
        if self.hints[0].framework == self.hints[1].framework not in ("", "torch"):
            return
        for mine, others in ((self.left, self.right), (self.right, self.left)):
            for name, pair, total in list(residual_sums(mine, others)):
                self._offered.append((mine, name, {one: mine.pop(one) for one in pair}))
                mine[name] = total

    def withdraw_sums(self) -> None:
        """Undo the sums that no site matched."""
        for mine, name, pieces in self._offered:
            if name in mine:
                del mine[name]
                mine.update(pieces)

    def only_inputs(self) -> None:
        """Match tensor inputs that are a module's only one in both runs: argument names differ by framework."""
        for a, b in only_inputs((self.left, self.right), self.everything):
            self.take(a, b, "only input")

    def partials(self) -> None:
        """Match partial sums recorded by only one run with the other run's total, which also keeps its own pair."""
        for side, mine in enumerate((self.right, self.left)):
            others = self.everything[side]
            summands = [site for site in mine if is_partial(site)]
            names = unique_names(others, FAMILIES[-1]) if summands else {}
            for site in summands:
                whole = names.get(canonical_name(all_reduced_site(site)))
                if whole is not None and others[whole].first.dtype is not None:
                    one = mine.pop(site)
                    both = (others[whole], one) if side == 0 else (one, others[whole])
                    self.pairs.append(Pair(*both, "partial sum", one.site if side == 0 else both[0].site))

    def orphans(self) -> None:
        """Make orphans of the remaining sites, with a note if there are several candidates."""
        spelled = [{name: canonical_name(name) for name in side} for side in (self.left, self.right)]
        alike = [_by_spelling(side) for side in spelled]
        for side, mine in enumerate((self.left, self.right)):
            for name, one in mine.items():
                others = alike[1 - side].get(spelled[side][name])
                self._alone(side, one, _rivals(name, alike[side][spelled[side][name]], others) if others else "")


def match_sites(
    baseline: Sequence[Series],
    target: Sequence[Series],
    mapping: MapFile | None = None,
    hints: tuple[Hints, Hints] | None = None,
) -> list[Pair]:
    """Return pairs and orphans in the target's execution order; a baseline orphan follows its predecessor's partner.

    Raises ConfigError for an entry of ``mapping`` that matches nothing.
    """
    hints = hints or (Hints(), Hints())
    mapping = mapping or MapFile()
    names = rename_sites(baseline, target, mapping.rename)
    fusions = FusedMatcher(hints)
    user = UserMap(fusions, mapping.fuse)
    pairs: list[Pair] = []
    for left, right in _groups(baseline, target):
        both = [{names[i][one.site]: one for one in side} for i, side in enumerate((left, right))]
        pairs += _match_group(SiteMatcher(both[0], both[1], fusions, hints), user)
    user.check(baseline, target)
    return _in_order(pairs, baseline, target)


def _match_group(group: SiteMatcher, user: UserMap) -> list[Pair]:
    group.pairs += [Pair(*given) for given in user.pairs(group.left, group.right)]
    group.offer_sums()  # before names: hidden_states of one run may be only a partial residual in the other
    group.set_masks_aside()
    group.set_products_aside()
    for name in [name for name in group.right if name in group.left]:
        group.take(name, name, "exact")
    if not (group.left or group.right):
        group.products()
        return group.pairs
    group.set_aside()
    group.set_root_aside()
    group.families()
    group.pairs += [Pair(*given) for given in group.fusions.built_in(group.left, group.right)]
    group.only_inputs()
    group.withdraw_sums()
    group.partials()
    group.products()
    group.orphans()
    return group.pairs


def _groups(baseline: Sequence[Series], target: Sequence[Series]) -> Iterator[tuple[list[Series], list[Series]]]:
    """Yield the series of both sides for each (model, pass); if each run has a single model, model names need not be
    equal."""
    models = [{s.group[0] for s in side} for side in (baseline, target)]
    sole = all(len(names) == 1 for names in models)
    split: dict[tuple[str, str], tuple[list[Series], list[Series]]] = {}
    for side, series in enumerate((baseline, target)):
        for one in series:
            group = ("" if sole else one.group[0], one.group[1])
            split.setdefault(group, ([], []))[side].append(one)
    yield from split.values()


def _rivals(name: str, own: Iterable[str], others: Sequence[str]) -> str:
    """Return the note that explains an ambiguous name: several names of one side have the same spelling as names of the
    other."""
    rivals = ", ".join(other for other in own if other != name)
    also = f", and so could {rivals}" if rivals else ""
    return f"could be {' or '.join(others[:3])}{also}: state it with rename in --map"


def _by_spelling(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of each spelling."""
    by_spelling: dict[str, list[str]] = {}
    for name, spelling in names.items():
        by_spelling.setdefault(spelling, []).append(name)
    return by_spelling


def _in_order(pairs: list[Pair], baseline: Sequence[Series], target: Sequence[Series]) -> list[Pair]:
    """Sort pairs by the position of the target or its sources; a baseline orphan follows its predecessor."""
    places = {key_of(s): (i, 0) for i, s in enumerate(target)}
    lone = {} if all(pair.target for pair in pairs) else _lone(pairs, baseline, places)

    def place(pair: Pair) -> tuple[int, int]:
        one = pair.target or pair.baseline
        assert one is not None
        known = places if pair.target else lone
        return max(known[key] for key in source_keys(one)) if one.sources else known[key_of(one)]

    return sorted(pairs, key=place)


_Places = dict[Key, tuple[int, int]]


def _lone(pairs: Sequence[Pair], baseline: Sequence[Series], places: _Places) -> _Places:
    """Return the sort position of each baseline series: that of its partner, or just after the preceding series."""
    partner = {
        key: max(places[k] for k in source_keys(p.target))
        for p in pairs
        if p.baseline and p.target
        for key in source_keys(p.baseline)
    }
    lone: _Places = {}
    last = (-1, 0)
    for i, one in enumerate(baseline):
        last = partner.get(key_of(one), (last[0], i + 1))
        lone[key_of(one)] = last
    return lone


def are_masks_inverted(hints: tuple[Hints, Hints]) -> bool:
    """Return whether exactly one of two frameworks is Megatron, whose attention masks mark hidden positions."""
    frameworks = {one.framework for one in hints}
    return len(frameworks) > 1 and "megatron" in frameworks


def is_mask(name: str) -> bool:
    """Return whether ``name`` is an attention mask passed to a module."""
    return _MASK.search(name) is not None


def name_exception(name: str, cls: str) -> str:
    """Return why a site must not match the same name of another framework, judging by name and module class; empty if
    it may."""
    if cls == "Conv1D" and ":param[weight]" in name:
        return "not compared: a Conv1D stores its weight transposed"
    if cls in IDENTITIES and _NORM.search(name):
        return "not compared: a copy of its input, not a norm; the next linear normalizes"
    if "LayerNorm" in cls and "Linear" in cls and ":in[" in name:
        return "not compared: this linear normalizes its input first; the other run's takes the output of a norm"
    return ""


def only_inputs(left: tuple[Names, Names], everything: tuple[Names, Names]) -> list[tuple[str, str]]:
    """Return (baseline name, target name) of inputs that are the only input of a module and unmatched on both sides.

    ``left`` holds the unmatched series of both sides, ``everything`` all of them.
    """
    one, two = (_single(mine, every) for mine, every in zip(left, everything, strict=True))
    both = [(one[module], name) for module, name in two.items() if module in one]
    return [pair for pair in both if not {_argument(name) for name in pair} <= ARGUMENTS]


def _single(series: Mapping[str, Series], everything: Mapping[str, Series]) -> dict[tuple[str, bool], str]:
    """Return (common path, is a gradient) -> name of the module's only tensor input, if that input is unmatched.

    Inputs with matched siblings are excluded: the remaining one may be anything.
    """
    inputs = Counter(_input_of(name) for name, one in everything.items() if one.first.dtype is not None)
    candidates: dict[tuple[str, bool], list[str]] = {}
    for name, one in series.items():
        place = _input_of(name)
        if place is not None and one.first.dtype is not None and inputs[place] == 1:
            candidates.setdefault((canonical_name(f"{place[0]}:"), place[1]), []).append(name)
    return {path: names[0] for path, names in candidates.items() if len(names) == 1}


def _argument(name: str) -> str:
    return name.rpartition(":in[")[2].removesuffix(".grad").removesuffix("]")


def _input_of(name: str) -> tuple[str, bool] | None:
    """Return (module path, is a gradient) of an input's site; None for other sites."""
    path, _, port = name.rpartition(":")
    return (path, port.endswith(".grad")) if port.startswith("in[") else None
