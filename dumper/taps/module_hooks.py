"""Module hooks: installed on the modules that the rules may select, checked after each step, and removed."""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tapscope.core.gc_control import gc_paused
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps import compiled_taps, module_call, traced_taps
from tapscope.dumper.taps.call_wrapper import watch_calls
from tapscope.dumper.taps.module_tree import (
    Member,
    has_own_call,
    is_compiled_in_place,
    is_inside,
    members,
    outermost,
    parents,
)
from tapscope.dumper.taps.parameter_taps import NO_GRADIENTS, ParameterTaps
from tapscope.dumper.taps.pickle_guard import PickleGuard
from tapscope.dumper.taps.taps import Tap, find_taps, heads, vectors

if TYPE_CHECKING:
    from tapscope.dumper.taps.collector import Collector

Fire = Callable[[Tap, str, Any], None]
_CHECK_PERIOD_S = 0.25
_KINDS = ("in", "out", "tap")
_is_compiling = torch.compiler.is_dynamo_compiling
_tracing = torch._C._get_tracing_state  # torch.jit.trace would record a hook's operations in its graph


class InstalledHook(NamedTuple):
    """One installed hook."""

    tap: Tap
    kind: str
    module: "weakref.ref[nn.Module]"
    handle: RemovableHandle


class _Refs(NamedTuple):
    """Weak references to a :class:`Member` of the model."""

    shell: "weakref.ref[nn.Module]"
    core: "weakref.ref[nn.Module]"

    @property
    def is_compiled(self) -> bool:
        """As :attr:`Member.is_compiled`; False if the module no longer exists."""
        shell, core = self.shell(), self.core()
        return shell is not None and core is not None and Member(shell, core).is_compiled


class ModuleHooks:
    """Installs and removes the hooks of all modules below the root.

    The hooks call ``fire(tap, kind, value)``, which must not raise. The model is held weakly. ``taps`` is updated in
    place when the model's modules have changed.
    """

    def __init__(self, model: nn.Module, taps: list[Tap], fire: Fire) -> None:
        self._model = weakref.ref(model)
        self._modules = _weak_refs(members(model))
        self._taps = taps
        self._fire = fire
        self._installed: list[InstalledHook] = []
        self._calls: list[_CallTap | _MethodTap] = []
        self._pickle_guard = PickleGuard()
        self._parameters = ParameterTaps()
        self._reported: set[str] = set()
        self._capture_state: dict[str, list[str]] = {}  # path of a tap -> result of _capture_state_of()
        self._selection = Selection.empty()
        self._next_check = 0.0
        self._last_num_records = -1  # records of the last step
        self.root: tuple[Callable[..., None], Callable[..., None]] = _nothing, _nothing
        """Pre-hook and post-hook of the root, called by the wrapper of its forward: the root gets no torch hooks."""
        self.armed: list[Tap] = []
        """Taps currently in place, including the root's."""
        self.step_modules: frozenset[str] = frozenset()
        """Paths of modules whose calls may open a step; a torch hook would fire before the step opens."""

    @gc_paused()
    def install(self, selection: Selection, collector: "Collector | None" = None) -> None:
        """Replace all hooks by hooks on exactly the modules where ``selection`` may keep a value.

        With ``collector``, parameters are captured and problems reported through it.
        """
        if collector is not None:
            self.check(collector)
        self.remove()
        self._refresh()
        self._selection = selection = selection.of_model(self._taps[0].model if self._taps else "")
        selection.heads, selection.vectors = heads(self._taps), vectors(self._taps)
        self._pickle_guard.begin(shell for refs in self._modules.values() if (shell := refs.shell()) is not None)
        for tap in self._taps:
            tap.forget()
            module, core = (each() for each in self._modules[tap.path])
            if module is None or core is None:
                continue
            wants: list[str] = [kind for kind in _KINDS if kind in tap.kinds and _wants(tap, kind, selection)]
            if collector is not None and not tap.fast:
                tap.fast = _fast_paths(tap, collector)
            tap.has_grads = any(tap.may_keep(f"{kind}.grad", selection) for kind in wants)
            if tap.has_grads and "in" in wants and "out" in set(tap.kinds).difference(wants):
                wants.append("out")  # GradientHooks.returned needs to know when the call returns
            if self._parameters.add(tap, core, selection) or wants:
                self.armed.append(tap)
            if wants:
                report = _discard_problem if collector is None else collector.counters.report
                compiled_taps.register(tap, selection, self._fire, report)
                self._capture_state[tap.path] = _capture_state_of(tap, wants, selection)
            if "tap" in wants:
                self._watch_methods(core, tap, collector)
            if tap.path:
                self._hook(module, tap, wants, collector)
            else:
                before, after = _Before(tap, "in", self._fire), _After(tap, "out", self._fire)
                self.root = before if "in" in wants else _nothing, after if "out" in wants else _nothing
        if collector is not None:
            self._parameters.watch(collector)

    def remove(self) -> None:
        """Remove all hooks, wrappers, parameter taps and compiled taps."""
        for hook in self._installed:
            hook.handle.remove()
            if (module := hook.module()) is not None:
                module_call.remove(module)
        for calls in self._calls:
            calls.remove()
        self._installed.clear()
        self._calls.clear()
        self._pickle_guard.end()
        self.root = _nothing, _nothing
        self._parameters.remove()
        compiled_taps.unregister([tap.key for tap in self._taps])
        self._capture_state.clear()
        self.armed.clear()
        self._reported.clear()

    def end_step(self, collector: "Collector", step: OpenStep) -> None:
        """Capture parameters and report hooks that no longer work, just before ``step`` ends; never raises."""
        try:
            self._parameters.end_step(step)
            self._check_step(collector, step)
        except Exception as error:  # noqa: BLE001 - the model must go on
            collector.counters.report("step", f"{type(error).__name__}: {error}")

    @property
    def state(self) -> str:
        """Hash of the taps in place, a guard for compiled code, which must be recompiled when the taps change."""
        return compiled_taps.state_of(self._capture_state)

    def never_fired(self) -> list[str]:
        """Return one site per tap in place that never fired although its module should have been called.

        Includes sites of gradients that never arrived.
        """
        silent = [tap for tap in self.armed if not (tap.fired or tap.has_held or tap.is_optional)]
        sites = []
        for tap in silent:
            ports = () if tap.path in self._capture_state else self._parameters.ports_of(tap)
            sites.append(f"{tap.site_path}:{ports[0] if ports else _first_port(tap)}")
        return list(dict.fromkeys([*sites, *self._parameters.missing_gradients()]))

    def compiled(self) -> list[str]:
        """Return the paths of the outermost compiled modules whose graphs omit taps that never fired."""
        silent = [tap for tap in self.armed if not tap.fired and tap.kinds]
        model = self._model()
        if model is None or not silent:
            return []
        graphs = outermost(path for path, member in members(model).items() if member.is_compiled)
        inside = [graph for graph in graphs if any(is_inside(tap.path, graph) for tap in silent)]
        return outermost(inside + [tap.path for tap in silent if traced_taps.is_traced(tap.key)])

    def _hook(self, module: nn.Module, tap: Tap, wants: list[str], collector: "Collector | None") -> None:
        """Install the hooks of one tap.

        A module compiled in place skips its hooks, and so may a class with its own ``__call__``; the hooks of a module
        in :attr:`step_modules` would fire before the step opens. In these cases, wrap the compiled graph or
        ``forward`` instead. A module that rejects hooks (TorchScript) is reported and later listed as never fired.
        """
        if wants and (is_compiled_in_place(module) or has_own_call(module) or tap.path in self.step_modules):
            self._calls.append(_CallTap(module, tap, wants, self._fire))
            return
        before = _Before(tap, "in", self._fire) if "in" in wants else None
        after = _After(tap, "out", self._fire) if "out" in wants else None
        try:
            if before is not None:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                self._installed.append(InstalledHook(tap, "in", weakref.ref(module), handle))
            if after is not None:
                handle = module.register_forward_hook(after)
                self._installed.append(InstalledHook(tap, "out", weakref.ref(module), handle))
            if before is not None or after is not None:
                module_call.place(module, before, after)
        except RuntimeError as error:
            if collector is not None:
                collector.counters.report(f"{tap.path}:{wants[0]}", str(error))

    def _watch_methods(self, module: nn.Module, tap: Tap, collector: "Collector | None") -> None:
        """Tap the return values of the methods named by the framework plugin; reports methods the module lacks."""
        for method, name in tap.methods.items():
            if callable(getattr(module, method, None)):
                self._calls.append(_MethodTap(module, tap, name, self._fire, method=method))
            elif collector is not None:
                collector.counters.report(f"{tap.path}:tap[{name}]", f"its {tap.module_class} has no method {method}")

    def _refresh(self) -> None:
        """Find the taps again if modules were added, replaced or removed; taps of unchanged modules are kept."""
        model = self._model()
        if model is None:
            return
        now = members(model)
        known = {path: Member(*(ref() for ref in refs)) for path, refs in self._modules.items()}  # type: ignore[arg-type]
        if known.keys() == now.keys() and all(_are_same(known[path], member) for path, member in now.items()):
            return
        name = self._taps[0].model if self._taps else ""
        kept = {tap.path: tap for tap in self._taps if _are_same(known.get(tap.path), now.get(tap.path))}
        self._taps[:] = [kept.get(tap.path, tap) for tap in find_taps(model, name)]
        self._modules = _weak_refs(now)

    def _check_step(self, collector: "Collector", step: OpenStep) -> None:
        """Check the hooks if the number of records differs from that of the last step, or a quarter second passed."""
        number, now = step.counts.sent + collector.capturer.native.num_buffered, time.monotonic()
        if number == self._last_num_records and now < self._next_check:
            return
        is_due, self._next_check = now >= self._next_check, now + _CHECK_PERIOD_S
        self._last_num_records = number
        if is_due or not all(tap.has_fired_in(step.serial) for tap in self.armed):
            self._check_hooks(collector, step.serial)

    def check(self, collector: "Collector") -> None:
        """Report broken hooks and missing gradients before the hooks are removed; never raises."""
        try:
            if self._model() is not None:
                self._check_hooks(collector, -1)
            if missing := self._parameters.missing_gradients():
                collector.counters.report(missing[0], NO_GRADIENTS)
        except Exception as error:  # noqa: BLE001 - the model must go on
            collector.counters.report("step", f"{type(error).__name__}: {error}")

    def _check_hooks(self, collector: "Collector", serial: int) -> None:
        model = self._model()
        # One pass over the model: get_submodule() for each path takes a third of the time of placing the taps.
        found = None if model is None else members(model, repeated=True)
        present = None if found is None else {path: member.shell for path, member in found.items()}
        for hook in self._installed:
            path = hook.tap.path
            if path not in self._reported and (problem := _problem(hook, present, serial)):
                self._reported.add(path)
                collector.counters.report(f"{path}:{hook.kind}", f"{problem}; configure again to place the taps")
        if model is not None and found is not None:
            self._report_added(collector, model, found)

    def _report_added(self, collector: "Collector", model: nn.Module, found: Mapping[str, Member]) -> None:
        """Report modules that were added after the taps were placed and that the rules select."""
        known = {id(module) for refs in self._modules.values() for ref in refs if (module := ref()) is not None}
        added = {path for path, (shell, core) in found.items() if id(shell) not in known and id(core) not in known}
        added -= {path for path in added if self._reported.intersection([path, *parents(path)])}
        if not added:
            return
        for tap in find_taps(model, self._taps[0].model if self._taps else ""):
            above = self._reported.intersection([tap.path, *parents(tap.path)])
            if tap.path in added and not above and any(_wants(tap, kind, self._selection) for kind in tap.kinds):
                self._reported.add(tap.path)
                reason = "its module was added after the taps were placed; configure again to place the taps"
                collector.counters.report(f"{tap.path}:{_first_port(tap)}", reason)


def _capture_state_of(tap: Tap, wants: list[str], selection: Selection) -> list[str]:
    """Return the configuration that compiled code with this tap depends on: kinds, capture levels of ports, rules."""
    choices = {port: selection.decision(f"{tap.site_path}:{port}") for port in tap.known_ports(*wants)}
    ports = [f"{port}={choice.most}" for port, choice in choices.items() if choice.may_keep]
    rules = [f"{rule.keep} {rule.glob}" for rule in selection.config.rules]  # rules may name nested values
    return [*wants, *ports, selection.config.keep, *rules]


def _discard_problem(where: str, reason: str) -> None:
    """Ignore a problem; used when there is no collector to report to."""


def _wants(tap: Tap, kind: str, selection: Selection) -> bool:
    if kind == "tap" and selection.config.mode != "all":  # other modes let taps of dump() pass, but not of modules
        return False
    return tap.may_keep(kind, selection) or tap.may_keep(f"{kind}.grad", selection)


def _first_port(tap: Tap) -> str:
    ports = tap.known_ports()
    return "out" if "out" in ports or not ports else ports[0]


def _problem(hook: InstalledHook, present: Mapping[str, nn.Module] | None, serial: int) -> str | None:
    """Return why ``hook`` no longer works, or None if it does.

    ``present`` maps paths to the model's current modules; None if the model no longer exists. ``serial`` is the step.
    """
    module, hooks = hook.module(), hook.handle.hooks_dict_ref()
    if present is None:
        return "its model is gone"
    if module is not None and hooks is not None and hook.handle.id not in hooks:
        return "its hook was removed by other code"
    here = present.get(hook.tap.path)
    if module is not None:
        is_compiled = is_compiled_in_place(module)
        if (here is module and not is_compiled) or hook.tap.has_fired_in(serial):
            return None
        if is_compiled:
            return "it was compiled after its taps were placed"
    if here is None:
        return "its module was removed from the model"
    return f"its module was replaced by a {type(here).__name__}"


class _CallTap:
    """The tap of a module whose calls skip torch hooks; wraps the compiled graph or ``forward``."""

    def __init__(self, module: nn.Module, tap: Tap, wants: list[str], fire: Fire) -> None:
        self._before = _Before(tap, "in", fire) if "in" in wants else _nothing
        self._after = _After(tap, "out", fire) if "out" in wants else _nothing
        self._wrapper = weakref.ref(watch_calls(module, self._around, innermost=True))

    def remove(self) -> None:
        """Restore the plain method."""
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.remove(self._around)

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before(self, args, kwargs)  # type: ignore[arg-type]
        output = call(*args, **kwargs)
        self._after(self, args, output)  # type: ignore[arg-type]
        return output


class _MethodTap:
    """The tap of the return value of a method that the module calls itself, see :attr:`.ModuleFacts.methods`."""

    def __init__(self, module: nn.Module, tap: Tap, name: str, fire: Fire, *, method: str) -> None:
        self._tap, self._name, self._fire = tap, name, fire
        self._wrapper = weakref.ref(watch_calls(module, self._around, method=method))

    def remove(self) -> None:
        """Restore the plain method."""
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.remove(self._around)

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(*args, **kwargs)
        if not (_is_compiling() or _tracing()):
            self._fire(self._tap, "tap", {self._name: output})
        return output


def _weak_refs(modules: Mapping[str, Member]) -> dict[str, _Refs]:
    return {path: _Refs(weakref.ref(each.shell), weakref.ref(each.core)) for path, each in modules.items()}


def _are_same(one: Member | None, other: Member | None) -> bool:
    return one is not None and other is not None and one.shell is other.shell and one.core is other.core


class _Hook:
    """Base class of the module hooks; a deep copy or pickle of the module gets a no-op instead."""

    __slots__ = ("_fire", "_key", "_names", "_tap", "fast")
    tapscope_tap = True
    """Marker that distinguishes taps from hooks of other code."""

    def __init__(self, tap: Tap, kind: str, fire: Fire) -> None:
        self._tap = tap
        self._key = tap.key
        self._names = tap.names
        self._fire = fire
        self.fast = tap.fast.get(kind, _no_fast_path)

    def __deepcopy__(self, dedup: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_compiling():
            traced_taps.note(self._key)
            if not compiled_taps.is_exporting():
                compiled_taps.trace_inputs(self._key, self._names, args, kwargs)
        elif not (_tracing() or self.fast(args, kwargs)):
            self._fire(self._tap, "in", (args, kwargs))


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _is_compiling():
            traced_taps.note(self._key)
            if not compiled_taps.is_exporting():
                compiled_taps.trace_output(self._key, output)
        elif not (_tracing() or self.fast(output)):
            self._fire(self._tap, "out", output)


def _no_fast_path(*value: Any) -> bool:
    """Decline every value; placeholder for a tap without a fast path."""
    return False


def _fast_paths(tap: Tap, collector: "Collector") -> dict[str, Any]:
    made = {kind: collector.capturer.native.fast_path() for kind in tap.kinds if kind != "tap"}
    return {kind: path for kind, path in made.items() if path is not None}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing; replaces a hook in a copy of the model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing
