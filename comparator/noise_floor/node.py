"""Nodes of the dataflow graph, one per matched site, and their inputs."""

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
"""Source of a site whose module has no inputs: the host passed the values."""


class Node(Struct, frozen=True, gc=False):
    """One matched site in execution order."""

    path: str
    port: str
    numeric: bool
    """Whether the site was compared as rounded numbers."""
    has_params: bool = False
    """Whether the module has parameters of its own, so that it is a single operation."""
    cls: str = ""
    """Class of the module; empty if neither run recorded it."""
    is_trained: bool = False
    """Whether the site is a parameter that optimizer steps updated; it is used in the step after that of its record."""
    has_no_inputs: bool = False
    """Whether the site is an output, and both runs report that its module was called without tensors."""
    identities: tuple[object, object] = (None, None)
    """One key per run; sites with equal keys have the same bytes. None if the bytes are unknown, or, except for
    gradients, if no other site has the same bytes."""

    @property
    def is_backward(self) -> bool:
        """Whether the site is a gradient."""
        return self.port.endswith(".grad")

    @property
    def is_summed(self) -> bool:
        """Whether the site is the gradient of a parameter, a sum over token rows."""
        return self.is_backward and self.port.startswith("param[")

    @property
    def is_state(self) -> bool:
        """Whether the site is a parameter or a buffer."""
        return self.port.startswith(("param[", "buffer[")) and not self.is_backward

    @property
    def call(self) -> str:
        """Index of the call, for a module that is called several times in a step; empty for the first call."""
        return self.port.removesuffix(".grad").partition("#")[2]

    @property
    def is_input(self) -> bool:
        """Whether the module received the value: one of its inputs, or in the backward the gradient of an output."""
        return self.port.startswith("out" if self.is_backward else "in[")

    @property
    def convolves(self) -> bool:
        """Whether the module mixes the rows of an image or a signal, which are stored along its last axis."""
        return is_conv_class(self.cls) and not self.is_state and not self.is_summed

    @property
    def subtracts_mean(self) -> bool:
        """Whether the site is the output of a norm that subtracts the mean of each channel of an image or signal."""
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
    """The inputs from which a site was computed."""

    nodes: tuple[int, ...]
    """Indices of the input sites, in execution order."""
    source: str
    """How the inputs were found: ``captured``; ``submodules`` (also sites inside the module); ``aliased`` (an earlier
    site with the same bytes); ``enclosing_module`` (values that the enclosing module received and computed);
    ``preceding`` (sites that fired before); ``none`` (the module has no inputs: the host passed the values that it
    returns); empty if there are no inputs.
    """
    ops: int = 1
    """Number of sequential roundings between the inputs and the site."""


def make_nodes(pairs: Sequence[PairResult], params: Sequence[Params], sites: Mapping[str, SiteInfo]) -> list[Node]:
    """Create one node per site; ``params`` are the parameters of their modules, ``sites`` the metadata of both runs."""
    gradients = [one.site.endswith(".grad") for one in pairs]
    left = _identities([one.pair.baseline for one in pairs], gradients)
    right = _identities([one.pair.target for one in pairs], gradients)
    each = zip(pairs, params, left, right, strict=True)
    return [_node(one, bool(own), sites, _UNIQUE if a is b is None else (a, b)) for one, own, a, b in each]


def _identities(series: Sequence[Series | None], gradients: Sequence[bool]) -> list[int | None]:
    """Compute :attr:`Node.identities` for one run."""
    first: dict[Hashable, int] = {}
    firsts = [None if key is None else first.setdefault(key, i) for i, key in enumerate(_contents(series))]
    shared = {number for i, number in enumerate(firsts) if number != i}
    return [
        number if number in shared or is_gradient else None
        for number, is_gradient in zip(firsts, gradients, strict=True)
    ]


def _contents(series: Sequence[Series | None]) -> list[Hashable]:
    """Return :func:`content_id` of each series of a run, as bytes if all hashes are in columns."""
    words = [None if one is None else one.digest_words("hashes") for one in series]
    if any(one is not None and hashed is None for one, hashed in zip(series, words, strict=True)):
        return [content_id(one) for one in series]
    return [None if hashed is None else hashed.tobytes() for hashed in words]


def _node(
    result: PairResult, has_params: bool, sites: Mapping[str, SiteInfo], identities: tuple[int | None, int | None]
) -> Node:
    path, _, port = result.site.rpartition(":")
    numeric = not result.is_exact and result.has_distribution
    port = intern(port)  # few distinct ports: share one object among all sites
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
