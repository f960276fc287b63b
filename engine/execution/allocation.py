"""allocating, computing: turn out-of-memory errors into one sentence that names the setting to change.

keep_freed_memory: make the host allocator keep the memory of one step for the next.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapscope.core.errors import ConfigError, OutOfMemoryError
from tapscope.engine.requests.step_plan import StepPlan

_MESSAGES = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""Messages of torch's CPU out-of-memory errors, which have no exception class of their own."""


@contextmanager
def allocating(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Raise ConfigError if the block runs out of memory of ``device`` or of the host; other errors propagate.

    ``what`` names the allocation, for example "the KV cache"; ``remedy`` names the change that helps.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} does not fit into the free memory of {device}; {remedy}") from None


@contextmanager
def computing(plan: StepPlan, device: torch.device, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the block, a part of the step ``plan``, runs out of memory; see :func:`allocating`.

    The tensors of the failed step are freed, although the error's cause refers to the frames that held the tensors.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError) or not _is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        size = f"{_count(plan.num_tokens, 'row')} of {_count(len(plan.scheduled), 'request')}"
        raise OutOfMemoryError(f"a step failed: {device} has too little free memory for {size}; {remedy}") from error


def keep_freed_memory() -> None:
    """Make glibc's allocator keep the memory freed by one step for the next step.

    By default glibc returns blocks larger than the largest block freed so far, up to 32 MiB, to the system. Faulting in
    fresh pages then costs a step of a long prompt up to a tenth of its time. Freeing one block of that size once raises
    the threshold. This has no effect with MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or other allocators.
    """
    torch.empty((32 << 20) - (1 << 13), dtype=torch.uint8)  # never written, so that no page is allocated


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_full or any(message in str(error) for message in _MESSAGES)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
