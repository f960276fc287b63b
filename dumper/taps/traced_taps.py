"""Traced taps: taps that torch.compile has traced into a graph, which runs without them."""

import itertools

from tapscope.dumper.job.compiled_regions import at_compile_time

_numbers = itertools.count()
_traced: set[str] = set()


def new_key() -> str:
    """A key for one tap that torch.compile treats as a constant."""
    return str(next(_numbers))


def _note(key: str) -> bool:
    _traced.add(key)
    return True


note = at_compile_time(_note)
"""Note, while the model's code is being traced, that the graph omits the tap of this key."""


def is_traced(key: str) -> bool:
    """Whether a graph omits the tap."""
    return key in _traced
