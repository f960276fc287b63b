"""Pickle guard: a model that is pickled, saved, copied or scripted while taps are in place comes out without taps.

While taps are in place, the guard registers reducers for the classes of tapped modules in ``copyreg``, which
``pickle``, ``torch.save`` and ``copy`` consult first. The modules themselves need no extra attributes.
``DataParallel`` copies module attributes itself: its replicas keep the hooks but use torch's own ``_call_impl``.
``torch.jit.script`` compiles hooks and ``forward``: it receives an untapped copy of the modules that shares their
parameters.
"""

import copy
import copyreg
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tapscope.dumper.taps import module_call
from tapscope.dumper.taps.call_wrapper import wrapper_in

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

_REPLICATE = "_replicate_for_data_parallel"
_PREPARE = "__prepare_scriptable__"  # method that torch.jit.script calls first on every module

_num_users: Counter[type] = Counter()
_before: dict[type, Callable[[Any], Any]] = {}


class PickleGuard:
    """Strips taps from copies of modules of the registered classes, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._classes: list[type] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Register reducers for the classes of these modules, in addition to those already guarded."""
        if not _num_users.total():
            _patch_torch()
        for kind in {type(module) for module in modules}.difference(self._classes):
            if not _num_users[kind]:
                if (present := copyreg.dispatch_table.get(kind)) is not None:
                    _before[kind] = present
                copyreg.pickle(kind, _reduced)
            _num_users[kind] += 1
            self._classes.append(kind)

    def end(self) -> None:
        """Restore the ``copyreg`` entries of classes that no other guard uses."""
        for kind in self._classes:
            _num_users[kind] -= 1
            if not _num_users[kind] and copyreg.dispatch_table.get(kind) is _reduced:
                del copyreg.dispatch_table[kind]
                if (before := _before.pop(kind, None)) is not None:
                    copyreg.dispatch_table[kind] = before
        had_classes = bool(self._classes)
        self._classes.clear()
        if had_classes and not _num_users.total():
            _unpatch_torch()


def _reduced(module: nn.Module) -> Any:
    before = _before.get(type(module))
    reduced = module.__reduce_ex__(4) if before is None else before(module)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], _without_taps(module, reduced[2]), *reduced[3:])
    return reduced


def _without_taps(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    if module_call.is_placed(state):
        del state[module_call.NAME]
    for name, value in list(state.items()):
        wrapper = wrapper_in(module, name)
        if wrapper is not None and value is wrapper.method:
            del state[name]
            if wrapper.had_own:
                state[name] = wrapper.original
    ours = {number for name in _HOOKS for number, hook in state.get(name, {}).items() if _is_tap(hook)}
    if ours:
        for name in (*_HOOKS, *_FLAGS):
            hooks = state.get(name, {})
            state[name] = type(hooks)((number, each) for number, each in hooks.items() if number not in ours)
    return state


def _is_tap(hook: Any) -> bool:
    return hasattr(hook, "tapscope_tap")


def _is_tapped(module: nn.Module) -> bool:
    hooks = (hook for name in _HOOKS for hook in module.__dict__.get(name, {}).values())
    return any(map(_is_tap, hooks)) or any(wrapper_in(module, name) for name in module.__dict__)


def _plain(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return ``module`` if it contains no taps, otherwise an untapped copy that shares its parameters.

    ``made`` caches the copies, so that a shared module is copied once.
    """
    if not any(map(_is_tapped, module.modules())):
        return module
    if module not in made:
        made[module] = plain = copy.copy(module)
        children = module._modules.items()
        plain._modules = {name: None if child is None else _plain(child, made) for name, child in children}
    return made[module]


def _prepare(module: nn.Module) -> nn.Module:
    return _plain(module, {})


def _patch_torch() -> None:
    """Patch the two places where torch does not use ``copyreg``: ``DataParallel`` replicas and TorchScript.

    An installed fast call would run the original module instead of the replica, and TorchScript cannot compile a tap.
    """
    if not hasattr(nn.Module, _PREPARE):
        setattr(nn.Module, _PREPARE, _prepare)
    plain = getattr(nn.Module, _REPLICATE, None)
    if plain is None:
        return

    def replicate(module: nn.Module) -> nn.Module:
        replica: nn.Module = plain(module)
        module_call.remove(replica)
        return replica

    replicate.tapscope_plain = plain  # type: ignore[attr-defined]
    setattr(nn.Module, _REPLICATE, replicate)


def _unpatch_torch() -> None:
    if getattr(nn.Module, _PREPARE, None) is _prepare:
        delattr(nn.Module, _PREPARE)
    plain = getattr(getattr(nn.Module, _REPLICATE, None), "tapscope_plain", None)
    if plain is not None:
        setattr(nn.Module, _REPLICATE, plain)
