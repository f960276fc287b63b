"""Checks shared by settings, parameters and the scheduler's invariants."""

from sys import float_info

from tapscope.core.errors import InvariantError


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite int or float in the range of a float; bools are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def require_invariant(where: str, holds: bool, message: str) -> None:
    """Raise InvariantError, naming ``where``, unless the invariant ``holds``."""
    if not holds:
        raise InvariantError(f"{where}: {message}")
