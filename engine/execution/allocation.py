"""allocating: an allocation that does not fit into memory is one sentence that names what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapscope.core.errors import ConfigError

_MESSAGES = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""Of torch's errors on a CPU, which have no class of their own."""


@contextmanager
def allocating(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Raise ConfigError if the block runs out of memory of ``device`` or of the host; other errors pass through.

    ``what`` needs the memory, such as "the KV cache"; ``remedy`` says what would work.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_full and not any(message in str(error) for message in _MESSAGES):
            raise
        raise ConfigError(f"{what} does not fit into the free memory of {device}; {remedy}") from None
