"""Kernel switch: select per module which of two implementations of a function it calls."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tapscope.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Kernel", "find_kernels", "switched_kernels"]


class Kernel(Struct, frozen=True):
    """A function that a model calls, and two implementations of it."""

    function: str
    """``module:qualname``, such as ``torch.nn.functional:silu`` or ``pkg.mod:RMSNorm.forward``."""
    tested: str
    """Implementation called by default; may be the function itself."""
    reference: str
    """Implementation called by switched modules; may be the function itself."""


def find_kernels(tested: Sequence[str], reference: Sequence[str]) -> list[Kernel]:
    """Parse flags ``FUNCTION=REPLACEMENT`` to kernels; ``FUNCTION`` alone means the function itself.

    Each function must be named in ``reference``, exactly once. Raises ConfigError.
    """
    replaced, switched_to = _pairs(tested), _pairs(reference)
    for function in replaced:
        if function not in switched_to:
            raise ConfigError(
                f"{function}: no reference; give --reference-kernel {function} too, for the function itself"
            )
    kernels = [Kernel(name, replaced.get(name, name), right) for name, right in switched_to.items()]
    for each in kernels:
        for name in (each.function, each.tested, each.reference):
            if not callable(_resolve(name)[2]):
                raise ConfigError(f"{name} is not a function")
        if each.tested == each.reference:
            raise ConfigError(
                f"{each.function}: tested and reference are both {each.tested}; give --kernel {each.function}=OTHER or "
                f"--reference-kernel {each.function}=OTHER"
            )
    return kernels


def _pairs(flags: Sequence[str]) -> dict[str, str]:
    replacements: dict[str, str] = {}
    for flag in flags:
        function, equals, other = flag.partition("=")
        if function in replacements:
            raise ConfigError(f"{function} is named twice; give it one replacement")
        replacements[function] = other if equals else function
    return replacements


def _resolve(name: str) -> tuple[Any, str, Any]:
    """Return (holder, attribute, value) of ``module:qualname``; raises ConfigError."""
    module, _, qualname = name.partition(":")
    if not module or not qualname or ":" in qualname:
        raise ConfigError(f"{name}: a kernel is named MODULE:FUNCTION, such as torch.nn.functional:silu")
    try:
        holder: Any = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - importing a module can raise anything
        raise ConfigError(f"{name}: cannot import {module}: {type(error).__name__}: {error}") from None
    *outer, attribute = qualname.split(".")
    try:
        for each in outer:
            holder = getattr(holder, each)
        return holder, attribute, getattr(holder, attribute)
    except AttributeError as error:
        raise ConfigError(f"{name}: {error}") from None


@contextmanager
def switched_kernels(
    model: "nn.Module", kernels: Sequence[Kernel], paths: frozenset[str]
) -> Iterator[dict[str, list[str]]]:
    """Context manager: modules at ``paths`` call the reference implementation of each kernel, others the tested one.

    The caller is the innermost module being called. A function of a Python module is replaced in every module that
    imported it by name. Calls from outside the model, and calls made by an implementation, reach the original function.
    Yields function -> paths of its callers, in the order of their first calls.

    Raises ConfigError for a name that cannot be imported, DataError if an implementation raises.
    """
    active: list[str] = []
    callers: dict[str, list[str]] = {kernel.function: [] for kernel in kernels}
    with ExitStack() as stack:
        for path, module in model.named_modules():
            begin, end = _tracker(active, path)
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        choosers = {each.function: _chooser(each, active, paths, callers[each.function]) for each in kernels}
        for function, chooser in choosers.items():
            stack.enter_context(_replaced(function, chooser))
        yield callers


def _tracker(active: list[str], path: str) -> tuple[Callable[..., None], Callable[..., None]]:
    return lambda *_: active.append(path), lambda *_: (active.pop(), None)[1]


def _chooser(kernel: Kernel, active: Sequence[str], paths: frozenset[str], callers: list[str]) -> Callable[..., Any]:
    """Return the function that replaces the kernel's function and dispatches by caller."""
    function, tested, reference = (_resolve(name)[2] for name in (kernel.function, kernel.tested, kernel.reference))
    inside = False

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not active:
            return function(*args, **kwargs)
        caller = active[-1]
        if caller not in callers:
            callers.append(caller)
        name, called = (kernel.reference, reference) if caller in paths else (kernel.tested, tested)
        inside = True
        try:
            return called(*args, **kwargs)
        except Exception as error:
            raise DataError(f"{name}, called by {caller or 'the model'}: {type(error).__name__}: {error}") from error
        finally:
            inside = False

    return choose


@contextmanager
def _replaced(name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Context manager: replace the attribute ``name`` by ``by``, and all other module attributes that refer to the same
    function."""
    holder, attribute, value = _resolve(name)
    with ExitStack() as stack:
        if isinstance(holder, ModuleType):
            loaded = [each for each in sys.modules.values() if isinstance(each, ModuleType)]
            for module in loaded if holder in loaded else [*loaded, holder]:  # torch.ops.NAME is not in sys.modules
                for other in [key for key, each in vars(module).items() if each is value]:
                    stack.callback(setattr, module, other, value)
                    setattr(module, other, by)
        else:
            own = vars(holder).get(attribute)
            stack.callback(*((delattr, holder, attribute) if own is None else (setattr, holder, attribute, own)))
            is_method = not isinstance(holder, type) or isinstance(
                inspect.getattr_static(holder, attribute), FunctionType
            )
            setattr(holder, attribute, by if is_method else staticmethod(by))
        yield
