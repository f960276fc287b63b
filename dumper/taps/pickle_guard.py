"""Pickle guard: pickling, saving or copying a model with taps in place gives a plain model.

Goes by the table of reducers that ``pickle``, ``torch.save`` and ``copy`` ask first (``copyreg``), for the classes of
the modules with taps and as long as they have them, so that nothing is put into the modules for it. ``DataParallel``
copies the attributes of modules itself: its replicas keep the hooks, but are called as torch does.
"""

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

_num_users: Counter[type] = Counter()
_before: dict[type, Callable[[Any], Any]] = {}


class PickleGuard:
    """Copies of modules of some classes have no taps, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._classes: list[type] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """For the classes of these modules, too."""
        if not _num_users.total():
            _guard_replicas()
        for kind in {type(module) for module in modules}.difference(self._classes):
            if not _num_users[kind]:
                if (present := copyreg.dispatch_table.get(kind)) is not None:
                    _before[kind] = present
                copyreg.pickle(kind, _reduced)
            _num_users[kind] += 1
            self._classes.append(kind)

    def end(self) -> None:
        """Leave the table as it was."""
        for kind in self._classes:
            _num_users[kind] -= 1
            if not _num_users[kind] and copyreg.dispatch_table.get(kind) is _reduced:
                del copyreg.dispatch_table[kind]
                if (before := _before.pop(kind, None)) is not None:
                    copyreg.dispatch_table[kind] = before
        had_classes = bool(self._classes)
        self._classes.clear()
        if had_classes and not _num_users.total():
            _release_replicas()


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
    wrapper = wrapper_in(module, "forward")
    if wrapper is not None and state.get("forward") is wrapper.method:
        del state["forward"]
        if wrapper.had_own:
            state["forward"] = wrapper.original
    ours = {number for name in _HOOKS for number, hook in state.get(name, {}).items() if hasattr(hook, "tapscope_tap")}
    if ours:
        for name in (*_HOOKS, *_FLAGS):
            hooks = state.get(name, {})
            state[name] = type(hooks)((number, each) for number, each in hooks.items() if number not in ours)
    return state


def _guard_replicas() -> None:
    """Replicas of modules are called as torch does: what is placed in a module calls that one."""
    plain = getattr(nn.Module, _REPLICATE, None)
    if plain is None:
        return

    def replicate(module: nn.Module) -> nn.Module:
        replica: nn.Module = plain(module)
        module_call.remove(replica)
        return replica

    replicate.tapscope_plain = plain  # type: ignore[attr-defined]
    setattr(nn.Module, _REPLICATE, replicate)


def _release_replicas() -> None:
    plain = getattr(getattr(nn.Module, _REPLICATE, None), "tapscope_plain", None)
    if plain is not None:
        setattr(nn.Module, _REPLICATE, plain)
