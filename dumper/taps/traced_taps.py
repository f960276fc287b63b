"""Traced taps: taps whose hooks torch.compile has traced; the compiled graph no longer calls the hooks."""

import itertools

from tapscope.dumper.job.compiled_regions import at_compile_time

_numbers = itertools.count()
_traced: set[str] = set()


def new_key() -> str:
    """Return a unique key for a tap; torch.compile treats the string as a constant."""
    return str(next(_numbers))


def _note(key: str) -> bool:
    _traced.add(key)
    return True


note = at_compile_time(_note)
"""Record, while the model's code is being traced, that the graph omits the hook of the tap with this key."""


def is_traced(key: str) -> bool:
    """Return whether a compiled graph omits the hook of the tap ``key``."""
    return key in _traced
