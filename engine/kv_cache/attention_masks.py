"""StepMasks: attention masks, made once per step and shared by all layers."""

from collections.abc import Callable, Hashable

from torch import Tensor

MAX_ELEMENTS = 1 << 26
"""Limit on the elements of one mask, and of all cached masks together."""


class StepMasks:
    """Cache of masks, up to :data:`MAX_ELEMENTS` elements in total; masks beyond it are rebuilt by every layer."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}
        self._num_elements = 0

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The mask for ``key``; ``make`` builds it if it is not cached."""
        mask = self._known.get(key)
        if mask is None:
            mask = make()
            if self._num_elements + mask.numel() <= MAX_ELEMENTS:
                self._known[key] = mask
                self._num_elements += mask.numel()
        return mask
