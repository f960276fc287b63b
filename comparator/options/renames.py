"""Renames: the user's regular expressions over sites, applied to each side before matching."""

import re
from collections.abc import Iterable, Sequence

from tapscope.comparator.options.map_file import RenameEntry
from tapscope.comparator.runs.series import Series
from tapscope.core.errors import ConfigError

_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:])")
_SIDES = ("baseline", "target")


def rename_sites(
    baseline: Sequence[Series], target: Sequence[Series], entries: Sequence[RenameEntry]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the mapping from site to new name for each side.

    Raises ConfigError for an entry that matches no site, with suggestions, and for two sites of one side that would get
    the same name.
    """
    used: set[str] = set()
    sides = []
    for side, series in zip(_SIDES, (baseline, target), strict=True):
        mine = [entry for entry in entries if entry.side in (side, "both")]
        names = {site: _renamed(site, mine, used) for site in {one.site for one in series}}
        sides.append(names)
        if mine:
            _check_distinct(names, side, mine)
    for entry in entries:
        if entry.where not in used:
            of = "either run" if entry.side == "both" else f"the {entry.side}"
            known = {
                site
                for side, names in zip(_SIDES, sides, strict=True)
                if entry.side in (side, "both")
                for site in names
            }
            raise ConfigError(
                f"{entry.where}: {entry.pattern.pattern!r} matches no site of {of}"
                f"{near_miss(entry.pattern.pattern, known)}"
            )
    return sides[0], sides[1]


def _renamed(site: str, entries: Iterable[RenameEntry], used: set[str]) -> str:
    for entry in entries:
        name = entry.apply(site)
        if name != site:
            used.add(entry.where)
            site = name
    return site


def _check_distinct(names: dict[str, str], side: str, entries: Sequence[RenameEntry]) -> None:
    sites: dict[str, str] = {}
    for site, name in sorted(names.items()):
        if name in sites:
            raise ConfigError(
                f"{entries[0].where}: {sites[name]} and {site} of the {side} both become {name}; "
                "entries apply in order, each to the result of those before it"
            )
        sites[name] = site


def near_miss(pattern: str, sites: Iterable[str]) -> str:
    """Return ``; near it: …`` with similar sites for an error message, one site for all layers; empty if none is
    similar."""
    import difflib  # needed for errors only

    kinds = {_NUMBER.sub("0", site): site for site in sorted(sites, reverse=True)}
    asked = re.sub(r"\\d\+?|[\\^$()?*+]", "", _NUMBER.sub("0", pattern))
    close = difflib.get_close_matches(asked, list(kinds)[:2000], 3, 0.3)
    return f"; near it: {', '.join(kinds[name] for name in close)}" if close else ""
