"""Pens: write the lines of records of which only statistics are kept, without a word of Python in between.

What a pen declines (a tensor that lies otherwise than the last one, that is not plain memory, a firing that is not the
first of its step) the taker takes, and so it does where there is no C++ library; the lines are the same.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tapscope import dtypes
from tapscope.dumper import capture
from tapscope.kernels.native import library, summary

if TYPE_CHECKING:
    from tapscope.dumper.port import Layout, Port
    from tapscope.dumper.steps import OpenStep

MANY = 64
"""Lines that wait in a pen at most: until then they are in nobody's account, and nobody can lose them but a crash."""


class Lines(NamedTuple):
    """Records on their way, as the text that will lie on disk."""

    text: bytes
    """Without the last newline."""
    number: int
    step: "OpenStep"


def make_pen(numbers: Iterator[int]) -> Any:
    """A pen that numbers its records by ``numbers``; None where there is no C++ library.

    ``begin(step)`` opens a step, ``write(stencil, tensor)`` adds a line and gives how many wait (0: it declines, and
    has written nothing), ``drain()`` gives (text, number) of those that wait.
    """
    functions = library.functions()
    if functions is None:
        return None
    return functions.pen(numbers, capture.PLAIN_TYPES, capture.keys_of, capture.HOST_KEYS)


def stencil_of(port: "Port", layout: "Layout") -> Any:
    """What the lines of ``port`` have in common while its tensors lie so; None where no pen can write them."""
    functions, plan = library.functions(), summary.plan_of(layout.dtype)
    if functions is None or plan is None or layout.dtype in dtypes.COMPLEX:  # may be conjugated lazily
        return None
    code, _, width = plan
    head, tail = f',"site":{port.site_text},"step":'.encode(), f"{port.model_text}{layout.text}".encode()
    return functions.stencil(head, tail, layout.kind, layout.size, layout.count, width, code)
