"""Patching: applies a case's ``patch`` for one run."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Patch = Callable[[Any], Any]
"""Changes a model (or a dict of weights) in place; may return a context manager, or be a generator that yields once."""


@contextmanager
def applied(patch: Patch | None, subject: Any) -> Iterator[None]:
    """Context manager: apply ``patch(subject)``, and exit the patch's own context manager at the end."""
    if patch is None:
        yield
        return
    given = contextmanager(patch)(subject) if inspect.isgeneratorfunction(patch) else patch(subject)
    if hasattr(given, "__enter__"):
        with given:
            yield
    else:
        yield
