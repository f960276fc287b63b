"""User map: apply the user's ``split`` and ``join`` entries, the first matching pass."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from tapscope.comparator.matching.fused_matcher import FusedMatcher, SeriesMatch, site_of_part
from tapscope.comparator.matching.fused_tensors import axis_of, is_split, width_of
from tapscope.comparator.options.map_entry import FusedMatch, MapEntry, lookup
from tapscope.comparator.options.map_file import FuseEntry
from tapscope.comparator.options.renames import near_miss
from tapscope.comparator.runs.derived_tensor import ConcatParts, FusedLayout
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series, derived_series
from tapscope.core.errors import ConfigError
from tapscope.core.site import port_of


class UserMap:
    """The map entries of one comparison, with match counts accumulated over all groups of series."""

    def __init__(self, fusions: FusedMatcher, entries: Sequence[FuseEntry]) -> None:
        self.fusions, self.entries = fusions, entries
        self._entries = [MapEntry(entry) for entry in entries]

    def pairs(self, left: dict[str, Series], right: dict[str, Series]) -> list[SeriesMatch]:
        """Match fused tensors of one side with their parts on the other, and remove both from the maps."""
        matches: list[SeriesMatch] = []
        for map_entry in self._entries:
            for side, (mine, others) in enumerate(((left, right), (right, left))):
                spelled: dict[str, list[str]] = {}
                for name in others:
                    spelled.setdefault(canonical_name(name), []).append(name)
                for fused in list(map_entry.find(mine)):
                    map_entry.sites.append(fused.name)
                    partners = {
                        i: n for i, t in enumerate(fused.parts) if (n := lookup(t, others, spelled)) is not None
                    }
                    map_entry.wanted += [names[0] for i, names in enumerate(fused.parts) if i not in partners]
                    if not partners or (map_entry.entry.joins and len(partners) < len(fused.parts)):
                        continue
                    map_entry.num_matched += 1
                    matches += self._matches(
                        map_entry, side, mine.pop(fused.name), fused, {i: others.pop(n) for i, n in partners.items()}
                    )
        return matches

    def check(self, baseline: Sequence[Series], target: Sequence[Series]) -> None:
        """Raise ConfigError for an entry that matched nothing, with a hint at close names."""
        sites = {one.site for one in (*baseline, *target)}
        for one in self._entries:
            if one.num_matched:
                continue
            if not one.sites:
                raise ConfigError(f"{one.entry.where} matches no site of either run{near_miss(one.entry.whole, sites)}")
            missing = sorted(set(one.wanted))[:3]
            raise ConfigError(
                f"{one.entry.where}: {one.sites[0]} exists, but the other run has no {' nor '.join(missing)}"
                f"{near_miss(missing[0], sites - set(one.sites))}"
            )

    def _matches(
        self, map_entry: MapEntry, side: int, series: Series, match: FusedMatch, partners: Mapping[int, Series]
    ) -> list[SeriesMatch]:
        if not is_split(port_of(canonical_name(f"x:{match.port}"))):
            return [
                _in_side_order(
                    side, series, other, "map input", "" if side else site_of_part(series.site, map_entry.names[i])
                )
                for i, other in partners.items()
            ]
        fused = self._fused(map_entry, side, series, partners)
        if map_entry.entry.joins:
            whole = self.fusions.part(side, series, fused, None)
            joined = derived_series(series.site, ConcatParts(fused), [partners[i] for i in sorted(partners)])
            return [_in_side_order(side, whole, joined, f"map join{_order(fused)}", series.site)]
        parts = {i: self.fusions.part(side, series, fused, i) for i in partners}
        return [_in_side_order(side, parts[i], other, f"map split{_order(fused)}", "") for i, other in partners.items()]

    def _fused(self, map_entry: MapEntry, side: int, series: Series, partners: Mapping[int, Series]) -> FusedLayout:
        entry, anatomy, hints = map_entry.entry, self.fusions.anatomy, self.fusions.hints[side]
        axis = axis_of(series, hints)
        sizes = entry.sizes
        if not sizes and entry.heads:
            width, shares = width_of(series, hints, axis), (entry.heads[0], entry.heads[1], entry.heads[1])
            head_dim, rest = divmod(width, sum(shares))
            if rest:
                problem = f"{series.site} has {width} features, which heads {list(entry.heads)} do not divide"
                return FusedLayout(map_entry.names, axis, problem=f"{problem}: {entry.where}")
            sizes = tuple(n * head_dim for n in shares)
        sizes = sizes or self.fusions.widths(1 - side, series, partners, len(map_entry.names))
        fused = FusedLayout(map_entry.names, axis, sizes)
        if len(map_entry.names) != 3 or entry.order == "plain":
            return (
                fused if sizes or len(map_entry.names) == 2 else structs.replace(fused, problem=_unknown(entry, series))
            )
        known = (*entry.heads, 0) if entry.heads else anatomy.heads(side)
        return anatomy.ordered(fused, entry.order or anatomy.order(side, series), series, known)


def _in_side_order(side: int, mine: Series, other: Series, matched_by: str, name: str) -> SeriesMatch:
    """Return the match as (baseline, target, pass, site), whichever side ``mine`` is on."""
    pair = (mine, other) if side == 0 else (other, mine)
    return (*pair, matched_by, name or pair[0].site)


def _order(fused: FusedLayout) -> str:
    return " (grouped)" if fused.groups > 1 else ""


def _unknown(entry: FuseEntry, series: Series) -> str:
    return f"sizes of the parts of {series.site} are unknown, as not all were recorded: give sizes in {entry.where}"
