"""Fused matcher: passes that match a fused tensor of one run with the separate parts that the other run recorded."""

from collections.abc import Mapping, Sequence

from tapscope.comparator.matching.fused_tensors import (
    FusedLayouts,
    FusedSite,
    annotate_parts,
    fused_names,
    fused_site,
    is_split,
    storage_order,
    width_of,
)
from tapscope.comparator.runs.derived_tensor import ConcatParts, FusedLayout, FusedPart
from tapscope.comparator.runs.hints import Hints
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series, derived_series

SeriesMatch = tuple[Series, Series, str, str]
"""(baseline, target, matching pass, site of the finding)."""


class FusedMatcher:
    """Splits the fused tensors of one comparison into their parts."""

    def __init__(self, hints: tuple[Hints, Hints]) -> None:
        self.hints, self.anatomy = hints, FusedLayouts(hints)

    def match_parts(self, left: Series, right: Series) -> list[SeriesMatch]:
        """Match two fused series of one name part by part if they store their parts in different orders; otherwise
        return []."""
        site = fused_site(left.site)
        if site is None or not is_split(site.port) or not (left.is_tensor and right.is_tensor):
            return []
        both = (left, right)
        fused = [self.anatomy.fused(side, both[side], site, ()) for side in (0, 1)]
        if storage_order(left, fused[0], self.hints[0]) == storage_order(
            right, fused[1], self.hints[1]
        ) or self._is_single(left, site):
            return []
        return [
            (
                self.part(0, left, fused[0], i),
                self.part(1, right, fused[1], i),
                label(fused),
                site_of_part(left.site, part),
            )
            for i, part in enumerate(site.parts)
        ]

    def _is_single(self, series: Series, site: FusedSite) -> bool:
        """Return whether the series belongs to an MLP without a gate, whose first linear is a single tensor."""
        size = self.hints[0].count("intermediate_size") or self.hints[1].count("intermediate_size")
        return site.kind == "gate_up_proj" and size == width_of(
            series, self.hints[0], 0 if "param[" in site.port else -1
        )

    def part(self, side: int, series: Series, fused: FusedLayout, index: int | None) -> Series:
        """Return a series with the values of one part of a fused series; ``index`` None: of all parts, in plain
        order."""
        source = annotate_parts(series, fused, self.hints[side])
        name = series.site if index is None else site_of_part(series.site, fused.parts[index])
        return derived_series(name, FusedPart(fused, index), (source,))

    def built_in(self, left: dict[str, Series], right: dict[str, Series]) -> list[SeriesMatch]:
        """Match fused modules of either side with the separate modules of the other, and remove both from the maps."""
        matches: list[SeriesMatch] = []
        for side, (mine, others) in enumerate(((left, right), (right, left))):
            names = list(fused_names(mine))
            spelled = _spelled(others) if names else {}
            for name, site in names:
                partners = {i: n for i in range(len(site.parts)) if (n := _partner(site, i, spelled, others))}
                if partners and mine[name].is_tensor:
                    matches += self._split(side, mine.pop(name), site, {i: others.pop(n) for i, n in partners.items()})
        return matches

    def _split(self, side: int, series: Series, site: FusedSite, partners: Mapping[int, Series]) -> list[SeriesMatch]:
        if not is_split(site.port):  # inputs: all parts read the input of the fused module
            return [self._match(side, series, other, "fused input", site.parts[i]) for i, other in partners.items()]
        fused = self.anatomy.fused(side, series, site, self.widths(1 - side, series, partners, len(site.parts)))
        if len(partners) == len(site.parts) and not all(map(has_values, (series, *partners.values()))):
            joined = derived_series(series.site, ConcatParts(fused), [partners[i] for i in sorted(partners)])
            return [self._match(side, series, joined, f"{label((fused,))}, joined", "")]
        return [
            self._match(side, self.part(side, series, fused, i), other, label((fused,)), site.parts[i])
            for i, other in partners.items()
        ]

    def widths(self, side: int, series: Series, partners: Mapping[int, Series], num_parts: int) -> tuple[int, ...]:
        """Return the sizes of the parts on the other side; empty if any part is missing there."""
        if len(partners) < num_parts or not all(p.first.shape for p in partners.values()):
            return ()
        axis = 0 if ":param[" in series.site else -1
        return tuple(width_of(partners[i], self.hints[side], axis) for i in range(num_parts))

    def _match(self, side: int, fused: Series, other: Series, matched_by: str, part: str) -> SeriesMatch:
        """Order the match as (baseline, target). The finding has the baseline's name; a part of a fused baseline tensor
        is named as a port of that tensor."""
        if side == 1:
            return other, fused, matched_by, other.site
        return fused, other, matched_by, site_of_part(fused.sources[0].site if fused.sources else fused.site, part)


def label(fused: Sequence[FusedLayout]) -> str:
    """Return the name of the pass with the storage order: ``fused qkv (grouped)``."""
    kind = {"q_proj": "qkv", "gate_proj": "gate_up"}.get(fused[0].parts[0], "parts")
    orders = ["grouped" if one.groups > 1 else "plain" for one in fused]
    return f"fused {kind} ({' against '.join(dict.fromkeys(orders))})" if kind == "qkv" else f"fused {kind}"


def has_values(series: Series) -> bool:
    """Return whether the bytes of every record are on disk."""
    return all(record.entry is not None for firing in series.firings for record in firing.records)


def site_of_part(site: str, part: str) -> str:
    """Return the site of a part, or the site itself for an empty ``part``.

    ``a.linear_qkv:out[0].grad`` and ``q_proj`` give ``a.linear_qkv:out[q_proj].grad``.
    """
    if not part:
        return site
    path, _, port = site.rpartition(":")
    bare, grad = port.removesuffix(".grad"), ".grad" if port.endswith(".grad") else ""
    if bare.startswith("param["):
        return f"{path}:{bare[:-1]}.{part}]{grad}"
    return f"{path}:{bare.partition('[')[0]}[{part}]{grad}"


def _spelled(series: Mapping[str, Series]) -> dict[str, list[str]]:
    spellings: dict[str, list[str]] = {}
    for name, one in series.items():
        path, _, port = canonical_name(name).rpartition(":")
        if port.startswith("in["):
            port = "in.grad" if port.endswith(".grad") else "in"
        if one.is_tensor:
            spellings.setdefault(f"{path}:{port}", []).append(name)
    return spellings


def _partner(site: FusedSite, index: int, spelled: Mapping[str, list[str]], others: Mapping[str, Series]) -> str | None:
    """Return the only name on the other side for this part; None unless there is exactly one."""
    port = site.port
    if port.startswith("in["):
        port = "in.grad" if port.endswith(".grad") else "in"
    names = [n for n in spelled.get(f"{site.path}{site.parts[index]}:{port}", ()) if n in others]
    return names[0] if len(names) == 1 else None
