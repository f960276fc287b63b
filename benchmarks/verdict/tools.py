"""Tools for patches: change what a module computes so that taps on it see the change."""

from collections.abc import Callable
from typing import Any

from torch import nn


def around(module: nn.Module, call: Callable[..., Any]) -> None:
    """``call(forward, *args, **kwargs)`` takes the place of the module's forward; hooks still fire around it."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: call(forward, *args, **kwargs)


def after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """``change(output)`` is what the module gives."""
    around(module, lambda forward, *args, **kwargs: change(forward(*args, **kwargs)))
