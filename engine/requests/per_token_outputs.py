"""PerTokenOutputs: optional outputs per computed position: routed experts and final hidden states.

Collected on rank 0 only: all ranks route identically and have the full hidden states. Torch-free, as front ends use
this module.
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
    """NumPy dtype, including the byte order."""
    shape: tuple[int, ...]
    """[positions, ...shape of one position's values]."""
    pieces: tuple[bytes, ...]
    """Bytes of the values in C order, as chunks to be concatenated."""

    @property
    def data(self) -> bytes:
        """The values as one bytes object."""
        return b"".join(self.pieces)

    def array(self) -> npt.NDArray[Any]:
        """Return the values as an array of :attr:`shape`."""
        return np.frombuffer(self.data, self.DTYPE).reshape(self.shape)

    @property
    def text(self) -> str:
        """:attr:`data` in base64, as in SGLang's API."""
        return base64.b64encode(self.data).decode("ascii")

    @classmethod
    def from_base64(cls, shape: Sequence[int], text: str) -> Self:
        """Build from :attr:`shape` and :attr:`text`."""
        return cls(tuple(shape), (base64.b64decode(text),))

    @classmethod
    def from_rows(cls, rows: npt.NDArray[Any]) -> Self:
        """Build from an array [positions, ...] of any dtype convertible to ``DTYPE``."""
        return cls(rows.shape, (rows.astype(cls.DTYPE).tobytes(),))

    def followed_by(self, later: Self | None) -> Self:
        """Return these values followed by ``later``."""
        if later is None:
            return self
        return replace(self, shape=(self.shape[0] + later.shape[0], *self.shape[1:]), pieces=self.pieces + later.pieces)


class RoutedExperts(PerTokenOutputs):
    """Routed expert ids, [positions, layers, k]; -1 in layers without experts."""

    __slots__ = ()
    DTYPE = "<i4"


class HiddenStates(PerTokenOutputs):
    """Hidden states after the final norm, [positions, hidden]."""

    __slots__ = ()
    DTYPE = "<f4"


V = TypeVar("V", bound=PerTokenOutputs)


def joined(earlier: V | None, later: V | None) -> V | None:
    """Return ``earlier`` followed by ``later``; None if both are None."""
    return later if earlier is None else earlier.followed_by(later)


class UnsentOutputs(Generic[V]):
    """Buffer for the values of one request that were not returned in an output yet."""

    def __init__(self, kind: type[V]) -> None:
        self._kind = kind
        self._values: V | None = None
        self._count = 0  # number of leading positions that were returned or are in _values

    def add(self, position: int, rows: "Tensor") -> None:
        """Add ``rows`` [positions, ...], starting at ``position``; rows added before a preemption are skipped."""
        known = self._count - position
        if known >= len(rows):
            return
        assert known >= 0, f"positions {self._count} to {position} were never computed"
        self._values = joined(self._values, self._kind.from_rows(rows[known:].numpy()))
        self._count = position + len(rows)

    def take(self) -> V | None:
        """Return and clear the buffered values; None if there are none."""
        values, self._values = self._values, None
        return values


def collect_step_outputs(
    plan: StepPlan, unsent: Iterable["UnsentOutputs[V] | None"], accepted: Iterable[Sequence[int]], values: "Tensor"
) -> None:
    """Distribute a step's rows ``values`` [rows, ...] (on the host) to the buffers of the scheduled requests.

    ``unsent`` has one buffer per scheduled request; None: the request does not return the values. ``accepted`` has the
    indices of each request's accepted drafts; rows of rejected drafts are dropped.
    """
    for slot, item, wanted, drafts in zip(plan.slots, plan.scheduled, unsent, accepted, strict=True):
        if wanted is not None:
            known = len(item.tokens) - item.num_drafts
            wanted.add(item.position, values[[slot + row for row in (*range(known), *(known + i for i in drafts))]])
