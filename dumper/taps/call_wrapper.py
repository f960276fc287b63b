"""CallWrapper: one wrapper around a module's method, shared by all watchers of that method."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from tapscope.dumper.taps.module_tree import is_compiled_in_place

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Watcher: called with the inner method, its args and its kwargs; must return the method's result."""
COMPILED = "_compiled_call_impl"
"""Attribute where ``module.compile()`` stores the compiled graph that replaces hooks and forward."""


class CallWrapper:
    """Replacement for a module's method that calls watchers around the original.

    Wrapping ``forward`` observes ``model(x)`` and ``model.forward(x)`` alike, exactly once. For a module compiled in
    place, the wrapper replaces the compiled graph, which skips the module's hooks.

    One wrapper serves all watchers of a method. Watchers can be added and removed in any order; removing the last one
    restores the original method. The replacement is a bound method with the original signature, for code that inspects
    it (``torch.export``, ``forward.__func__``). Only the module may hold a strong reference to the wrapper: any other
    would keep the module alive.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self._had_own = name in module.__dict__
        self._original = getattr(module, name)
        self._module = module
        self._watchers: list[Around] = []
        self.method = types.MethodType(_stand_in(self), module)
        setattr(module, name, self.method)

    def __call__(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the original method inside all watchers, the last one outermost.

        If ``owner`` is a copy of the module, only calls the original method, bound to the copy.
        """
        method = self._original
        if owner is not self._module:
            bound = getattr(method, "__func__", None)
            return method(*args, **kwargs) if bound is None else bound(owner, *args, **kwargs)
        for around in self._watchers:
            method = _WatchedMethod(around, method)
        return method(*args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The original method."""
        original: Callable[..., Any] = self._original
        return original

    @property
    def had_own(self) -> bool:
        """Whether the original method is an attribute of the instance rather than of its class."""
        return self._had_own

    def add(self, around: Around, *, innermost: bool = False) -> None:
        """Add a watcher, outside (or with ``innermost``, inside) the existing ones."""
        self._watchers = [around, *self._watchers] if innermost else [*self._watchers, around]

    def remove(self, around: Around) -> None:
        """Remove a watcher; removing the last one restores the original method, unless other code wrapped ours."""
        # Build a new list: a call in progress keeps iterating over the old one.
        self._watchers = [each for each in self._watchers if each != around]
        module = self._module
        if self._watchers or module.__dict__.get(self.name) is not self.method:
            return
        if self._had_own:
            setattr(module, self.name, self._original)
        else:
            delattr(module, self.name)


class _WatchedMethod:
    """The method as passed to the next outer watcher: ``around`` applied to the inner ``method``."""

    __slots__ = ("_around", "_method")

    def __init__(self, around: Around, method: Callable[..., Any]) -> None:
        self._around = around
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._method, args, kwargs)


def watch_calls(module: nn.Module, around: Around, *, innermost: bool = False, method: str = "") -> CallWrapper:
    """Add ``around`` as a watcher of the module's calls, or of its method ``method``; returns the wrapper."""
    name = method or (COMPILED if is_compiled_in_place(module) else "forward")
    wrapper = wrapper_in(module, name) or CallWrapper(module, name)
    wrapper.add(around, innermost=innermost)
    return wrapper


def wrapper_in(module: nn.Module, name: str) -> CallWrapper | None:
    """Return the wrapper that currently replaces the method ``name`` of ``module``; None if there is no wrapper."""
    present = module.__dict__.get(name)
    wrapper = getattr(getattr(present, "__func__", None), "tapscope_wrapper", None)
    return wrapper if isinstance(wrapper, CallWrapper) and wrapper.method is present else None


def _stand_in(wrapper: CallWrapper) -> Callable[..., Any]:
    """Return a function that calls ``wrapper`` and has the name and signature of the original method."""

    def stand_in(owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(owner, *args, **kwargs)

    original = wrapper.original
    function = getattr(original, "__func__", None)
    functools.update_wrapper(stand_in, function or original, updated=())
    if function is None:  # not a bound method: its signature lacks the module, which stand_in() takes first
        del stand_in.__dict__["__wrapped__"]
        try:
            owner = inspect.Parameter("owner", inspect.Parameter.POSITIONAL_ONLY)
            parameters = [owner, *inspect.signature(original).parameters.values()]
            stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        except (ValueError, TypeError):  # a builtin without a signature: keep *args, **kwargs
            pass
    stand_in.tapscope_wrapper = wrapper  # type: ignore[attr-defined]
    return stand_in
