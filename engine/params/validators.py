"""Checks that settings, parameters and the scheduler's own books share."""

from sys import float_info

from tapscope.core.errors import InvariantError


def is_number(value: object) -> bool:
    """Whether it is a number that a float can hold, and finite; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def require_invariant(where: str, holds: bool, message: str) -> None:
    """Raise InvariantError unless the books of ``where`` are in order."""
    if not holds:
        raise InvariantError(f"{where}: {message}")
