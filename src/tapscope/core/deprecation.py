"""Deprecated names of settings, arguments and flags: accepted for one release, each with one warning."""

import argparse
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from tapscope.core.errors import TapscopeError, UsageError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_DEPRECATED_ATTRIBUTES: dict[type, Mapping[str, str]] = {}


def renamed(
    values: Mapping[str, Any], names: Mapping[str, str], error: type[TapscopeError] = UsageError, stacklevel: int = 2
) -> dict[str, Any]:
    """Return ``values`` with deprecated names replaced by current ones; ``names`` maps deprecated to current names.

    Each deprecated name issues a FutureWarning, which Python shows once per call site. Raises ``error`` if a value is
    given under both names.
    """
    result = dict(values)
    for old in names.keys() & result.keys():
        new = names[old]
        if new in result:
            raise error(f"{old!r} is the deprecated name of {new!r}; give {new!r} only")
        warnings.warn(f"{old!r} is deprecated, use {new!r}", FutureWarning, stacklevel=stacklevel + 1)
        result[new] = result.pop(old)
    return result


def deprecated_arguments(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts deprecated keyword arguments; ``names`` maps deprecated to current names."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accept(*args: P.args, **kwargs: P.kwargs) -> R:
            if not names.keys().isdisjoint(kwargs):
                return function(*args, **renamed(kwargs, names))
            return function(*args, **kwargs)

        return accept

    return decorate


def deprecated_fields(names: Mapping[str, str]) -> Callable[[C], C]:
    """Return a decorator for dataclasses that accepts and exposes deprecated field names; ``names`` maps them to
    current ones."""

    def decorate(cls: C) -> C:
        initializer = functools.partial(setattr, cls, "__init__")
        initializer(deprecated_arguments(names)(cls.__init__))  # type: ignore[misc]
        for old, new in names.items():
            setattr(cls, old, _alias(old, new))
        return cls

    return decorate


def _alias(old: str, new: str) -> property:
    """Return a read-only property that warns and returns the attribute ``new``."""

    def read(instance: object) -> Any:
        warnings.warn(f"{old!r} is deprecated, use {new!r}", FutureWarning, stacklevel=2)
        return getattr(instance, new)

    return property(read, doc=f"Deprecated name of :attr:`{new}`.")


def deprecated_attributes(names: Mapping[str, str]) -> Callable[[C], C]:
    """Return a class decorator that adds deprecated attribute names; ``names`` maps them to current ones."""

    def decorate(cls: C) -> C:
        for old, new in names.items():
            setattr(cls, old, _alias(old, new))
        _DEPRECATED_ATTRIBUTES[cls] = names
        return cls

    return decorate


def deprecated_names_of(cls: type) -> Mapping[str, str]:
    """Return the deprecated -> current attribute names that :func:`deprecated_attributes` declared for ``cls``; may be
    empty."""
    return _DEPRECATED_ATTRIBUTES.get(cls, {})


def deprecated_flag(parser: argparse._ActionsContainer, old: str, new: argparse.Action) -> None:
    """Accept the deprecated flag ``old`` as an alias of the action ``new``, hidden from the help."""

    class Deprecated(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            warnings.warn(f"{old} is deprecated, use {new.option_strings[0]}", FutureWarning, stacklevel=2)
            new(parser, namespace, values, option_string)

    kind: Any = new.type
    parser.add_argument(
        old,
        action=Deprecated,
        dest=new.dest,
        nargs=new.nargs,
        type=kind,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
