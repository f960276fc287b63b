"""allocating, computing: what does not fit into memory is one sentence that names what to change.

keep_freed_memory: the host's allocator keeps the memory of one step for the next.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapscope.core.errors import ConfigError, OutOfMemoryError
from tapscope.engine.requests.step_plan import StepPlan

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
        if not _is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} does not fit into the free memory of {device}; {remedy}") from None


@contextmanager
def computing(plan: StepPlan, device: torch.device, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the block, a part of the step ``plan``, runs out of memory, as :func:`allocating`.

    The tensors of the failed step are freed, although the error's cause refers to the code that held them.
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
    """Make glibc's allocator keep freed memory of one step for the next one.

    By default it returns blocks larger than the largest block freed so far, up to 32 MiB, to the system; fresh pages
    then cost a step of a long prompt up to a tenth of its time. Freeing one block of that size once raises the
    threshold. This has no effect with MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or other allocators.
    """
    torch.empty((32 << 20) - (1 << 13), dtype=torch.uint8)  # untouched: it takes no memory


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_full or any(message in str(error) for message in _MESSAGES)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
