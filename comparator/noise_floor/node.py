"""Nodes of the dataflow graph: one matched site each, and what it was computed from."""

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from sys import intern

from msgspec import Struct

from tapscope.comparator.metrics.images import is_conv_class
from tapscope.comparator.noise_floor.reduction_length import Params
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import Series, content_id
from tapscope.run_format.index import SiteInfo

_POINTWISE = re.compile(r"(?i)act|elu|silu|swish|mish|sigmoid|tanh|softplus|dropout|identity")
_OFFSET_WEIGHT = re.compile(r"Gemma\w*RMSNorm")
_UNIQUE = None, None
NO_INPUTS = "none"
"""How a site was computed whose module has no inputs: from what the host passed."""


class Node(Struct, frozen=True, gc=False):
    """One matched site in execution order."""

    path: str
    port: str
    numeric: bool
    """Whether it was compared as rounded numbers."""
    has_params: bool = False
    """Whether the module has parameters of its own: then it is one operation."""
    cls: str = ""
    """Class of the module; empty where neither run recorded it."""
    is_trained: bool = False
    """Whether it is a parameter that optimizer steps updated: it is used in the step after that of its record."""
    has_no_inputs: bool = False
    """Whether it is an output, and both runs say that the calls of its module brought no tensors."""
    identities: tuple[object, object] = (None, None)
    """One key a run; two sites with equal keys hold the same bytes. None for bytes that no other site holds, except of
    gradients, and where the bytes are not known."""

    @property
    def is_backward(self) -> bool:
        """Whether it is a gradient."""
        return self.port.endswith(".grad")

    @property
    def is_summed(self) -> bool:
        """Whether it is the gradient of a parameter, a sum over token rows."""
        return self.is_backward and self.port.startswith("param[")

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter or a buffer."""
        return self.port.startswith(("param[", "buffer[")) and not self.is_backward

    @property
    def call(self) -> str:
        """Index of the call, for a module that is called several times in a step; empty for the first."""
        return self.port.removesuffix(".grad").partition("#")[2]

    @property
    def is_input(self) -> bool:
        """Whether the module received it: one of its inputs, or in the backward the gradient of an output."""
        return self.port.startswith("out" if self.is_backward else "in[")

    @property
    def convolves(self) -> bool:
        """Whether the module mixes the rows of an image or a signal, which are stored along its last axis."""
        return is_conv_class(self.cls) and not self.is_state and not self.is_summed

    @property
    def subtracts_mean(self) -> bool:
        """Whether it is the output of a norm that subtracts from each channel of an image or signal its mean."""
        return self.port.startswith("out") and is_conv_class(self.cls) and "Norm" in self.cls

    @property
    def has_offset_weight(self) -> bool:
        """Whether the module multiplies by 1 + weight."""
        return _OFFSET_WEIGHT.fullmatch(self.cls) is not None

    @property
    def is_pointwise(self) -> bool:
        """Whether the module computes each element from the same element of its input."""
        return not self.has_params and _is_pointwise(self.cls)


@lru_cache
def _is_pointwise(cls: str) -> bool:
    return _POINTWISE.search(cls) is not None


class Inputs(Struct, frozen=True, gc=False):
    """What a site was computed from."""

    nodes: tuple[int, ...]
    """Indices of the sites, in execution order."""
    source: str
    """Where they come from: ``captured``; ``submodules`` (also from sites inside the module); ``aliased`` (the bytes of
    an earlier site); ``enclosing_module`` (what that received and computed); ``preceding`` (the sites that fired
    before); ``none`` (the module has no inputs: the host passed what it returns); empty for nothing."""
    ops: int = 1
    """Roundings in sequence between those and the site."""


def make_nodes(pairs: Sequence[PairResult], params: Sequence[Params], sites: Mapping[str, SiteInfo]) -> list[Node]:
    """One node a site; ``params`` are the parameters of their modules, ``sites`` those of both runs."""
    gradients = [one.site.endswith(".grad") for one in pairs]
    left = _identities([one.pair.baseline for one in pairs], gradients)
    right = _identities([one.pair.target for one in pairs], gradients)
    each = zip(pairs, params, left, right, strict=True)
    return [_node(one, bool(own), sites, _UNIQUE if a is b is None else (a, b)) for one, own, a, b in each]


def _identities(series: Sequence[Series | None], gradients: Sequence[bool]) -> list[int | None]:
    """:attr:`Node.identities` of one run."""
    first: dict[Hashable, int] = {}
    firsts = [None if key is None else first.setdefault(key, i) for i, key in enumerate(_contents(series))]
    shared = {number for i, number in enumerate(firsts) if number != i}
    return [
        number if number in shared or is_gradient else None
        for number, is_gradient in zip(firsts, gradients, strict=True)
    ]


def _contents(series: Sequence[Series | None]) -> list[Hashable]:
    """:func:`content_id` of each series of a run, as bytes where all hashes are in columns."""
    words = [None if one is None else one.digest_words("hashes") for one in series]
    if any(one is not None and hashed is None for one, hashed in zip(series, words, strict=True)):
        return [content_id(one) for one in series]
    return [None if hashed is None else hashed.tobytes() for hashed in words]


def _node(
    result: PairResult, has_params: bool, sites: Mapping[str, SiteInfo], identities: tuple[int | None, int | None]
) -> Node:
    path, _, port = result.site.rpartition(":")
    numeric = not result.is_exact and result.has_distribution
    port = intern(port)  # there are few: one object for all sites
    return Node(
        path,
        port,
        numeric,
        has_params,
        _class_of(result, sites),
        bool(result.extras.parameter_updates),
        _has_no_inputs(result, sites),
        identities,
    )


def _has_no_inputs(result: PairResult, sites: Mapping[str, SiteInfo]) -> bool:
    infos = [sites.get(name) for name in result.names]
    return bool(infos) and all(info is not None and info.no_inputs for info in infos)


def _class_of(result: PairResult, sites: Mapping[str, SiteInfo]) -> str:
    for name in result.names:
        if (info := sites.get(name)) is not None and info.cls:
            return info.cls
    return ""
