"""Prefixes that wrappers add to module names: those that were removed, and those to remove."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.options.map_file import RenameEntry
from tapscope.comparator.options.overrides import SIDES, split_side
from tapscope.comparator.runs.names import FAMILIES, wrappers
from tapscope.core import formatting
from tapscope.core.errors import ConfigError

FEWEST = 4
"""Fewest names that must match without a prefix for it to be suggested."""
_MOST = 5000
"""Most names of one run that are checked."""
_ROOT = next(family for family in FAMILIES if family.name == "hf root")


def prefix_renames(prefixes: Iterable[str]) -> tuple[RenameEntry, ...]:
    """Parse ``[baseline:|target:]PREFIX``, the value of ``--strip-prefix``; raises ConfigError for an empty prefix."""
    found = []
    for given in prefixes:
        side, prefix = split_side(given)
        if not prefix.strip("."):
            raise ConfigError(f"--strip-prefix {given!r} is empty; write e.g. --strip-prefix target:wrapper.inner")
        pattern = re.compile(rf"^{re.escape(prefix.strip('.'))}\.")
        found.append(RenameEntry(f"--strip-prefix {given!r}", pattern, "", side))
    return tuple(found)


def wrapper_notes(pairs: Sequence[Pair]) -> list[str]:
    """A sentence for each prefix or wrapper that only one run has in the names of matched sites."""
    counts: Counter[tuple[str, str]] = Counter()
    for pair in pairs:
        if pair.baseline is not None and pair.target is not None:
            around = wrappers(pair.baseline.site), wrappers(pair.target.site)
            if around[0] != around[1]:
                counts.update((side, what) for side, what in zip(SIDES, around, strict=True) if what)
    return [
        f"{side}: {formatting.plural(n, 'name')} matched without {what!r}" for (side, what), n in counts.most_common()
    ]


def prefix_hint(pairs: Sequence[Pair]) -> str:
    """``30 names match when 'net.' is removed: --strip-prefix target:net``, of the orphans; empty if there are none."""
    alone = (
        [p.baseline.site for p in pairs if p.baseline and not p.target][:_MOST],
        [p.target.site for p in pairs if p.target and not p.baseline][:_MOST],
    )
    counts: Counter[tuple[int, str]] = Counter()
    for side, (mine, others) in enumerate((alone, alone[::-1])):
        known = {_ROOT.common(site) for site in others}
        for site in mine:
            path, _, port = site.rpartition(":")
            parts = path.split(".")
            cuts = (i for i in range(1, len(parts)) if _ROOT.common(f"{'.'.join(parts[i:])}:{port}") in known)
            counts.update((side, ".".join(parts[:cut])) for cut in cuts)
    (side, prefix), count = max(counts.items(), key=lambda item: (item[1], -len(item[0][1])), default=((0, ""), 0))
    if count < FEWEST:
        return ""
    removed = f"{formatting.plural(count, 'name')} of the {SIDES[side]} match when {prefix + '.'!r} is removed"
    return f"{removed}: --strip-prefix {SIDES[side]}:{prefix}"
