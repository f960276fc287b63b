"""StateCache: recurrent states of linear-attention layers on this rank, and one step's view of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class StateCache:
    """Slots of every recurrent layer: convolution windows in the compute dtype, matrices in float32.

    The last two slots are the *initial state*, zeros that are never written, and a *dummy slot* that padding writes to.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_slots: int,
        conv_shape: tuple[int, int],
        matrix_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """``conv_shape``: channels and positions of a window; ``matrix_shape``: heads, key and value features."""
        self.num_slots = num_slots
        self.initial, self.dummy = num_slots, num_slots + 1
        self._places = {layer: place for place, layer in enumerate(layers)}
        shape = (len(layers), num_slots + 2)
        self.windows = torch.zeros(*shape, *conv_shape, dtype=dtype, device=device)
        self.matrices = torch.zeros(*shape, *matrix_shape, dtype=torch.float32, device=device)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return windows [slots, channels, positions] and matrices [slots, heads, key, value] of ``layer``."""
        place = self._places[layer]
        return self.windows[place], self.matrices[place]


def slot_bytes(num_layers: int, conv_shape: tuple[int, int], matrix_shape: tuple[int, int, int], itemsize: int) -> int:
    """Return the bytes of one slot in ``num_layers`` layers; ``itemsize`` is that of the compute dtype."""
    heads, key, value = matrix_shape
    return num_layers * (conv_shape[0] * conv_shape[1] * itemsize + 4 * heads * key * value)


class StepStates:
    """Recurrent states that the requests of a step read and write."""

    def __init__(self, cache: StateCache, reads: Tensor, writes: Tensor) -> None:
        """``reads`` and ``writes``: the slot of each request, [requests]."""
        self._cache, self._reads, self._writes = cache, reads.to(torch.int64), writes.to(torch.int64)
        self.draft_slots: Mapping[int, Sequence[int]] = {}
        """Index of a request with trailing draft rows -> slots for the state after each draft."""

    def read(self, layer: int, requests: slice) -> tuple[Tensor, Tensor]:
        """Return copies of the window and matrix of each of ``requests`` before the step."""
        windows, matrices = self._cache.of(layer)
        slots = self._reads[requests]
        return windows.index_select(0, slots), matrices.index_select(0, slots)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of the window and matrix of each request after the step."""
        windows, matrices = self._cache.of(layer)
        return windows.index_select(0, self._writes), matrices.index_select(0, self._writes)

    def write(self, layer: int, requests: slice, window: Tensor, matrix: Tensor) -> None:
        """Store the window and matrix of ``requests`` after the step, [requests, ...] each.

        A request with drafts has 1 + drafts states: after its last row that is not a draft, and after each draft.
        """
        windows, matrices = self._cache.of(layer)
        slots = self._writes[requests]
        if drafts := self.draft_slots.get(requests.start):
            slots = torch.cat((slots, torch.tensor(drafts, dtype=slots.dtype, device=slots.device)))
        windows.index_copy_(0, slots, window)
        if matrices.numel():  # some layers have only windows
            matrices.index_copy_(0, slots, matrix)
