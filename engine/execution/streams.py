"""Access to the current stream of a GPU without creating a stream object in every step."""

from typing import Any

import torch

_known: dict[tuple[int, int], Any] = {}
_MAX_CACHED_STREAMS = 256
cuda: Any = torch.cuda  # parts of it have no type hints


def current_stream(index: int) -> Any:
    """Return ``torch.cuda.current_stream(index)`` from a cache, in a fifth of the time."""
    place = index, torch._C._cuda_getCurrentRawStream(index)
    found = _known.get(place)
    if found is None:
        if len(_known) >= _MAX_CACHED_STREAMS:
            _known.clear()
        found = _known[place] = cuda.current_stream(index)
    return found
