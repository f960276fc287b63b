"""Node: one matched site as the graph sees it, and what went into it."""

import re
from functools import lru_cache

from msgspec import Struct

from tapscope.comparator.metrics.images import convolves

_POINTWISE = re.compile(r"(?i)act|[gs]elu|silu|swish|mish|sigmoid|tanh|softplus|dropout|identity")
_OFFSET = re.compile(r"Gemma\w*RMSNorm")


class Node(Struct, frozen=True, gc=False):
    """One matched site in execution order."""

    path: str
    port: str
    numeric: bool
    """Whether it was compared as rounded numbers."""
    has_params: bool = False
    """Whether the module has parameters of its own: then it is one operation."""
    cls: str = ""
    """Class of the module, where known."""
    is_trained: bool = False
    """Whether it is a parameter that steps of an optimizer moved: it is used in the step after that of its record."""
    identities: tuple[object, object] = (None, None)
    """What is equal when the values of two sites are, one a run; None where that is not known, and of values that no
    other site holds, but for gradients, of which it matters that it is known."""

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
        """Which call of a module that is called several times in a step; empty for the first, see :mod:`.repeats`."""
        return self.port.removesuffix(".grad").partition("#")[2]

    @property
    def is_input(self) -> bool:
        """Whether this is what a module was given: its inputs, or going backward the gradients of its outputs."""
        return self.port.startswith("out" if self.is_backward else "in[")

    @property
    def convolves(self) -> bool:
        """Whether rows of an image or a signal, which lie along its last axis, are made of each other in the module."""
        return convolves(self.cls) and not self.is_state and not self.is_summed

    @property
    def is_offset(self) -> bool:
        """Whether the module multiplies by one more than its weight."""
        return _OFFSET.fullmatch(self.cls) is not None

    @property
    def is_pointwise(self) -> bool:
        """Whether the module works on each element by itself."""
        return not self.has_params and _is_pointwise(self.cls)


@lru_cache
def _is_pointwise(cls: str) -> bool:
    return _POINTWISE.search(cls) is not None


class Inputs(Struct, frozen=True, gc=False):
    """What went into a site."""

    nodes: tuple[int, ...]
    """Indices of the sites, in execution order."""
    how: str
    """``captured``, ``inside``, ``same`` (the bytes of an earlier site), ``around`` (what the enclosing module was
    given and made), ``before`` (whatever fired before); empty when nothing did."""
    ops: int = 1
    """Roundings in sequence between those and the site."""
