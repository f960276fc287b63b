"""Effect: one named cause of rounding error, with the sites that it affects and its contribution there."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tapscope.comparator.metrics.error_distribution import ErrorDistribution

if TYPE_CHECKING:
    from tapscope.comparator.noise_floor.floor_inputs import FloorInputs

V = TypeVar("V")
E = TypeVar("E", bound="Effect[Any]")


class Unit(StrEnum):
    """Unit of an effect's contribution."""

    ERROR = "error"
    """An error relative to the row; errors of one site add up in quadrature."""
    FACTOR = "factor"
    """A factor on the errors of the inputs, or on the limits of some tests."""


class Effect(ABC, Generic[V]):
    """One named effect. Subclasses compute :attr:`values`, and document their meaning."""

    name: ClassVar[str]
    unit: ClassVar[Unit] = Unit.ERROR
    is_optional: ClassVar[bool] = True
    """Whether a floor is still meaningful without the effect, so that an ablation may disable it."""
    is_sum: ClassVar[bool] = False
    """Whether the effect only sums contributions of earlier effects."""

    def __init__(self, inputs: "FloorInputs", effects: "EffectTable", *, is_enabled: bool = True) -> None:
        """Evaluate the effect for all nodes.

        ``effects`` contains the earlier effects of the table. A disabled effect applies to no site.
        """
        self.inputs, self.effects, self.is_enabled = inputs, effects, is_enabled
        self.values: Mapping[int, V] = self.find() if is_enabled else {}
        """Node -> contribution, without the nodes that the effect does not apply to."""

    @abstractmethod
    def find(self) -> Mapping[int, V]:
        """Compute the contributions: node -> contribution, for the nodes that the effect applies to."""

    def applies(self, node: int) -> bool:
        """Return whether the effect contributes to the floor of a node."""
        return node in self.values

    def contribution(self, node: int) -> float:
        """Return the size of the contribution to a node, in :attr:`unit`."""
        return size_of(self.values[node])

    @abstractmethod
    def explain(self, node: int) -> str:
        """Explain in one sentence why the effect applies to a node, with the numbers behind it."""


class EffectTable:
    """The effects of one comparison, by class, in evaluation order."""

    def __init__(self) -> None:
        self._made: dict[type[Effect[Any]], Effect[Any]] = {}

    def add(self, effect: Effect[Any]) -> None:
        """Append an effect."""
        self._made[type(effect)] = effect

    def __getitem__(self, kind: type[E]) -> E:
        """Return the effect of a class."""
        return self._made[kind]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Effect[Any]]:
        """Iterate over the effects in evaluation order."""
        return iter(self._made.values())

    def applying(self, node: int) -> list[Effect[Any]]:
        """Return the effects that contribute to the floor of a node, in order."""
        return [effect for effect in self if effect.applies(node)]


def size_of(value: Any) -> float:
    """Return the largest number in a value: a number, an error distribution, or a sequence of either."""
    if isinstance(value, ErrorDistribution):
        return value.errors[-1]
    if isinstance(value, Sequence):
        return max(map(size_of, value), default=0.0)
    return float(value)
