"""Traced: taps that torch.compile has read into a graph, which runs without them."""

import itertools

from tapscope.dumper.job.compiled_regions import at_compile_time

_numbers = itertools.count()
_traced: set[str] = set()


def new_key() -> str:
    """A name for one tap, which torch.compile takes for a constant."""
    return str(next(_numbers))


def _note(key: str) -> bool:
    _traced.add(key)
    return True


note = at_compile_time(_note)
"""Say, where the model's code is being traced, that the graph leaves out the tap of this key."""


def is_traced(key: str) -> bool:
    """Whether a graph was made that leaves the tap out."""
    return key in _traced
