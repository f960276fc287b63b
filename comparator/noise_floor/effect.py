"""Effect: one named cause of rounding error, with the sites that it applies to and what it contributes there."""

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
    """What the contribution of an effect is."""

    ERROR = "error"
    """An error relative to the row; errors of one site add up in quadrature."""
    FACTOR = "factor"
    """A factor on the errors of the inputs, or on the limits of some tests."""


class Effect(ABC, Generic[V]):
    """One named effect. Subclasses fill :attr:`values`, and say what these mean."""

    name: ClassVar[str]
    unit: ClassVar[Unit] = Unit.ERROR
    is_optional: ClassVar[bool] = True
    """Whether a floor still makes sense without it, so that an ablation may switch it off."""
    is_sum: ClassVar[bool] = False
    """Whether it only adds up what effects before it contribute."""

    def __init__(self, inputs: "FloorInputs", effects: "EffectTable", *, is_enabled: bool = True) -> None:
        """``effects`` holds those before it in the table. An effect that is not enabled applies to no site."""
        self.inputs, self.effects, self.is_enabled = inputs, effects, is_enabled
        self.values: Mapping[int, V] = self.find() if is_enabled else {}
        """Node -> what it contributes there; nodes that it does not apply to are left out."""

    @abstractmethod
    def find(self) -> Mapping[int, V]:
        """Node -> what it contributes there, for the nodes that it applies to."""

    def applies(self, node: int) -> bool:
        """Whether it contributes to the floor of a node."""
        return node in self.values

    def contribution(self, node: int) -> float:
        """Size of the contribution to a node, in :attr:`unit`."""
        return size_of(self.values[node])

    @abstractmethod
    def explain(self, node: int) -> str:
        """One sentence on why it applies to a node, with the numbers that it was computed from."""


class EffectTable:
    """The effects of one comparison, by class, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: dict[type[Effect[Any]], Effect[Any]] = {}

    def add(self, effect: Effect[Any]) -> None:
        """Append an effect."""
        self._made[type(effect)] = effect

    def __getitem__(self, kind: type[E]) -> E:
        """The effect of a class."""
        return self._made[kind]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Effect[Any]]:
        """In order."""
        return iter(self._made.values())

    def applying(self, node: int) -> list[Effect[Any]]:
        """The effects that contribute to the floor of a node, in order."""
        return [effect for effect in self if effect.applies(node)]


def size_of(value: Any) -> float:
    """The largest number in a value: a number, a spread, or a sequence of either."""
    if isinstance(value, ErrorDistribution):
        return value.errors[-1]
    if isinstance(value, Sequence):
        return max(map(size_of, value), default=0.0)
    return float(value)
