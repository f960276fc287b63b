"""RoutedExperts: which experts a request's positions went to, for training that replays a rollout's routing.

Rank 0 only: all ranks choose alike. Torch-free, as what front ends use must be.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tapscope.engine.plan import StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from tapscope.engine.request import Request


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Expert ids of neighbouring positions, in every layer; -1 in layers without experts."""

    shape: tuple[int, int, int]
    """Positions, layers, experts of each token."""
    data: bytes
    """int32, little-endian, in this order."""

    def array(self) -> npt.NDArray[np.int32]:
        """[positions, layers, k]."""
        return np.frombuffer(self.data, "<i4").reshape(self.shape)

    @property
    def text(self) -> str:
        """The data in base64, as SGLang gives it."""
        return base64.b64encode(self.data).decode("ascii")

    @classmethod
    def of_text(cls, shape: Sequence[int], text: str) -> "RoutedExperts":
        """The inverse of :attr:`text`."""
        positions, layers, top_k = shape
        return cls((positions, layers, top_k), base64.b64decode(text))

    def followed_by(self, later: "RoutedExperts | None") -> "RoutedExperts":
        """Both as one."""
        if later is None:
            return self
        return replace(self, shape=(self.shape[0] + later.shape[0], *self.shape[1:]), data=self.data + later.data)


def joined(earlier: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """Both as one; None when there is neither."""
    return later if earlier is None else earlier.followed_by(later)


def route_step(plan: StepPlan, requests: Sequence["Request"], chosen: "Tensor") -> None:
    """Add a step's rows to the requests (one for each share) that ask for them.

    ``chosen`` is [rows, layers, k] int32 on the host. Positions that are computed again after a preemption are left
    out: they were told before.
    """
    for slot, share, request in zip(plan.slots, plan.shares, requests, strict=True):
        known = request.num_routed - share.position
        count = len(share.tokens)
        if not request.params.routed_experts or known >= count:
            continue
        assert known >= 0, f"positions {request.num_routed} to {share.position} of {request.id!r} were never computed"
        rows = chosen[slot + known : slot + count].numpy().astype("<i4")
        positions, layers, top_k = rows.shape
        request.routed = joined(request.routed, RoutedExperts((positions, layers, top_k), rows.tobytes()))
        request.num_routed = share.position + count
