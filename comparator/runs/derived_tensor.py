"""Derived tensors: how a value that one run recorded whole, in parts or as partial sums follows from the other
run's."""

from msgspec import Struct


class FusedLayout(Struct, frozen=True):
    """The parts of a fused tensor, along one axis."""

    parts: tuple[str, ...]
    """Names of the parts in their plain order, e.g. ``("q_proj", "k_proj", "v_proj")``."""
    axis: int = -1
    """Tensor axis: the last for activations, 0 for weights and biases."""
    sizes: tuple[int, ...] = ()
    """Features of each part in the whole tensor, over all ranks; empty if unknown."""
    groups: int = 1
    """Number of repetitions of all parts: the number of key/value heads in Megatron's grouped order."""
    problem: str = ""
    """Why it cannot be split, and what would help."""


class FusedPart(Struct, frozen=True):
    """One part of a fused tensor, or all parts in plain order."""

    fused: FusedLayout
    index: int | None = None


class ConcatParts(Struct, frozen=True):
    """Parts concatenated in plain order."""

    fused: FusedLayout


class SumOfSites(Struct, frozen=True):
    """The sum of several values, in float32 or wider: a hidden state and the residual that a later norm adds to it."""


Derivation = FusedPart | ConcatParts | SumOfSites
