"""Map entry: one entry of a map file's ``split`` or ``join`` section, applied to the sites of both runs."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from msgspec import Struct, field

from tapscope.comparator.options.map_file import FuseEntry
from tapscope.comparator.runs.names import canonical_name
from tapscope.core.site import module_of
from tapscope.expr.safe_regex import MAX_SUBJECT


class FusedMatch(Struct, frozen=True):
    """A fused site and the possible names of its parts."""

    name: str
    port: str
    parts: tuple[tuple[str, ...], ...]
    """Possible names of each part, the most likely first."""


class MapEntry(Struct, dict=True):
    """An entry of a map file, with the sites that it matched."""

    entry: FuseEntry
    sites: list[str] = field(default_factory=list)
    """Fused sites that matched the entry."""
    wanted: list[str] = field(default_factory=list)
    """Part names that no site matched, for the error message if nothing matches."""
    num_matched: int = 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parts: their last path components if these are distinct identifiers, otherwise ``part0``,
        ``part1``, …"""
        last = tuple(module_of(part).rpartition(".")[2] or part.rpartition(".")[2] for part in self.entry.parts)
        fit = len(set(last)) == len(last) and all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in last)
        return last if fit else tuple(f"part{i}" for i in range(len(last)))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        path, colon, port = self.entry.whole.partition(":")
        body = "([^:]*?)".join(map(re.escape, path.split("*")))
        tail = "([^:]*?)".join(map(re.escape, port.split("*"))) if colon else "[^:]*"
        return re.compile(rf"(?P<before>(?:[^:]*\.)?){body}:(?P<port>{tail})")

    def find(self, names: Iterable[str]) -> Iterator[FusedMatch]:
        """Yield the sites that match the fused tensor of this entry."""
        for name in names:
            match = self._regex.fullmatch(name) if len(name) <= MAX_SUBJECT else None
            if match is not None:
                groups = [g for i, g in enumerate(match.groups(), 1) if i not in self._regex.groupindex.values()]
                yield FusedMatch(
                    name, match["port"], tuple(self._spellings(part, groups, match) for part in self.entry.parts)
                )

    def _spellings(self, part: str, groups: list[str], match: re.Match[str]) -> tuple[str, ...]:
        filled = iter(groups)
        text = re.sub(r"\*", lambda _: next(filled), part)
        text = text if ":" in part else f"{text}:{match['port']}"
        return f"{match['before']}{text}", text


def lookup(spellings: tuple[str, ...], others: Mapping[str, object], spelled: Mapping[str, list[str]]) -> str | None:
    """Return the other side's site for a part, by exact name or by a unique canonical name; None if there is no
    match."""
    for text in spellings:
        if text in others:
            return text
    names = {name for text in spellings for name in spelled.get(canonical_name(text), ()) if name in others}
    return names.pop() if len(names) == 1 else None
