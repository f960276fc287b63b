"""PerTokenOutputs: values of a request's computed positions, on request: routed experts, final hidden states.

Rank 0 only, since all ranks route alike and hold whole hidden states. Torch-free, as front ends use it.
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
    """Values of consecutive positions of one request."""

    DTYPE: ClassVar[str]
    """NumPy dtype with byte order."""
    shape: tuple[int, ...]
    """[positions, ...shape of one position's values]."""
    pieces: tuple[bytes, ...]
    """The values in C order, split anywhere."""

    @property
    def data(self) -> bytes:
        """The values as bytes."""
        return b"".join(self.pieces)

    def array(self) -> npt.NDArray[Any]:
        """The values, of :attr:`shape`."""
        return np.frombuffer(self.data, self.DTYPE).reshape(self.shape)

    @property
    def text(self) -> str:
        """The data in base64, as SGLang encodes it."""
        return base64.b64encode(self.data).decode("ascii")

    @classmethod
    def from_base64(cls, shape: Sequence[int], text: str) -> Self:
        """The inverse of :attr:`shape` and :attr:`text`."""
        return cls(tuple(shape), (base64.b64decode(text),))

    @classmethod
    def from_rows(cls, rows: npt.NDArray[Any]) -> Self:
        """From an array ``rows`` of any convertible dtype."""
        return cls(rows.shape, (rows.astype(cls.DTYPE).tobytes(),))

    def followed_by(self, later: Self | None) -> Self:
        """These values followed by ``later``."""
        if later is None:
            return self
        return replace(self, shape=(self.shape[0] + later.shape[0], *self.shape[1:]), pieces=self.pieces + later.pieces)


class RoutedExperts(PerTokenOutputs):
    """Expert ids in every layer, [positions, layers, k]; -1 in layers without experts."""

    __slots__ = ()
    DTYPE = "<i4"


class HiddenStates(PerTokenOutputs):
    """Final hidden states after the norm, [positions, hidden]."""

    __slots__ = ()
    DTYPE = "<f4"


V = TypeVar("V", bound=PerTokenOutputs)


def joined(earlier: V | None, later: V | None) -> V | None:
    """``earlier`` followed by ``later``; None when both are None."""
    return later if earlier is None else earlier.followed_by(later)


class UnsentOutputs(Generic[V]):
    """Values of one request that are not in an output yet."""

    def __init__(self, kind: type[V]) -> None:
        self._kind = kind
        self._values: V | None = None
        self._count = 0  # leading positions that were returned or are in _values

    def add(self, position: int, rows: "Tensor") -> None:
        """Add ``rows`` of the positions from ``position`` on, except those returned before a preemption."""
        known = self._count - position
        if known >= len(rows):
            return
        assert known >= 0, f"positions {self._count} to {position} were never computed"
        self._values = joined(self._values, self._kind.from_rows(rows[known:].numpy()))
        self._count = position + len(rows)

    def take(self) -> V | None:
        """Return the collected values and forget them."""
        values, self._values = self._values, None
        return values


def collect_step_outputs(
    plan: StepPlan, unsent: Iterable["UnsentOutputs[V] | None"], accepted: Iterable[Sequence[int]], values: "Tensor"
) -> None:
    """Add a step's rows to the requests, one for each scheduled request, that ask for them, except rejected drafts.

    ``accepted``: which drafts of each were accepted; ``values`` is [rows, ...] on the host.
    """
    for slot, item, wanted, drafts in zip(plan.slots, plan.scheduled, unsent, accepted, strict=True):
        if wanted is not None:
            known = len(item.tokens) - item.num_drafts
            wanted.add(item.position, values[[slot + row for row in (*range(known), *(known + i for i in drafts))]])
