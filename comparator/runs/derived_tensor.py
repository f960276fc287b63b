"""Derived tensors: how to compute a value of one run from values that the other run recorded whole, in parts or as
partial sums."""

from msgspec import Struct


class FusedLayout(Struct, frozen=True):
    """The parts of a fused tensor along one axis."""

    parts: tuple[str, ...]
    """Names of the parts in their plain order, e.g. ``("q_proj", "k_proj", "v_proj")``."""
    axis: int = -1
    """Tensor axis of the parts: the last axis for activations, 0 for weights and biases."""
    sizes: tuple[int, ...] = ()
    """Number of features of each part in the whole tensor, over all ranks; empty if unknown."""
    groups: int = 1
    """How often the sequence of all parts repeats: the number of key/value heads in Megatron's grouped order."""
    problem: str = ""
    """Why the tensor cannot be split, and what would help; empty if it can."""


class FusedPart(Struct, frozen=True):
    """One part of a fused tensor, or (``index`` None) all parts in plain order."""

    fused: FusedLayout
    index: int | None = None


class ConcatParts(Struct, frozen=True):
    """The parts concatenated in plain order."""

    fused: FusedLayout


class SumOfSites(Struct, frozen=True):
    """The sum of several values, accumulated in float32 or wider: a hidden state and the residual that a later norm
    adds."""


Derivation = FusedPart | ConcatParts | SumOfSites
