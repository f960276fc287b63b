"""RootWrapper: a model may be called or forwarded; either way its root fires once."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


class RootWrapper:
    """Stands in for the root's forward, so that ``model(x)`` and ``model.forward(x)`` are both seen, once.

    A deep copy or a pickle of the model gets its own plain forward instead.
    """

    def __init__(
        self, model: nn.Module, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._model = model
        self._around = around
        self._had_own = "forward" in model.__dict__
        self._original = model.forward
        self._active = True
        functools.update_wrapper(self, self._original)  # its signature is asked for, by generate() for one
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, watched."""
        return self._around(self._original, args, kwargs) if self._active else self._original(*args, **kwargs)

    def remove(self) -> None:
        """Give the forward back; a wrapper that someone else put around ours is left alone."""
        self._active = False
        if self._model.__dict__.get("forward") is not self:
            return
        if self._had_own:
            self._model.forward = self._original
        else:
            del self._model.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._had_own:
            return copy.deepcopy(self._original, memo)
        return types.MethodType(type(self._model).forward, memo.get(id(self._model), self._model))

    def __reduce__(self) -> tuple[Any, ...]:
        return types.MethodType, (type(self._model).forward, self._model)
