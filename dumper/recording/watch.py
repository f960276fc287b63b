"""Watch: one model under taps."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tapscope.dumper.device.laterows import LateRows
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.passes import graph_task
from tapscope.dumper.steps.rows import call_of, described, host_values, is_on_device, outlined
from tapscope.dumper.steps.steps import Described, OpenStep
from tapscope.dumper.taps.hooks import Hooks
from tapscope.dumper.taps.root import RootWrapper, wrap_root
from tapscope.dumper.taps.taps import Tap, find_taps
from tapscope.observe import StepInfo

if TYPE_CHECKING:
    from tapscope.dumper.recording.recording import Recording
    from tapscope.dumper.taps.collector import Collector


class Watch:
    """One model's taps, which stand while a recording is on.

    The model is not kept alive: once it is gone, its taps are too.
    """

    def __init__(self, model: nn.Module, name: str = "") -> None:
        """``name`` tells several models of one dumper apart; empty for the only one."""
        self.name = name
        self.taps = find_taps(model, name)
        self._model = weakref.ref(model)
        self._hooks = Hooks(model, self.taps, self._fire)
        self._wrapper: weakref.ref[RootWrapper] | None = None
        self._recording: Recording | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model; None when it is gone."""
        return self._model()

    @property
    def armed(self) -> list[Tap]:
        """Taps in place now, the root's included."""
        return self._hooks.armed

    def start(self, recording: "Recording") -> None:
        """Hand what fires to ``recording`` from now on; :meth:`select` places the taps."""
        self._recording = recording
        for tap in self.taps:
            tap.begin()
        if (model := self._model()) is not None:
            self._wrapper = weakref.ref(wrap_root(model, self._around))

    def select(self, selection: Selection, collector: "Collector") -> None:
        """Put taps where ``selection`` may keep something, and nowhere else."""
        if self._model() is not None:
            self._hooks.install(selection, collector)

    def end_step(self, collector: "Collector", step: OpenStep) -> None:
        """A step is about to end."""
        if self._hooks.armed:
            self._hooks.end_step(collector, step)

    def last_look(self, collector: "Collector") -> None:
        """The run ends: say what has happened to hooks since the last look."""
        self._hooks.last_look(collector)

    def stop(self) -> None:
        """Take the taps away."""
        self._recording = None
        self._hooks.remove()
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is not None:
            wrapper.remove(self._around)
        self._wrapper = None

    def renew(self) -> None:
        """A new run: sites are announced again."""
        for tap in self.taps:
            tap.forget()
            tap.fired = False

    def silent(self) -> list[str]:
        """Armed taps through which nothing came, by a site of theirs."""
        prefix = f"{self.name}/" if self.name else ""
        return [f"{prefix}{site}" for site in self._hooks.never_fired()]

    def ports(self) -> tuple[dict[str, list[str]], list[str]]:
        """The ports of every module that are known, by firings too; and the modules that take what nobody named."""
        known = {tap.path: tap.known_ports() for tap in self.taps}
        for tap in self.taps:
            known[tap.path] += [port.site.rpartition(":")[2] for port in list(tap.ports.values())]
        return known, [tap.path for tap in self.taps if tap.is_open]

    # ---- in the model's forward: nothing may escape

    def _fire(self, tap: Tap, kind: str, value: Any) -> None:
        recording = self._recording
        if recording is not None:
            recording.collector.fire(tap, kind, value)

    def _around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = self._recording
        if recording is None or torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        if graph_task() != -1:  # a recomputation of the whole model: part of the step of its forward
            return self._watched(forward, args, kwargs)
        step = recording.schedule.enter_call(lambda info: self._described(recording, info, args, kwargs))
        try:
            output = self._watched(forward, args, kwargs)
        except BaseException as error:
            if step is not None:
                recording.schedule.leave_call(step, type(error).__name__)
            raise
        if step is not None and recording.schedule.leave_call(step, None) is not None:
            recording.check_strict(step)
        return output

    def _watched(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, after = self._hooks.root
        before(self, args, kwargs)
        output = forward(*args, **kwargs)
        after(self, args, output)
        return output

    def _described(
        self, recording: "Recording", info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Described:
        """The step with the rows that the root's own arguments tell of, where the host told none."""
        if not recording.is_wanted:
            return info, None
        try:
            if (call := call_of(args, kwargs)) is None:
                return info, None
            outline = outlined(info, call)
            if is_on_device(call):
                return outline, LateRows(recording.collector.taker.arrivals.drain(), call, outline)
            return described(outline, call, host_values(call)), None
        except Exception as error:  # noqa: BLE001 - unknown arguments of an unknown model
            recording.collector.account.complain("step", f"rows unknown: {type(error).__name__}: {error}")
            return info, None
