"""CallWrapper: wraps a method of a module once, for all its watchers."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from tapscope.dumper.taps.module_tree import is_compiled_in_place

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with the plain method, its arguments and its keyword arguments; must give what the method gives."""
COMPILED = "_compiled_call_impl"
"""Where ``module.compile()`` puts what a call runs in place of hooks and forward."""


class CallWrapper:
    """Stands in for ``forward``, so that ``model(x)`` and ``model.forward(x)`` are both seen, once; or for the graph of
    a module that was compiled in place, which leaves the module's hooks out.

    One wrapper serves all watchers of a module, which may be added and removed in any order; removing the last one
    restores the plain method. The module gets a bound method with the signature of the plain one, for code that
    inspects it (``torch.export``, ``forward.__func__``). Only the module holds the wrapper: another strong reference to
    it would keep the module alive.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self._had_own = name in module.__dict__
        self._original = getattr(module, name)
        self._module = module
        self._arounds: list[Around] = []
        self.method = types.MethodType(_stand_in(self), module)
        setattr(module, name, self.method)

    def __call__(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The plain method inside all watchers, the last one outermost; a copy of the module runs its own method."""
        method = self._original
        if owner is not self._module:
            bound = getattr(method, "__func__", None)
            return method(*args, **kwargs) if bound is None else bound(owner, *args, **kwargs)
        for around in self._arounds:
            method = _Inside(around, method)
        return method(*args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The plain method."""
        original: Callable[..., Any] = self._original
        return original

    @property
    def had_own(self) -> bool:
        """Whether the plain method is the module's own, and not that of its class."""
        return self._had_own

    def add(self, around: Around, *, innermost: bool = False) -> None:
        """Watch from now on, inside or outside of those that watch already."""
        self._arounds = [around, *self._arounds] if innermost else [*self._arounds, around]

    def remove(self, around: Around) -> None:
        """Stop watching; the last watcher restores the plain method, unless other code has wrapped ours."""
        # A new list: a call that is under way goes on with the one it began with.
        self._arounds = [each for each in self._arounds if each != around]
        module = self._module
        if self._arounds or module.__dict__.get(self.name) is not self.method:
            return
        if self._had_own:
            setattr(module, self.name, self._original)
        else:
            delattr(module, self.name)


class _Inside:
    """The method as one watcher sees it."""

    __slots__ = ("_around", "_method")

    def __init__(self, around: Around, method: Callable[..., Any]) -> None:
        self._around = around
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._method, args, kwargs)


def watch_calls(module: nn.Module, around: Around, *, innermost: bool = False, method: str = "") -> CallWrapper:
    """Put ``around`` around the calls of the module, or of one of its methods, with those that are there already."""
    name = method or (COMPILED if is_compiled_in_place(module) else "forward")
    wrapper = wrapper_in(module, name) or CallWrapper(module, name)
    wrapper.add(around, innermost=innermost)
    return wrapper


def wrapper_in(module: nn.Module, name: str) -> CallWrapper | None:
    """The wrapper that stands in for the method."""
    present = module.__dict__.get(name)
    wrapper = getattr(getattr(present, "__func__", None), "tapscope_wrapper", None)
    return wrapper if isinstance(wrapper, CallWrapper) and wrapper.method is present else None


def _stand_in(wrapper: CallWrapper) -> Callable[..., Any]:
    """A function that goes through ``wrapper`` and looks like the plain method."""

    def stand_in(owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(owner, *args, **kwargs)

    original = wrapper.original
    function = getattr(original, "__func__", None)
    functools.update_wrapper(stand_in, function or original, updated=())
    if function is None:  # called without the module, which its signature does not have
        del stand_in.__dict__["__wrapped__"]
        try:
            owner = inspect.Parameter("owner", inspect.Parameter.POSITIONAL_ONLY)
            parameters = [owner, *inspect.signature(original).parameters.values()]
            stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        except (ValueError, TypeError):  # a builtin without a signature: *args, **kwargs is what can be known
            pass
    stand_in.tapscope_wrapper = wrapper  # type: ignore[attr-defined]
    return stand_in
