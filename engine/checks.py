"""Checks that settings, parameters and the scheduler's own books share."""

from math import isfinite

from tapscope.errors import InvariantError, TapscopeError


def is_count(value: object) -> bool:
    """Whether it is a whole number above 0."""
    return type(value) is int and value > 0


def is_number(value: object) -> bool:
    """Whether it is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def require(error: type[TapscopeError], holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ``error`` with field, value and rule unless the rule ``holds``."""
    if not holds:
        raise error(f"{name}={value!r}: {rule}")


def add_up(where: str, holds: bool, message: str) -> None:
    """Raise InvariantError unless the books of ``where`` are in order."""
    if not holds:
        raise InvariantError(f"{where}: {message}")
