"""Prefixes that wrappers add to module names: known ones, ones removed automatically, and ones suggested to the
user."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.options.map_file import RenameEntry
from tapscope.comparator.options.overrides import SIDES, split_side
from tapscope.comparator.runs.names import FAMILIES, canonical_name, wrappers
from tapscope.core import formatting
from tapscope.core.errors import ConfigError

MIN_MATCHING_NAMES = 4
"""Minimum number of names that must match without a prefix for it to be removed or suggested."""
_MOST_PREFIXES = 4
"""Maximum number of prefixes removed automatically: one per model of a pipeline."""
_MAX_NAMES = 5000
"""Maximum number of names checked per run."""
_ROOT = next(family for family in FAMILIES if family.name == "hf root")


def prefix_renames(prefixes: Iterable[str]) -> tuple[RenameEntry, ...]:
    """Parse ``[baseline:|target:]PREFIX``, the value of ``--strip-prefix``. Raises ConfigError for an empty prefix."""
    renames = []
    for given in prefixes:
        side, prefix = split_side(given)
        if not prefix.strip("."):
            raise ConfigError(f"--strip-prefix {given!r} is empty; write e.g. --strip-prefix target:wrapper.inner")
        pattern = re.compile(rf"^{re.escape(prefix.strip('.'))}\.")
        renames.append(RenameEntry(f"--strip-prefix {given!r}", pattern, "", side))
    return tuple(renames)


def wrapper_notes(pairs: Sequence[Pair]) -> list[str]:
    """Return one sentence for each prefix or wrapper that only one run has in the names of matched sites."""
    counts: Counter[tuple[str, str]] = Counter()
    for pair in pairs:
        if pair.baseline is not None and pair.target is not None:
            around = wrappers(pair.baseline.site), wrappers(pair.target.site)
            if around[0] != around[1]:
                counts.update((side, what) for side, what in zip(SIDES, around, strict=True) if what)
    return [
        f"{side}: {formatting.plural(n, 'name')} matched without {what!r}" for (side, what), n in counts.most_common()
    ]


def remove_prefixes(
    pairs: list[Pair], match: Callable[[Sequence[RenameEntry]], list[Pair]]
) -> tuple[list[Pair], tuple[str, ...]]:
    """Return (pairs, removed prefixes): the pairs found after removing wrapper prefixes such as ``target:net`` from
    names.

    ``match`` pairs the sites again under additional renames. A prefix is removed if it is the only explanation of the
    names concerned, and if no pair is lost. In addition, all names with the prefix, or all names of the other run, must
    then have a partner. Other prefixes are left to :func:`prefix_hint`.
    """
    removed: list[str] = []
    while len(removed) < _MOST_PREFIXES and (prefix := _clear_prefix(_candidates(pairs))):
        side, _, path = prefix.partition(":")
        try:
            again = match(prefix_renames((*removed, prefix)))
        except ConfigError:  # two sites would get the same name
            break
        if not _is_total(pairs, again, SIDES.index(side), f"{path}."):
            break
        pairs = again
        removed.append(prefix)
    return pairs, tuple(removed)


def removed_note(prefix: str, pairs: Sequence[Pair]) -> str:
    """Return a sentence on how many names match without the removed prefix, given as ``target:net``."""
    side, _, path = prefix.partition(":")
    at = SIDES.index(side)
    names = formatting.plural(sum(both[at].startswith(f"{path}.") for both in _matched(pairs)), "name")
    return f"{side}: {names} matched without {path + '.'!r}, as with --strip-prefix {prefix}"


def prefix_hint(pairs: Sequence[Pair]) -> str:
    """Return a suggestion such as ``30 names match when 'net.' is removed: --strip-prefix target:net``; empty if none
    applies."""
    candidates = _candidates(pairs)
    side, prefix = _best(candidates)
    count = len(candidates.get((side, prefix), ()))
    if count < MIN_MATCHING_NAMES:
        return ""
    removed = f"{formatting.plural(count, 'name')} of the {SIDES[side]} match when {prefix + '.'!r}"
    rivals = [one for (_, one), sites in candidates.items() if len(sites) == count and not _is_nested(one, prefix)]
    if rivals:
        return f"{removed} or {rivals[0] + '.'!r} is removed: choose one with --strip-prefix"
    return f"{removed} is removed: --strip-prefix {SIDES[side]}:{prefix}"


def _is_nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


_Candidates = Mapping[tuple[int, str], Mapping[str, str]]
"""(side, prefix) -> site with this prefix -> common name shared with an orphan of the other side."""


def _orphans(pairs: Sequence[Pair], side: int) -> list[str]:
    if side:
        return [p.target.site for p in pairs if p.target and not p.baseline]
    return [p.baseline.site for p in pairs if p.baseline and not p.target]


def _candidates(pairs: Sequence[Pair]) -> _Candidates:
    """Return the prefixes whose removal gives orphans the name of an orphan on the other side."""
    alone = _orphans(pairs, 0)[:_MAX_NAMES], _orphans(pairs, 1)[:_MAX_NAMES]
    candidates: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for side, (mine, others) in enumerate((alone, alone[::-1])):
        known, equal = {_ROOT.common(site) for site in others}, {canonical_name(site) for site in others}
        for site in mine:
            if canonical_name(site) in equal:
                continue  # unmatched for another reason, such as masks of different layouts
            path, _, port = site.rpartition(":")
            parts = path.split(".")
            for cut in range(1, len(parts)):
                name = _ROOT.common(f"{'.'.join(parts[cut:])}:{port}")
                if name in known:
                    candidates[side, ".".join(parts[:cut])][site] = name
    return candidates


def _best(candidates: _Candidates) -> tuple[int, str]:
    """Return the candidate that covers most names; the shortest prefix in case of a tie."""
    return max(candidates, key=lambda one: (len(candidates[one]), -len(one[1])), default=(0, ""))


def _clear_prefix(candidates: _Candidates) -> str:
    """Return the best prefix as ``target:net`` if no other candidate explains any of its names differently; otherwise
    empty."""
    side, prefix = _best(candidates)
    mine = candidates.get((side, prefix), {})
    names = Counter(mine.values())
    if len(mine) < MIN_MATCHING_NAMES or max(names.values()) > 1:
        return ""
    for (other_side, _), other in candidates.items():
        if other_side != side:
            if not names.keys().isdisjoint(map(_ROOT.common, other)):
                return ""
        elif not other.keys() < mine.keys() and any(
            mine.get(site, "") != name in names for site, name in other.items()
        ):
            return ""
    return f"{SIDES[side]}:{prefix}"


def _is_total(before: Sequence[Pair], after: Sequence[Pair], side: int, prefix: str) -> bool:
    """Return whether no pair is lost and all orphans with the prefix, or all orphans of the other side, found a
    partner."""
    if not _matched(before) <= _matched(after):
        return False
    with_reason = {site for p in after if p.note and not (p.baseline and p.target) for site in p.names()}
    left = [site for site in _orphans(after, side) if site.startswith(prefix) and site not in with_reason]
    return not left or all(site in with_reason for site in _orphans(after, 1 - side))


def _matched(pairs: Sequence[Pair]) -> set[tuple[str, str]]:
    return {(p.baseline.site, p.target.site) for p in pairs if p.baseline and p.target}
