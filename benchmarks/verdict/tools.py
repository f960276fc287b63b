"""Tools for patches: change what a module computes so that its taps record the change."""

from collections.abc import Callable
from typing import Any

from torch import nn


def around(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the module's forward by ``call(forward, *args, **kwargs)``; hooks still fire around it."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: call(forward, *args, **kwargs)


def after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Replace the module's output by ``change(output)``."""
    around(module, lambda forward, *args, **kwargs: change(forward(*args, **kwargs)))
