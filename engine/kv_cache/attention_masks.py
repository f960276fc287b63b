"""StepMasks: what rows see of their keys, made once a step and read by every layer."""

from collections.abc import Callable, Hashable

from torch import Tensor

MOST_ELEMENTS = 1 << 26
"""Of one mask, and of all that are kept."""


class StepMasks:
    """Keeps masks as long as they have :data:`MOST_ELEMENTS` together; the others are made for every layer."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}
        self._num_elements = 0

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The mask called ``key``, made by ``make`` where it is not kept."""
        mask = self._known.get(key)
        if mask is None:
            mask = make()
            if self._num_elements + mask.numel() <= MOST_ELEMENTS:
                self._known[key] = mask
                self._num_elements += mask.numel()
        return mask
