"""Module hooks: installed where the rules may select something, updated, and removed."""

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
_tracing = torch._C._get_tracing_state  # of torch.jit.trace: what a hook does would become part of the graph


class InstalledHook(NamedTuple):
    """One hook in place."""

    tap: Tap
    kind: str
    module: "weakref.ref[nn.Module]"
    handle: RemovableHandle


class _Refs(NamedTuple):
    """A member of the model, held weakly."""

    shell: "weakref.ref[nn.Module]"
    core: "weakref.ref[nn.Module]"

    @property
    def is_compiled(self) -> bool:
        """As :attr:`Member.is_compiled`, of a module that still lives."""
        shell, core = self.shell(), self.core()
        return shell is not None and core is not None and Member(shell, core).is_compiled


class ModuleHooks:
    """Installs and removes hooks below the root; calls ``fire(tap, kind, value)``, which must not raise.

    Holds the model weakly. ``taps`` is brought up to date when the model's modules have changed.
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
        self._capture_state: dict[str, list[str]] = {}  # path of a tap -> see _capture_state_of()
        self._selection = Selection.empty()
        self._next_check = 0.0
        self._last_num_records = -1  # records of the last step
        self.root: tuple[Callable[..., None], Callable[..., None]] = _nothing, _nothing
        """What to call before and after the root's forward, as hooks are: the root has none, it is wrapped."""
        self.armed: list[Tap] = []
        """Taps in place now, the root's included."""
        self.step_modules: frozenset[str] = frozenset()
        """Modules whose calls may open a step: their taps are inside of what opens it, as hooks would not be."""

    @gc_paused()
    def install(self, selection: Selection, collector: "Collector | None" = None) -> None:
        """Put hooks where ``selection`` may keep something, and nowhere else; parameters go to ``collector``."""
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
                wants.append("out")  # when its call returns, see GradientHooks.returned
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
        """Remove every hook."""
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
        """A step is about to end: capture parameters, and report hooks that no longer work; never raises."""
        try:
            self._parameters.end_step(step)
            self._check_step(collector, step)
        except Exception as error:  # noqa: BLE001 - the model must go on
            collector.counters.report("step", f"{type(error).__name__}: {error}")

    @property
    def state(self) -> str:
        """Names what is in place, for compiled code: with other taps it must be compiled again."""
        return compiled_taps.state_of(self._capture_state)

    def never_fired(self) -> list[str]:
        """One site of every tap in place that never fired, though its module should have been called."""
        silent = [tap for tap in self.armed if not (tap.fired or tap.has_held or tap.is_optional)]
        sites = []
        for tap in silent:
            ports = () if tap.path in self._capture_state else self._parameters.ports_of(tap)
            sites.append(f"{tap.site_path}:{ports[0] if ports else _first_port(tap)}")
        return list(dict.fromkeys([*sites, *self._parameters.missing_gradients()]))

    def compiled(self) -> list[str]:
        """The outermost modules that were compiled without the taps inside, through which nothing came."""
        silent = [tap for tap in self.armed if not tap.fired and tap.kinds]
        model = self._model()
        if model is None or not silent:
            return []
        graphs = outermost(path for path, member in members(model).items() if member.is_compiled)
        inside = [graph for graph in graphs if any(is_inside(tap.path, graph) for tap in silent)]
        return outermost(inside + [tap.path for tap in silent if traced_taps.is_traced(tap.key)])

    def _hook(self, module: nn.Module, tap: Tap, wants: list[str], collector: "Collector | None") -> None:
        """Place the hooks of one tap; a module that takes none (TorchScript) is reported, and listed as never fired.

        The graph of a module that was compiled in place omits its hooks, and so may a class with its own
        ``__call__``; a step that a call opens begins after them. There they are placed around the graph or ``forward``.
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
        """Place the taps of what methods return; a method that the plugin names and the module lacks is reported."""
        for method, name in tap.methods.items():
            if callable(getattr(module, method, None)):
                self._calls.append(_MethodTap(module, tap, name, self._fire, method=method))
            elif collector is not None:
                collector.counters.report(f"{tap.path}:tap[{name}]", f"its {tap.module_class} has no method {method}")

    def _refresh(self) -> None:
        """Modules may have been added, replaced or removed since the taps were found."""
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
        """Check the hooks if the step has another number of records than the last one, and every quarter second."""
        number, now = step.counts.sent + collector.capturer.native.num_buffered, time.monotonic()
        if number == self._last_num_records and now < self._next_check:
            return
        is_due, self._next_check = now >= self._next_check, now + _CHECK_PERIOD_S
        self._last_num_records = number
        if is_due or not all(tap.has_fired_in(step.serial) for tap in self.armed):
            self._check_hooks(collector, step.serial)

    def check(self, collector: "Collector") -> None:
        """The hooks are about to be removed: report what has happened to them since the last check; never raises."""
        try:
            if self._model() is not None:
                self._check_hooks(collector, -1)
            if missing := self._parameters.missing_gradients():
                collector.counters.report(missing[0], NO_GRADIENTS)
        except Exception as error:  # noqa: BLE001 - the model must go on
            collector.counters.report("step", f"{type(error).__name__}: {error}")

    def _check_hooks(self, collector: "Collector", serial: int) -> None:
        model = self._model()
        # One pass: looking each path up by get_submodule() takes a third of the time that placing the taps does.
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
        """Report modules that came after the taps were placed and of which rules select something."""
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
    """What code that is compiled with this tap depends on: its kinds, what its ports may keep, and the rules."""
    choices = {port: selection.decision(f"{tap.site_path}:{port}") for port in tap.known_ports(*wants)}
    ports = [f"{port}={choice.most}" for port, choice in choices.items() if choice.may_keep]
    rules = [f"{rule.keep} {rule.glob}" for rule in selection.config.rules]  # they may name nested values
    return [*wants, *ports, selection.config.keep, *rules]


def _discard_problem(where: str, reason: str) -> None:
    """Without a collector, problems are not reported."""


def _wants(tap: Tap, kind: str, selection: Selection) -> bool:
    if kind == "tap" and selection.config.mode != "all":  # which explicit values pass, and these are of a module
        return False
    return tap.may_keep(kind, selection) or tap.may_keep(f"{kind}.grad", selection)


def _first_port(tap: Tap) -> str:
    ports = tap.known_ports()
    return "out" if "out" in ports or not ports else ports[0]


def _problem(hook: InstalledHook, present: Mapping[str, nn.Module] | None, serial: int) -> str | None:
    """The problem of a hook, if any; ``present`` are the model's modules by path, None when it is gone."""
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
    """The tap of a module whose calls skip its hooks: it wraps the compiled graph or ``forward``."""

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
    """The tap of what a method returns that the module calls itself, see :attr:`.ModuleFacts.methods`."""

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
    """A hook that stays behind: in a deep copy or a pickle of the module it does nothing."""

    __slots__ = ("_fire", "_key", "_names", "_tap", "fast")
    tapscope_tap = True
    """Distinguishes it from foreign hooks."""

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
    """The fast path where there is none."""
    return False


def _fast_paths(tap: Tap, collector: "Collector") -> dict[str, Any]:
    made = {kind: collector.capturer.native.fast_path() for kind in tap.kinds if kind != "tap"}
    return {kind: path for kind, path in made.items() if path is not None}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a hook in a copy of the model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing
