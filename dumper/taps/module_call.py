"""ModuleCall: a fast ``_call_impl`` for modules whose only hooks are taps.

Torch's generic hook handling takes longer than a tap does. The replacement in the instance's ``_call_impl`` is written
in C++ (kernels/native/module_call.cpp). It falls back to torch's implementation if the module has other hooks or global
module hooks exist. torch.compile traces only torch's implementation.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tapscope.kernels.native import library

NAME = "_call_impl"
_ALL = tuple(
    getattr(torch_module, name, None)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)
_tracing = torch._C._get_tracing_state
_with_kwargs: Any = getattr(torch_module, "_global_forward_hooks_with_kwargs", {})


def place(module: nn.Module, before: Any, after: Any) -> None:
    """Install the fast call in ``module``; ``before`` and ``after`` are the taps among its hooks, or None.

    Does nothing without the C++ library, or if the module, its class or a patch of torch overrides ``_call_impl``.
    """
    functions = library.functions()
    base = None if functions is None else functions.module_call
    plain = getattr(nn.Module, NAME, None)
    is_known = plain is not None and getattr(type(module), NAME, None) is plain and None not in _ALL
    if base is None or not is_known or NAME in module.__dict__:
        return
    fast = [None if hook is None else hook.fast for hook in (before, after)]
    call = _class_of(base)(weakref.ref(module), plain, _ALL, _tracing, _finish, before, after, *fast)
    module.__dict__[NAME] = call


def remove(module: nn.Module) -> None:
    """Undo :func:`place`."""
    if is_placed(module.__dict__):
        del module.__dict__[NAME]


def is_placed(attributes: dict[str, Any]) -> bool:
    """Return whether the module with this ``__dict__`` has the fast call installed."""
    return hasattr(attributes.get(NAME), "tapscope_tap")


@functools.cache
def _class_of(base: Any) -> Any:
    """Return the class of the installed callables: calls go to C++, and ``__call__`` serves torch.compile."""

    class TappedCall(base):  # type: ignore[misc]
        __slots__ = ()
        tapscope_tap = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            module = self.module()
            return type(module)._call_impl(module, *args, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (self.module(), NAME)  # a copy of the module gets the _call_impl of its class

    TappedCall.serve_calls()
    return TappedCall


def _finish(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Run all forward hooks on ``output`` as torch does; called if hooks were added during the module's forward."""
    for number, hook in (*torch_module._global_forward_hooks.items(), *module._forward_hooks.items()):
        takes_kwargs = number in module._forward_hooks_with_kwargs or number in _with_kwargs
        changed = hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)
        output = output if changed is None else changed
    return output
