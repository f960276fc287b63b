"""Tools for patches: change a module's computation so that its taps record the change."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from tapscope.dumper.steps.input_rows import CACHE_ARGUMENTS


def around(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the module's forward by ``call(forward, *args, **kwargs)``; hooks still fire around it."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: call(forward, *args, **kwargs)


def after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Replace the module's output by ``change(output)``."""
    around(module, lambda forward, *args, **kwargs: change(forward(*args, **kwargs)))


def cache_argument(model: nn.Module) -> str:
    """Return the name of a transformers model's KV cache argument, which was renamed in 5.24."""
    known = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), CACHE_ARGUMENTS[0])
