"""Probe, an identity module that makes a value tappable, and the dims annotations that layers share.

Dims (see :mod:`tapscope.core.dims`): t packed tokens, h features, v vocabulary, d head dim.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

WHOLE = "t h # tp:replicated"
SHARD = "t h[tp]"
PARTIAL = "t h[tp:partial]"
STATES = "states"
"""Row set with the last row of each request, whose recurrent state the step stores."""
TOKENS = "t # tp:replicated"
ANGLES = "t d # tp:replicated"
ANGLE_INPUTS = {"in[position_embeddings.0]": ANGLES, "in[position_embeddings.1]": ANGLES}


class Probe(nn.Module):
    """Identity module that gives a value a path in the module tree, so that forward hooks observe it."""

    tap_ports: tuple[str, ...] = ("out",)
    """Only the output is tapped; the input is the same tensor."""

    def __init__(self, dims: str, rows: str | None = None, *, is_optional: bool = False) -> None:
        """``dims`` and ``rows``: dims and row set of the value; ``is_optional``: the probe may never be called."""
        super().__init__()
        self.tap_is_optional = is_optional
        self.tap_dims = dict.fromkeys(("in[output]", "out"), dims)
        self.tap_rows = {} if rows is None else dict.fromkeys(("in[output]", "out"), rows)

    def forward(self, output: Tensor) -> Tensor:
        """Return ``output`` unchanged."""
        return output


class TapProbe(Probe):
    """Probe for a value that no module returns; its site is ``tap[NAME]`` of the parent module."""

    def __init__(self, name: str, dims: str, rows: str | None = None) -> None:
        super().__init__(dims, rows)
        self.tap_name = name


def is_watched(module: nn.Module) -> bool:
    """Return whether a call of ``module`` is observable: by its own hooks, global hooks or a replaced ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or _is_replaced(module)


def must_be_called(module: nn.Module) -> bool:
    """Return whether ``module`` has hooks other than an observer's taps, which :func:`notify` runs without a call."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return _is_replaced(module) or not all(hasattr(hook, "tapscope_tap") for hook in hooks)


def notify(module: nn.Module, output: Any, *args: Any, **kwargs: Any) -> None:
    """Run the taps of ``module``, which was not called: a kernel computed its ``output`` from these arguments."""
    notify_inputs(module, *args, **kwargs)
    notify_output(module, output, *args)


def notify_inputs(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Run the input taps of ``module``, which accept keyword arguments."""
    for hook in module._forward_pre_hooks.values():
        hook(module, args, kwargs)


def notify_output(module: nn.Module, output: Any, *args: Any) -> None:
    """Run the output taps of ``module``."""
    for hook in module._forward_hooks.values():
        hook(module, args, output)


def _is_replaced(module: nn.Module) -> bool:
    every = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(every) or "forward" in module.__dict__
