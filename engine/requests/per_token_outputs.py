"""PositionValues: what was computed at a request's positions, told on demand: experts chosen, final hidden states.

Rank 0 only: all ranks choose alike and have hidden states whole. Torch-free, as what front ends use must be.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tapscope.engine.requests.step_plan import StepPlan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PerTokenOutputs:
    """Values of neighbouring positions of one request."""

    DTYPE: ClassVar[str]
    """numpy's, with the byte order."""
    shape: tuple[int, ...]
    """Positions, then the shape of a position's values."""
    pieces: tuple[bytes, ...]
    """The values in this order, cut anywhere."""

    @property
    def data(self) -> bytes:
        """The values as bytes."""
        return b"".join(self.pieces)

    def array(self) -> npt.NDArray[Any]:
        """The values, of :attr:`shape`."""
        return np.frombuffer(self.data, self.DTYPE).reshape(self.shape)

    @property
    def text(self) -> str:
        """The data in base64, as SGLang gives it."""
        return base64.b64encode(self.data).decode("ascii")

    @classmethod
    def from_base64(cls, shape: Sequence[int], text: str) -> Self:
        """The inverse of :attr:`shape` and :attr:`text`."""
        return cls(tuple(shape), (base64.b64decode(text),))

    @classmethod
    def from_rows(cls, rows: npt.NDArray[Any]) -> Self:
        """``rows``, of any type that converts."""
        return cls(rows.shape, (rows.astype(cls.DTYPE).tobytes(),))

    def followed_by(self, later: Self | None) -> Self:
        """Both as one."""
        if later is None:
            return self
        return replace(self, shape=(self.shape[0] + later.shape[0], *self.shape[1:]), pieces=self.pieces + later.pieces)


class RoutedExperts(PerTokenOutputs):
    """Expert ids in every layer, [positions, layers, k]; -1 in layers without experts."""

    __slots__ = ()
    DTYPE = "<i4"


class HiddenStates(PerTokenOutputs):
    """Final hidden states, behind the norm, [positions, hidden]."""

    __slots__ = ()
    DTYPE = "<f4"


V = TypeVar("V", bound=PerTokenOutputs)


def joined(earlier: V | None, later: V | None) -> V | None:
    """Both as one; None when there is neither."""
    return later if earlier is None else earlier.followed_by(later)


class UnsentOutputs(Generic[V]):
    """Values of one request that no output has told of yet."""

    def __init__(self, kind: type[V]) -> None:
        self._kind = kind
        self._values: V | None = None
        self._count = 0  # leading positions that were told, or are in _values

    def add(self, position: int, rows: "Tensor") -> None:
        """``rows`` of the positions from ``position`` on. What was told before a preemption is left out."""
        known = self._count - position
        if known >= len(rows):
            return
        assert known >= 0, f"positions {self._count} to {position} were never computed"
        self._values = joined(self._values, self._kind.from_rows(rows[known:].numpy()))
        self._count = position + len(rows)

    def take(self) -> V | None:
        """What is to be told now, once."""
        values, self._values = self._values, None
        return values


def collect_step_outputs(plan: StepPlan, unsent: Iterable["UnsentOutputs[V] | None"], values: "Tensor") -> None:
    """Add a step's rows to those of the requests, one for each share, that ask for them.

    ``values`` is [rows, ...] on the host.
    """
    for slot, item, wanted in zip(plan.slots, plan.scheduled, unsent, strict=True):
        if wanted is not None:
            wanted.add(item.position, values[slot : slot + len(item.tokens)])
