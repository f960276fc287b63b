"""AttachedModel: a model with taps, and the wrapper around its calls."""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import nn

from tapscope.core.framework_plugin import StepRows
from tapscope.core.observe import StepInfo
from tapscope.dumper.device import cuda_graphs
from tapscope.dumper.device.device_row_keys import keys_of_call, stream_of
from tapscope.dumper.device.late_rows import LateRows
from tapscope.dumper.device.private_memory import copy_apart, is_pooled
from tapscope.dumper.job import pipeline_chunks
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.job.framework_plugins import registry
from tapscope.dumper.recording.graph_taps import GraphTaps
from tapscope.dumper.recording.step_tracker import StepTracker
from tapscope.dumper.records.flatten import opaque_classes
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.autograd_passes import graph_task
from tapscope.dumper.steps.call_tracker import CallTracker
from tapscope.dumper.steps.input_rows import (
    host_values,
    input_rows,
    is_any_on_device,
    rows_from_shapes,
    rows_from_values,
    with_token_ids,
)
from tapscope.dumper.steps.open_step import OpenStep, StepWithRows
from tapscope.dumper.taps import compiled_taps, traced_taps
from tapscope.dumper.taps.call_wrapper import CallWrapper, watch_calls
from tapscope.dumper.taps.collector import Collector
from tapscope.dumper.taps.module_hooks import ModuleHooks
from tapscope.dumper.taps.module_tree import is_compiled_in_place
from tapscope.dumper.taps.taps import Tap, find_taps
from tapscope.run_format.ledger import ROOT, compiled_sentence
from tapscope.run_format.record import is_virtual_stage

_log = logging.getLogger("tapscope")


class StepHost(Protocol):
    """Interface of the open recording that calls and firings of a model use."""

    collector: Collector
    steps: StepTracker

    @property
    def is_wanted(self) -> bool:
        """Whether a step that begins now may be recorded."""
        ...

    def check_strict(self, step: OpenStep) -> None:
        """With ``strict`` back-pressure, raise RecorderError if any value up to the end of ``step`` was lost."""
        ...


class AttachedModel:
    """The taps of one model, in place while a recording is open.

    Holds only a weak reference to the model; its taps disappear with it.
    """

    def __init__(self, model: nn.Module, name: str = "") -> None:
        """``name`` distinguishes several models of one dumper; empty if there is only one."""
        self.name = name
        self._virtual_stage = name if is_virtual_stage(name) else ""
        self.taps = find_taps(model, name)
        self._model = weakref.ref(model)
        self._plugin = registry.owner_of(model)
        if self._plugin is not None:
            opaque_classes.update(registry.ask(self._plugin, "opaque_classes", ()))
        self._hooks = ModuleHooks(model, self.taps, self.fire)
        self._hooks.step_modules = self._step_modules(model)
        self._step_methods: tuple[str, ...] = ()
        if self._plugin is not None:
            self._step_methods = tuple(registry.ask(self._plugin, "step_methods", (), model))
        self._inside: set[int] = set()  # ids of threads inside a call of the root or of a step module
        self._wrapped_modules: list[weakref.ref[CallWrapper]] = []
        self._wrapper: weakref.ref[CallWrapper] | None = None
        self._recording: StepHost | None = None
        self._calls = CallTracker()
        self._key = self.taps[0].key
        self._warned: list[str] = []
        self._unknown_replays = 0  # number of replays of graphs without taps when the recording started
        self._is_new = True  # no step has run with the current taps yet
        self._state = ""  # read by code that torch.compile traces, so that a new value triggers a recompilation
        self._entered: dict[int, tuple[OpenStep | None, contextlib.ExitStack]] = {}  # thread id -> open enter_call()

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it was garbage-collected."""
        return self._model()

    @property
    def state(self) -> str:
        """Identifier of the taps in place; a graph captured or compiled with other taps does not record them."""
        return self._state

    @property
    def values_are_final(self) -> bool:
        """Whether the model promises not to overwrite values that a hook has seen, see :mod:`tapscope.core.observe`."""
        return bool(getattr(self._model(), "tap_values_final", False))

    @property
    def collector(self) -> Collector | None:
        """Receiver of firings; None while nothing is recorded."""
        return None if self._recording is None else self._recording.collector

    @property
    def armed(self) -> list[Tap]:
        """Taps currently in place, including the root's."""
        return self._hooks.armed

    def attach(self, recording: StepHost) -> None:
        """Direct firings to ``recording`` from now on; :meth:`select` places the taps."""
        if self._recording is None:
            cuda_graphs.watch()
            pipeline_chunks.watch()
            self._unknown_replays = cuda_graphs.num_unknown_replays
        self._recording = recording
        for tap in self.taps:
            tap.begin()
        compiled_taps.on_calls(self._key, self._called)
        self._wrap()

    def select(self, selection: Selection, collector: Collector) -> None:
        """Place taps exactly at the sites where ``selection`` may keep values."""
        model = self._model()
        if model is None:
            return
        if (wrapper := self._wrapped()) is not None and wrapper.name == "forward" and is_compiled_in_place(model):
            self._unwrap()  # the model was compiled after its calls were wrapped
            self._wrap()
        self._hooks.install(selection, collector)
        self._state = self._hooks.state
        self._is_new = True

    def end_step(self, collector: Collector, step: OpenStep) -> None:
        """Handle the end of a step."""
        if self._hooks.armed:
            self._hooks.end_step(collector, step)
            if self._is_new and not step.skipped:
                self._is_new = False
                self._warn_of_graphs()

    def _warn_of_graphs(self) -> None:
        """Warn of compiled modules in which no tap fired; called after the first step with new taps."""
        if (graphs := self.compiled()) and graphs != self._warned:
            self._warned = graphs
            _log.warning("tapscope: %s", compiled_sentence(graphs))

    def check_hooks(self, collector: Collector) -> None:
        """Report problems with hooks since the last check; called when the run ends."""
        self._hooks.check(collector)
        replays = cuda_graphs.num_unknown_replays - self._unknown_replays
        if replays and self.armed and not any(tap.fired for tap in self.armed):
            text = (
                f"{replays} replays of CUDA graphs that were captured before the Dumper was opened: nothing is recorded"
            )
            text += " from them; capture a graph while the Dumper is open"
            _log.warning("tapscope: %s", text)
            collector.counters.report("step", text)

    def detach(self) -> None:
        """Remove the taps."""
        if self._recording is not None:
            cuda_graphs.unwatch()
            pipeline_chunks.unwatch()
        self._recording = None
        compiled_taps.on_calls(self._key, None)
        self._hooks.remove()
        self._unwrap()

    def warn_if_called(self, forked: ForkGuard) -> None:
        """In a forked child: log a warning when the model is called, because it is not recorded."""
        if (model := self._model()) is not None:
            watch_calls(model, forked.around)

    def _wrap(self) -> None:
        if (model := self._model()) is not None:
            self._wrapper = weakref.ref(watch_calls(model, self._around))
            inside = [watch_calls(model.get_submodule(path), self._around_module) for path in self._hooks.step_modules]
            inside += [watch_calls(model, self._around_module, method=name) for name in self._step_methods]
            self._wrapped_modules += map(weakref.ref, inside)

    def _unwrap(self) -> None:
        for each in self._wrapped_modules:
            if (wrapper := each()) is not None:
                wrapper.remove(self._around_module)
        self._wrapped_modules.clear()
        if (wrapper := self._wrapped()) is not None:
            wrapper.remove(self._around)
        self._wrapper = None

    def _wrapped(self) -> CallWrapper | None:
        return None if self._wrapper is None else self._wrapper()

    def begin_run(self) -> None:
        """Reset the taps for a new run, so that sites are announced again."""
        for tap in self.taps:
            tap.forget()
            tap.fired = tap.has_held = False

    def never_fired(self) -> list[str]:
        """Return one site of each armed tap that never fired."""
        prefix = f"{self.name}/" if self.name else ""
        return [f"{prefix}{site}" for site in self._hooks.never_fired()]

    def compiled(self) -> list[str]:
        """Return the paths of compiled modules whose taps did not fire."""
        prefix = f"{self.name}/" if self.name else ""
        return [f"{prefix}{path or ROOT}" for path in self._hooks.compiled()]

    @property
    def has_warned(self) -> bool:
        """Whether a warning about taps in compiled modules has been issued."""
        return bool(self._warned)

    @property
    def is_traced(self) -> bool:
        """Whether the whole model was traced into a compiled graph."""
        return traced_taps.is_traced(self._key)

    def ports(self) -> tuple[dict[str, list[str]], list[str]]:
        """Return module path -> known ports (also those seen in firings), and the modules with variadic arguments."""
        known: dict[str, list[str]] = {}
        for tap in self.taps:
            names = known.setdefault(tap.site_path, [])
            names += [*tap.known_ports(), *(port.site.rpartition(":")[2] for port in list(tap.ports.values()))]
        return known, [tap.path for tap in self.taps if tap.is_open]

    # ---- in the model's forward: no exception may escape

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """Handle a firing: record the value or, during a CUDA graph capture, add the kernels that will save it."""
        recording = self._recording
        if recording is None:
            return
        if cuda_graphs.num_captures and (taps := self._graph_taps(recording)) is not None:
            taps.fire(tap, kind, value)
        else:
            recording.collector.fire(tap, kind, value)

    def _around_module(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap a call of a step module, which is a step of its own unless it happens inside a call of the root."""
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() in self._inside:
            return forward(*args, **kwargs)
        return self._around(forward, args, kwargs, is_root=False)

    def _around(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_root: bool = True
    ) -> Any:
        recording = self._recording
        if torch.compiler.is_dynamo_compiling():
            return self._traced(forward, args, kwargs)
        if recording is None:
            return forward(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            recording.collector.counters.report("step", "the model was traced by torch.jit.trace: not recorded")
            return forward(*args, **kwargs)
        if graph_task() != -1:  # a recomputation of the whole model belongs to the step of its forward
            return self._watched(forward, args, kwargs, is_root)
        if (taps := self._graph_taps(recording)) is not None:
            taps.enter(args, kwargs)
            output = self._watched(forward, args, kwargs, is_root)
            taps.leave()
            return output
        chunk = pipeline_chunks.current()
        if chunk == pipeline_chunks.SHAPE_INFERENCE and recording.collector.step is None:
            return forward(*args, **kwargs)  # shape inference is not a step
        if chunk is None and is_root:
            chunk = self._microbatch(recording.collector.step)
        describe = functools.partial(self._described, recording, args=args, kwargs=kwargs)
        step = recording.steps.enter_call(describe, self._part(recording.collector.step, chunk))
        try:
            in_chunk = contextlib.nullcontext() if chunk is None or step is not None else recording.steps.micro(chunk)
            with in_chunk, self._calls.track(recording.collector.step, recording.collector.origins):
                output = self._watched(forward, args, kwargs, is_root)
        except BaseException as error:
            if step is not None:
                recording.steps.leave_call(step, type(error).__name__)
            raise
        if step is not None and recording.steps.leave_call(step, None) is not None:
            recording.check_strict(step)
        return output

    def _traced(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap a call like :meth:`_around`, in code that torch.compile traces."""
        traced_taps.note(self._key)
        if compiled_taps.is_exporting():
            return forward(*args, **kwargs)
        compiled_taps.trace_enter(self._key, self._state, args, kwargs)
        output = self._watched(forward, args, kwargs)
        compiled_taps.trace_leave(self._key, self._state, args, kwargs, output)
        return output

    def _called(self, event: str, kwargs: dict[str, Any]) -> None:
        """Handle compiled code entering or leaving the model; ``kwargs`` are the arguments that determine its rows."""
        recording = self._recording
        if recording is None:
            return
        if (taps := self._graph_taps(recording)) is not None:
            taps.enter((), kwargs) if event == "enter" else taps.leave()
        elif event == "enter":
            self.enter_call({name: _outside_pools(name, value) for name, value in kwargs.items()})
        else:
            self.leave_call(None)

    def enter_call(self, kwargs: dict[str, Any]) -> None:
        """Handle the start of a call in compiled code; ``kwargs`` are the arguments that determine its token rows."""
        recording = self._recording
        if recording is None:
            return
        self.leave_call("Exception")  # a previous call of this thread that never reported its end
        describe = functools.partial(self._described, recording, args=(), kwargs=kwargs)
        step = recording.steps.enter_call(describe, self._part(recording.collector.step, None))
        stack = contextlib.ExitStack()
        stack.enter_context(self._calls.track(recording.collector.step, recording.collector.origins))
        self._entered[threading.get_ident()] = step, stack

    def leave_call(self, aborted: str | None) -> None:
        """Handle the end of a call started with :meth:`enter_call`; raises like :meth:`StepHost.check_strict`."""
        recording, entered = self._recording, self._entered.pop(threading.get_ident(), None)
        if recording is None or entered is None:
            return
        step, stack = entered
        stack.close()
        if step is not None and recording.steps.leave_call(step, aborted) is not None and aborted is None:
            recording.check_strict(step)

    def _graph_taps(self, recording: StepHost) -> GraphTaps | None:
        """Return the taps of the CUDA graph that this thread is capturing; None if there is none."""
        if not cuda_graphs.num_captures or (capture := cuda_graphs.current()) is None:
            return None
        taps: GraphTaps = capture.part(self, lambda: GraphTaps(self, recording.collector))
        return taps

    def _watched(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_root: bool = True
    ) -> Any:
        if not (self._hooks.step_modules or self._step_methods) or torch.compiler.is_dynamo_compiling():
            return self._tapped(forward, args, kwargs)
        thread = threading.get_ident()
        is_outermost = thread not in self._inside
        self._inside.add(thread)
        try:
            return self._tapped(forward, args, kwargs) if is_root else forward(*args, **kwargs)
        finally:
            if is_outermost:
                self._inside.discard(thread)

    def _tapped(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, after = self._hooks.root
        before(self, args, kwargs)
        output = forward(*args, **kwargs)
        after(self, args, output)
        return output

    def _described(
        self, recording: StepHost, info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepWithRows:
        """Add the token rows that the root's arguments determine to a step for which the host gave none.

        Returns (step, late rows); the late rows are None unless values must be copied from a device.
        """
        if not recording.is_wanted:
            return info, None
        try:
            if (batch := self._batch_rows(info, args, kwargs)) is not None:
                return self._completed(recording, batch)
            if (call := input_rows(args, kwargs)) is None:
                return info, None
            outline = rows_from_shapes(info, call)
            if is_any_on_device(call.tensors):
                complete, capturer = functools.partial(rows_from_values, call=call), recording.collector.capturer
                is_late = call.tensors.keys() != {"ids"}
                worker, failed = capturer.device.worker(), functools.partial(self._report_rows, recording)
                late = LateRows(worker, call.tensors, outline, complete, failed, rows_are_late=is_late)
                if is_late and capturer.sketcher.is_wanted:
                    late.keys, late.keys_stream = keys_of_call(call), stream_of(call.tensors["ids"].device)
                return outline, late
            return rows_from_values(outline, host_values(call.tensors), call=call), None
        except Exception as error:  # noqa: BLE001 - the arguments of an unknown model may raise any exception
            self._report_rows(recording, error)
            return info, None

    @staticmethod
    def _report_rows(recording: StepHost, error: Exception) -> None:
        recording.collector.counters.report("step", f"rows unknown: {type(error).__name__}: {error}")

    def _step_modules(self, model: nn.Module) -> frozenset[str]:
        """Return the paths of modules other than the root whose calls open a step."""
        if self._plugin is None:
            return frozenset()
        known = {tap.path for tap in self.taps}
        return frozenset(registry.ask(self._plugin, "step_modules", (), model)) & known - {""}

    def _microbatch(self, step: OpenStep | None) -> int | None:
        """Return the microbatch that the framework's pipeline schedule is computing; None if unknown."""
        if self._plugin is None or step is None or step.micro_is_given or (model := self._model()) is None:
            return None
        return registry.ask(self._plugin, "microbatch", None, model)

    def _part(self, step: OpenStep | None, micro: int | None) -> tuple[int, str]:
        """Return the (microbatch, virtual stage) that a call computes, see :meth:`StepTracker.enter_call`."""
        return micro if micro is not None else step.micro if step is not None else 0, self._virtual_stage

    def _batch_rows(self, info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepRows | None:
        """Return the token rows as reported by the framework plugin; None without one."""
        plugin = self._plugin
        if plugin is None or (model := self._model()) is None:
            return None
        return registry.ask(plugin, "step_rows", None, model, info, args, kwargs)

    def _completed(self, recording: StepHost, batch: StepRows) -> StepWithRows:
        """Return the step with the rows and token ids of ``batch``, copying values from a device if necessary."""
        info, tensors, complete = batch.info, dict(batch.tensors), batch.complete
        if complete is None:
            if not isinstance(batch.token_ids, torch.Tensor) or not info.rows:
                return info, None
            tensors, complete = {"ids": batch.token_ids.reshape(-1)}, with_token_ids
        if not is_any_on_device(tensors):
            return complete(info, host_values(tensors)), None
        worker = recording.collector.capturer.device.worker()
        rows_are_late = batch.complete is not None
        outline = info if rows_are_late else replace(info, token_ids=())
        failed = functools.partial(self._report_rows, recording)
        return outline, LateRows(worker, tensors, outline, complete, failed, rows_are_late=rows_are_late)


def _outside_pools(name: str, value: Any) -> Any:
    """Return an argument of compiled code; a tensor that may be in a CUDA graph pool is copied, a mask as bool."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda or not is_pooled():
        return value
    return copy_apart(value != 0 if name == "attention_mask" else value.long())
