"""Nodes: the matched sites of a comparison as the graph sees them."""

from collections.abc import Hashable, Mapping, Sequence
from sys import intern

from tapscope.comparator.noise_floor.node import Node
from tapscope.comparator.noise_floor.reduction_length import Params
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.runs.series import Series, identity
from tapscope.run_format.index import SiteInfo


def nodes_of(examined: Sequence[Examined], params: Sequence[Params], sites: Mapping[str, SiteInfo]) -> list[Node]:
    """A node a site; ``params`` are the parameters of their modules, ``sites`` those of the runs."""
    gradients = [one.site.endswith(".grad") for one in examined]
    left = _numbered([one.pair.baseline for one in examined], gradients)
    right = _numbered([one.pair.target for one in examined], gradients)
    each = zip(examined, params, left, right, strict=True)
    return [_node(one, bool(own), sites, _NOBODY_ELSE if a is b is None else (a, b)) for one, own, a, b in each]


_NOBODY_ELSE = None, None


def _numbered(series: Sequence[Series | None], gradients: Sequence[bool]) -> list[int | None]:
    """See :attr:`.node.Node.identities`, of one run."""
    first: dict[Hashable, int] = {}
    found = [None if (key := identity(one)) is None else first.setdefault(key, i) for i, one in enumerate(series)]
    shared = {number for i, number in enumerate(found) if number != i}
    return [
        number if number in shared or is_gradient else None
        for number, is_gradient in zip(found, gradients, strict=True)
    ]


def _node(
    one: Examined, has_params: bool, sites: Mapping[str, SiteInfo], identities: tuple[int | None, int | None]
) -> Node:
    path, _, port = one.site.rpartition(":")
    numeric = not one.is_exact and one.has_spread
    port = intern(port)  # there are few: one object for all sites
    return Node(path, port, numeric, has_params, _class(one, sites), bool(one.more.drifts), identities)


def _class(one: Examined, sites: Mapping[str, SiteInfo]) -> str:
    for name in one.names:
        if (info := sites.get(name)) is not None and info.cls:
            return info.cls
    return ""
