"""Map proposal: derive a map file for two runs with different names from structure, shapes, statistics and hashes.

Sites that no pass matches are grouped by the path of their module with numbers replaced by ``*``. Two groups correspond
if their modules have the same numbers, and if their outputs agree in every layer: in width and in statistics (root mean
square, mean, largest magnitude), or by equal hashes. One group corresponds to several groups if their widths and sums
of squares add up.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs.series import Series
from tapscope.core.dims import parse as parse_dims
from tapscope.core.errors import DataError, DimsError
from tapscope.core.formatting import plural
from tapscope.core.site import module_of
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run
from tapscope.run_format.stats import Stats

MAX_DISTANCE = 0.1
"""Largest distance between the statistics of corresponding groups; fp32 and bf16 are about 0.01 apart."""
_MIN_RUNNER_UP_GAP = 0.02
"""Minimum distance by which the second best candidate must be worse, unless values are equal."""
_NAMES = 0.05
"""Distance penalty for completely dissimilar names."""
_HEIGHT_PENALTY = 0.03
"""Distance penalty for each level by which module nesting differs."""
_MAX_ROWS_READ = 64
"""Maximum number of rows read to determine the order of the parts of a fused tensor."""
_ADDITIVE = 0.02
"""Maximum relative error to which the sums of squares of parts must add up."""
_MAX_FIRINGS_READ = 4
"""Maximum number of firings of a site whose statistics are read."""
_MAX_PARTS = 3
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Profile(Struct, frozen=True):
    """Summary of a site for the search: shape, statistics and hashes, but no values."""

    site: str
    port: str
    numbers: tuple[int, ...]
    width: int
    """Elements per token row, or in total if the number of rows is unknown."""
    stats: Stats
    hashes: frozenset[tuple[int, str]]
    """(firing index, hash) of records that are whole tensors."""
    record: Record | None
    """The first record, if that record holds the whole tensor with values."""


class Group(Struct, frozen=True):
    """Unmatched modules whose paths differ only in numbers."""

    path: str
    """Module path with ``*`` for each number: ``layers.*.mlp``."""
    outputs: dict[tuple[int, ...], Profile]
    """Numbers in the path -> representative site of the module: its output, else its parameter, else its input."""
    kind: str
    """Port kind of the representatives: ``out``, ``param``, ``in`` or ``other``."""
    order: int
    num_sites: int
    height: int = 0
    """Levels of modules nested inside. Breaks ties between a module and its last submodule, which have equal
    outputs."""


class Rename(Struct, frozen=True):
    """A group of target modules and the group of baseline modules with the same role."""

    baseline: str
    target: str
    distance: float
    is_equal: bool
    """Whether the hashes show equal values."""
    num_modules: int

    def entry(self) -> dict[str, str]:
        """Return this rename as an entry of the ``rename`` list in a map file."""
        pattern = re.escape(self.target).replace(r"\*", r"(\d+)")
        counter = itertools.count(1)
        to = re.sub(r"\*", lambda _: f"\\{next(counter)}", self.baseline)
        return {"from": f"^{pattern}:", "to": f"{to}:", "side": "target"}

    @property
    def evidence(self) -> str:
        """Reason to believe that the groups correspond."""
        modules = f"{self.num_modules} modules" if self.num_modules != 1 else "1 module"
        return f"{modules}, {'equal values' if self.is_equal else f'statistics {self.distance:.1%} apart'}"


class Split(Struct, frozen=True):
    """A fused tensor of one run and its separate parts in the other."""

    whole: str
    parts: tuple[str, ...]
    error: float
    """Relative error to which the sums of squares of the parts add up."""
    sizes: tuple[int, ...] = ()
    """Widths of the parts if their values are contiguous in this order; empty if the order is unknown."""

    @property
    def evidence(self) -> str:
        """Reason to believe that the parts make up the fused tensor."""
        order = "values side by side in this order" if self.sizes else "check the order of the parts"
        return f"widths add up, sums of squares within {self.error:.1%}; {order}"


class MapProposal(Struct, frozen=True):
    """Proposed renames and splits for sites that two runs do not match automatically."""

    num_matched: int
    num_unmatched: tuple[int, int]
    pairs: tuple[tuple[str, str, str], ...]
    """(baseline site, target site, pass) of each matched pair."""
    prefix: str
    """Prefix that must be passed as ``--strip-prefix`` for names to match; empty if none is needed."""
    renames: tuple[Rename, ...] = ()
    splits: tuple[Split, ...] = ()
    ambiguous: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(group of the target, equally likely groups of the baseline)."""
    unexplained: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Groups of (baseline, target) without a counterpart."""

    @property
    def summary(self) -> str:
        """Counts in words: ``10 renames and 1 split``."""
        return f"{plural(len(self.renames), 'rename')} and {plural(len(self.splits), 'split')}"

    def yaml(self) -> str:
        """Return the text of a map file; comments state the evidence and the undecided groups."""
        lines: list[str] = []
        if self.renames:
            lines.append("rename:")
            for one in self.renames:
                entry = one.entry()
                lines.append(f"  # {one.evidence}")
                lines.append(f"  - {{from: {_quoted(entry['from'])}, to: {_quoted(entry['to'])}, side: target}}")
        if self.splits:
            lines.append("split:")
            for split in self.splits:
                lines.append(f"  # {split.evidence}")
                order = f", order: plain, sizes: {list(split.sizes)}" if split.sizes else ""
                lines.append(f"  {_quoted(split.whole)}: {{into: [{', '.join(map(_quoted, split.parts))}]{order}}}")
        for target, candidates in self.ambiguous:
            lines.append(f"# undecided: {target} may be {' or '.join(candidates)}")
        for side, groups in zip(("baseline", "target"), self.unexplained, strict=True):
            lines += [f"# only in the {side}: {group}" for group in groups]
        return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def proposal(
    pairs: Sequence[Pair], runs: tuple[Run, Run], prefix: str = "", *, with_splits: bool = True
) -> MapProposal:
    """Return a map for the unmatched sites in ``pairs``, the matching of all sites of ``runs``.

    ``prefix`` is already removed from the names. Splits are only searched ``with_splits``: the number of candidates
    grows with the third power of the number of groups.
    """
    tokens = _tokens(runs[0]), _tokens(runs[1])
    alone = (
        [pair.baseline for pair in pairs if pair.baseline and not pair.target],
        [pair.target for pair in pairs if pair.target and not pair.baseline],
    )
    sites = [pair.baseline.site for pair in pairs if pair.baseline], [pair.target.site for pair in pairs if pair.target]
    heights = _heights(sites[0]), _heights(sites[1])
    groups = _groups(alone[0], tokens[0], heights[0]), _groups(alone[1], tokens[1], heights[1])
    found, ambiguous = _renames(*groups)
    done = {one.baseline for one in found}, {one.target for one in found}
    known = {(_group_of(p.baseline.site), _group_of(p.target.site)) for p in pairs if p.baseline and p.target}
    renames = [one for one in found if (one.baseline, one.target) not in known]  # known: other ports match already
    left = [[g for g in side if g.path not in names] for side, names in zip(groups, done, strict=True)]
    splits = []
    if with_splits:
        splits = [*_splits(left[1], left[0], (runs[1], runs[0])), *_splits(left[0], left[1], runs)]
    used = {name for split in splits for name in (split.whole, *split.parts)}
    used |= {target for target, _ in ambiguous}
    rest = tuple(tuple(g.path for g in side if g.path not in used and g.kind == "out") for side in left)
    both = [(p.baseline.site, p.target.site, p.matched_by) for p in pairs if p.baseline and p.target]
    counts = len(alone[0]), len(alone[1])
    entries = (tuple(renames), tuple(splits), tuple(ambiguous), (rest[0], rest[1]))
    return MapProposal(len(both), counts, tuple(both), prefix, *entries)


def _tokens(run: Run) -> dict[int, int]:
    """Return the number of token rows of each step that has a row table."""
    return {step: sum(span.count for span in next(iter(lines.values())).info.rows) for step, lines in run.steps.items()}


# ---- profiles


def _group_of(site: str) -> str:
    """Return the path of the site's module with ``*`` for each number."""
    return _NUMBER.sub("*", module_of(site))


def _heights(sites: Iterable[str]) -> dict[str, int]:
    """Return for each group path the number of module levels nested inside."""
    heights: dict[str, int] = {}
    for path in set(map(_group_of, sites)):
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            outer = ".".join(parts[:length])
            heights[outer] = max(heights.get(outer, 0), len(parts) - length)
    return heights


def _groups(series: Sequence[Series], tokens: dict[int, int], heights: Mapping[str, int]) -> list[Group]:
    """Return the groups of unmatched sites in execution order; the root module is left out."""
    by_template: dict[str, dict[tuple[int, ...], list[Profile]]] = defaultdict(lambda: defaultdict(list))
    order: dict[str, int] = {}
    for n, one in enumerate(series):
        path, _, port = one.site.rpartition(":")
        if not path or not one.is_float or port.endswith(".grad") or (profile := _profile(one, port, tokens)) is None:
            continue
        template = _NUMBER.sub("*", path)
        by_template[template][profile.numbers].append(profile)
        order.setdefault(template, n)
    return [
        structs.replace(_group(template, modules, order[template]), height=heights[template])
        for template, modules in by_template.items()
    ]


def _group(template: str, modules: dict[tuple[int, ...], list[Profile]], order: int) -> Group:
    for kind in ("out", "param", "in"):
        chosen = {
            numbers: next(one for one in profiles if one.port.startswith(kind))
            for numbers, profiles in modules.items()
            if any(one.port.startswith(kind) for one in profiles)
        }
        if chosen:
            return Group(template, chosen, kind, order, sum(map(len, modules.values())))
    first = {numbers: profiles[0] for numbers, profiles in modules.items()}
    return Group(template, first, "other", order, sum(map(len, modules.values())))


def _profile(one: Series, port: str, tokens: dict[int, int]) -> Profile | None:
    stats: Stats | None = None
    hashes: set[tuple[int, str]] = set()
    width = 0
    for n, firing in enumerate(itertools.islice(one.firings, _MAX_FIRINGS_READ)):
        records = [record for record in firing.records if record.stats is not None]
        kept = records if _is_sharded(records[0].dims if records else None) else records[:1]
        for record in kept:
            assert record.stats is not None
            stats = record.stats if stats is None else stats.merge(record.stats)
        if len(kept) == 1 and kept[0].hash is not None:
            hashes.add((n, kept[0].hash))
        if not n:
            count = sum(math.prod(record.shape) for record in kept)
            rows = tokens.get(firing.step, 0)
            width = count // rows if rows and not count % rows else count
    if stats is None or not stats.finite or not stats.sumsq > 0:
        return None
    numbers = tuple(int(text) for text in _NUMBER.findall(module_of(one.site)))
    first = one.firings[0].records
    has_values = len(first) == 1 and first[0].entry is not None and bool(first[0].shape)
    whole = first[0] if has_values else None
    return Profile(one.site, port, numbers, width, stats, frozenset(hashes), whole)


def _is_sharded(text: str | None) -> bool:
    if text is None:
        return False
    try:
        return any(not shard.partial for _, shard in parse_dims(text).shards())
    except DimsError:
        return False


# ---- renames


def _distance(a: Profile, b: Profile) -> float:
    """Return the dissimilarity of two sites: 0 for equal hashes, inf for different widths."""
    if a.hashes & b.hashes:
        return 0.0
    one, two = a.stats, b.stats
    if a.width != b.width or one.rms is None or two.rms is None or not one.absmax or not two.absmax:
        return math.inf
    size = math.hypot(one.rms, two.rms)
    means = abs((one.mean or 0.0) - (two.mean or 0.0)) / size
    return abs(math.log(one.rms / two.rms)) + means + abs(math.log(one.absmax / two.absmax)) / 4


def _group_distance(a: Group, b: Group) -> float:
    """Return the mean distance over modules with equal numbers; inf if most numbers of either group have no
    counterpart."""
    shared = a.outputs.keys() & b.outputs.keys()
    if a.kind != b.kind or 2 * len(shared) < max(len(a.outputs), len(b.outputs)):
        return math.inf
    each: list[float] = [_distance(a.outputs[numbers], b.outputs[numbers]) for numbers in shared]
    return sum(each) / len(each)


def _renames(left: Sequence[Group], right: Sequence[Group]) -> tuple[list[Rename], list[tuple[str, tuple[str, ...]]]]:
    """Return the best one-to-one pairs of groups, and the target groups with several equally good candidates."""
    scores: dict[tuple[int, int], tuple[float, float]] = {}
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            distance = _group_distance(a, b)
            if distance <= MAX_DISTANCE:
                unlike = 1.0 - SequenceMatcher(None, a.path, b.path, autojunk=False).ratio()
                higher = abs(a.height - b.height)
                scores[i, j] = distance + _NAMES * unlike + _HEIGHT_PENALTY * higher, distance
    renames: list[Rename] = []
    undecided: dict[str, tuple[str, ...]] = {}
    open_left, open_right = set(range(len(left))), set(range(len(right)))
    for (i, j), (score, distance) in sorted(scores.items(), key=lambda item: item[1]):
        if i not in open_left or j not in open_right:
            continue
        rivals = [
            k for k in open_left if k != i and (k, j) in scores and scores[k, j][0] - score < _rival_gap(distance)
        ]
        if rivals:
            undecided[right[j].path] = tuple(left[k].path for k in sorted({i, *rivals}))
            continue
        open_left.remove(i)
        open_right.remove(j)
        undecided.pop(right[j].path, None)
        a, b = left[i], right[j]
        shared = a.outputs.keys() & b.outputs.keys()
        is_equal = all(a.outputs[n].hashes & b.outputs[n].hashes for n in shared)
        renames.append(Rename(a.path, b.path, distance, is_equal, len(shared)))
    open_names = {left[k].path for k in open_left}
    rest = [
        (target, kept)
        for target, names in undecided.items()
        if (kept := tuple(name for name in names if name in open_names))
    ]
    order = {group.path: group.order for group in right}
    renames.sort(key=lambda one: order[one.target])
    return renames, rest


def _rival_gap(distance: float) -> float:
    """Return by how much a rival must be worse. Candidates with equal values are distinguished by their names alone."""
    return _NAMES / 10 if distance == 0.0 else min(_MIN_RUNNER_UP_GAP, distance)


# ---- splits


def _splits(fused: Sequence[Group], parts: Sequence[Group], runs: tuple[Run, Run]) -> list[Split]:
    """Return the groups of ``fused`` that are several groups of ``parts`` concatenated; ``runs`` are the runs of
    both."""
    splits: list[Split] = []
    free = sorted(parts, key=lambda group: group.order)
    for whole in sorted(fused, key=lambda group: group.order):
        best: tuple[float, tuple[Group, ...]] | None = None
        fitting = [g for g in free if g.kind == whole.kind and g.outputs.keys() == whole.outputs.keys()]
        for size in range(2, _MAX_PARTS + 1):
            for some in itertools.combinations(fitting, size):
                error = _additive_error(whole, some)
                if error <= _ADDITIVE and (best is None or error < best[0]):
                    best = error, some
        if best is not None:
            free = [group for group in free if group not in best[1]]
            order, sizes = _in_order(whole, best[1], runs)
            splits.append(Split(whole.path, tuple(group.path for group in order), best[0], sizes))
    return splits


def _in_order(whole: Group, parts: Sequence[Group], runs: tuple[Run, Run]) -> tuple[Sequence[Group], tuple[int, ...]]:
    """Return the parts in the order in which the whole concatenates them, and their widths.

    If the order is unknown, the parts are returned as given, with empty widths. ``runs`` are the runs of the whole and
    of the parts.
    """
    numbers = min(whole.outputs)
    one, each = whole.outputs[numbers], {part.path: part.outputs[numbers] for part in parts}
    if one.record is None or any(part.record is None for part in each.values()):
        return parts, ()
    try:
        joined = _values(runs[0], one)
        values = {path: _values(runs[1], part) for path, part in each.items()}
    except DataError:
        return parts, ()
    for order in itertools.permutations(parts):
        arrays = [values[part.path] for part in order]
        if any(len(array) != len(joined) for array in arrays):
            return parts, ()
        difference = np.concatenate(arrays, axis=1) - joined
        if np.linalg.norm(difference) <= MAX_DISTANCE * np.linalg.norm(joined):
            return order, tuple(array.shape[1] for array in arrays)
    return parts, ()


def _values(run: Run, profile: Profile) -> np.ndarray[Any, Any]:
    """Return the leading rows of the profile's record as float64 [rows, width]."""
    assert profile.record is not None
    array = run.array(profile.record)
    return np.asarray(array.reshape(-1, array.shape[-1])[:_MAX_ROWS_READ], np.float64)


def _additive_error(whole: Group, parts: Sequence[Group]) -> float:
    """Return the largest relative error to which sums of squares and sums of the parts add up; inf if anything does
    not."""
    worst = 0.0
    for numbers, one in whole.outputs.items():
        each: list[Profile] = [part.outputs[numbers] for part in parts]
        if sum(part.width for part in each) != one.width:
            return math.inf
        error = abs(sum(part.stats.sumsq for part in each) / one.stats.sumsq - 1.0)
        total = math.sqrt(one.stats.sumsq * one.stats.finite)
        worst = max(worst, error, abs(sum(part.stats.sum for part in each) - one.stats.sum) / total)
        if worst > _ADDITIVE:
            return math.inf
    return worst


def to_json(proposal: MapProposal) -> dict[str, Any]:
    """Return the proposal as JSON types."""
    return {
        "num_matched": proposal.num_matched,
        "num_unmatched": list(proposal.num_unmatched),
        "strip_prefix": proposal.prefix or None,
        "renames": [{**one.entry(), "distance": one.distance, "is_equal": one.is_equal} for one in proposal.renames],
        "splits": [{"whole": one.whole, "parts": list(one.parts), "error": one.error} for one in proposal.splits],
        "ambiguous": [{"target": target, "baseline": list(names)} for target, names in proposal.ambiguous],
        "unexplained": {"baseline": list(proposal.unexplained[0]), "target": list(proposal.unexplained[1])},
    }
