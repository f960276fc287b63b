"""Nodes: the matched sites of a comparison as the graph sees them."""

from collections.abc import Hashable, Mapping, Sequence
from sys import intern

from tapscope.comparator.examined import Examined
from tapscope.comparator.node import Node
from tapscope.comparator.series import Series, identity
from tapscope.comparator.widths import Params
from tapscope.index import SiteInfo


def nodes_of(examined: Sequence[Examined], params: Sequence[Params], sites: Mapping[str, SiteInfo]) -> list[Node]:
    """A node a site; ``params`` are the parameters of their modules, ``sites`` those of the runs."""
    sides = _numbered([one.pair.baseline for one in examined]), _numbered([one.pair.target for one in examined])
    each = zip(examined, params, *sides, strict=True)
    return [_node(one, bool(own), sites, identities) for one, own, *identities in each]


def _numbered(series: Sequence[Series | None]) -> list[int | None]:
    """Equal numbers where the series hold equal values, as far as that is known: their hashes take more room."""
    known: dict[Hashable, int] = {}
    found = map(identity, series)
    return [None if each is None else known.setdefault(each, len(known)) for each in found]


def _node(one: Examined, has_params: bool, sites: Mapping[str, SiteInfo], identities: Sequence[int | None]) -> Node:
    path, _, port = one.site.rpartition(":")
    numeric = not one.is_exact and one.has_spread
    port, cls = intern(port), _class(one, sites)  # there are few ports: one object for all sites
    return Node(path, port, numeric, has_params, cls, bool(one.more.drifts), (identities[0], identities[1]))


def _class(one: Examined, sites: Mapping[str, SiteInfo]) -> str:
    for name in one.names:
        if (info := sites.get(name)) is not None and info.cls:
            return info.cls
    return ""
