"""RootWrapper: a model may be called or forwarded; either way its root fires once for everyone who watches it."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with the plain forward, its arguments and its keyword arguments; must give what the forward gives."""


class RootWrapper:
    """Stands in for the root's forward, so that ``model(x)`` and ``model.forward(x)`` are both seen, once.

    One wrapper serves all who watch a model, so that they may come and go in any order; the last to go gives the plain
    forward back. A deep copy or a pickle of the model gets its own plain forward instead. The wrapper belongs to the
    model: whoever else held it would keep the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._had_own = "forward" in model.__dict__
        self._original = model.forward
        self._model = model
        self._arounds: list[Around] = []
        functools.update_wrapper(self, self._original)  # its signature is asked for, by generate() for one
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, watched; who came last is outermost."""
        forward = self._original
        for around in self._arounds:
            forward = _Inside(around, forward)
        return forward(*args, **kwargs)

    def remove(self, around: Around) -> None:
        """Let go; the last to go gives the forward back. A wrapper that someone else put around ours is left alone."""
        # A new list: a call that is under way goes on with the one it began with.
        self._arounds = [each for each in self._arounds if each != around]
        model = self._model
        if self._arounds or model.__dict__.get("forward") is not self:
            return
        if self._had_own:
            model.forward = self._original
        else:
            del model.forward

    def add(self, around: Around) -> None:
        """Watch from now on."""
        self._arounds = [*self._arounds, around]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._had_own:
            return copy.deepcopy(self._original, memo)
        return types.MethodType(type(self._model).forward, memo.get(id(self._model), self._model))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_itself, (self._original,)) if self._had_own else (getattr, (self._model, "forward"))


class _Inside:
    """The forward as one watcher sees it."""

    __slots__ = ("_around", "_forward")

    def __init__(self, around: Around, forward: Callable[..., Any]) -> None:
        self._around = around
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._forward, args, kwargs)


def wrap_root(model: nn.Module, around: Around) -> RootWrapper:
    """Put ``around`` around the model's forward, with those that are there already."""
    present = model.__dict__.get("forward")
    wrapper = present if isinstance(present, RootWrapper) else RootWrapper(model)
    wrapper.add(around)
    return wrapper


def _itself(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a wrapper becomes in a pickle of a model that had a forward of its own."""
    return original
