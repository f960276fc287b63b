"""Patching: how a case's ``patch`` is put in force for one run and taken back."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Patch = Callable[[Any], Any]
"""Changes a model (or a dict of weights) in place; may give a context manager, or be a generator that yields once."""


@contextmanager
def applied(patch: Patch | None, subject: Any) -> Iterator[None]:
    """``patch(subject)`` is in force inside; what it opened is closed behind."""
    if patch is None:
        yield
        return
    given = contextmanager(patch)(subject) if inspect.isgeneratorfunction(patch) else patch(subject)
    if hasattr(given, "__enter__"):
        with given:
            yield
    else:
        yield
