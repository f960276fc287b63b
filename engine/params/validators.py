"""Checks that settings, parameters and the scheduler's own books share."""

from sys import float_info

from tapscope.core.errors import InvariantError, TapscopeError
from tapscope.core.formatting import short


def is_positive_int(value: object) -> bool:
    """Whether it is a whole number above 0."""
    return type(value) is int and value > 0


def is_number(value: object) -> bool:
    """Whether it is a number that a float can hold, and finite; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def require(error: type[TapscopeError], holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ``error`` with field, value and rule unless the rule ``holds``."""
    if not holds:
        raise error(f"{name}={short(value, 200)}: {rule}")


def require_invariant(where: str, holds: bool, message: str) -> None:
    """Raise InvariantError unless the books of ``where`` are in order."""
    if not holds:
        raise InvariantError(f"{where}: {message}")
