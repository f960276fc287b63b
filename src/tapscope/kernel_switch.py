"""Kernel switch: which of two implementations of a function each module of a model calls."""

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
    """What modules call instead; may be the function itself."""
    reference: str
    """What switched modules call instead; may be the function itself."""


def find_kernels(tested: Sequence[str], reference: Sequence[str]) -> list[Kernel]:
    """The kernels of flags ``FUNCTION=REPLACEMENT``; ``FUNCTION`` alone is the function itself.

    Each function is named in ``reference``, once. Raises ConfigError.
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
    """(holder, attribute, value) of ``module:qualname``; raises ConfigError."""
    module, _, qualname = name.partition(":")
    if not module or not qualname or ":" in qualname:
        raise ConfigError(f"{name}: a kernel is named MODULE:FUNCTION, such as torch.nn.functional:silu")
    try:
        holder: Any = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever the module does at import
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
    """Inside, the modules of ``model`` at these paths call the reference of each kernel, all others the tested one.

    The caller of a function is the innermost module that is being called. A function of a module is replaced wherever
    it was imported by name. Calls outside of the model, and those that an implementation makes, reach the function
    itself. Yields the paths of the callers of each function, in the order of their first calls.

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
    """The function that is called in place of the kernel's."""
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
    """Inside, the attribute that ``name`` names is ``by``, and so are all names of modules for the same function."""
    holder, attribute, value = _resolve(name)
    with ExitStack() as stack:
        if isinstance(holder, ModuleType):
            loaded = [each for each in sys.modules.values() if isinstance(each, ModuleType)]
            for module in loaded if holder in loaded else [*loaded, holder]:  # torch.ops.NAME is none of them
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
