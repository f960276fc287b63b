"""GraphTaps: the taps of a model in a captured CUDA graph, recorded during the capture and fired after each replay."""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tapscope.core.observe import StepInfo
from tapscope.dumper.device.graph_fetch import Fetch, fetch_here, fetching
from tapscope.dumper.device.graph_memory import GraphMemory
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.flatten import Leaves
from tapscope.dumper.records.replay_plan import LearnedRecord, ReplayPlan, is_available
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.sketcher import DevicePlace
from tapscope.dumper.steps.input_rows import CACHE_ARGUMENTS, DECODER_ARGUMENTS
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.row_slicing import SlicedTensor, rows_per_token
from tapscope.dumper.taps.collector import Collector, leaves_of
from tapscope.dumper.taps.taps import ReplayMark, Tap

_log = logging.getLogger("tapscope")
_ROW_ARGUMENTS = (
    *("input_ids", "attention_mask", "position_ids", "cache_position"),
    *(*CACHE_ARGUMENTS, *DECODER_ARGUMENTS),
)


class GraphModel(Protocol):
    """Interface of the attached model that a graph's replays use."""

    @property
    def state(self) -> str:
        """Identifier of the taps in place; a graph captured with other taps does not record them."""
        ...

    @property
    def collector(self) -> Collector | None:
        """Receiver of firings; None while nothing is recorded."""
        ...

    @property
    def values_are_final(self) -> bool:
        """Whether values seen by a tap are never overwritten later in the same call."""
        ...

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """Handle a firing of ``tap``."""
        ...

    def enter_call(self, kwargs: dict[str, Any]) -> None:
        """Handle the start of a call; ``kwargs`` are the arguments that determine its token rows."""
        ...

    def leave_call(self, aborted: str | None) -> None:
        """Handle the end of a call; ``aborted`` names the exception that ended it."""
        ...


Event = Callable[[GraphModel], None]
_MAX_PLANS = 64
_Marks = weakref.WeakValueDictionary[frozenset[tuple[str, str]], ReplayMark]
_marks: "weakref.WeakKeyDictionary[Collector, _Marks]" = weakref.WeakKeyDictionary()
"""Marks per recording, because each recording counts steps from 0."""


def _shapes_of(step: OpenStep) -> Any:
    """Return a key of the step properties that determine the shapes of a graph's records."""
    return step.info.grid, step.info.num_padding, tuple(step.row_ranges.items())


def _is_alike(learned: LearnedRecord, firing: Firing) -> bool:
    """Return whether later replays produce the same record except for its statistics and bytes.

    That requires the first firing of the site in its step, among others.
    """
    record, offset, has_bytes = learned
    is_plain = record.firing is firing and (record.stored is record.layout or learned.counters >= 0)
    return is_plain and (offset >= 0 or not has_bytes) and (offset >= 0) == (record.pending_copy is not None)


def _mark_of(collector: Collector, fires: Sequence[tuple[Tap, str, Leaves]]) -> ReplayMark:
    """Return the mark of these taps, shared by all graphs of a recording that fire the same taps."""
    key = frozenset((tap.key, kind) for tap, kind, _ in fires)
    marks = _marks.setdefault(collector, weakref.WeakValueDictionary())
    mark = marks.get(key)
    if mark is None:
        mark = marks[key] = ReplayMark()
    for tap, kind, _ in fires:
        tap.add_mark(kind, mark)
    return mark


class GraphTaps:
    """The taps of one model in one graph; implements :class:`tapscope.dumper.device.cuda_graphs.Recorded`.

    Steps with known shapes are recorded by a :class:`.ReplayPlan` in one operation; otherwise the taps fire one by one.
    """

    def __init__(self, model: GraphModel, collector: Collector) -> None:
        self._model = weakref.ref(model)
        self._collector = collector
        self._state = model.state
        self._events: list[Event] = []
        self._order: list[str] = []  # "enter", "fire" or "leave" for each event
        self._firings: tuple[int, int] | None = None  # see _span(); None while events are added
        self._fires: list[tuple[Tap, str, Leaves]] = []
        self._plans: dict[Any, ReplayPlan | None] = {}  # shape key of a step -> plan; None if its records vary
        self._planned_port: SitePort | None = None  # identifies the configuration and run for which the plans are valid
        self._mark: ReplayMark | None = None
        self._memories: dict[torch.device, GraphMemory] = {}
        self._has_warned = False

    # ---- during the capture of the graph; no exception may escape

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """Handle a firing during the capture: add kernels that save the parts of ``value`` that the rules may keep."""
        try:
            leaves = Leaves()
            selection = self._collector.selection
            for path, leaf in leaves_of(tap, kind, value):
                port = tap.ports.get((kind, path)) or tap.port(kind, path, selection)
                if not port.may_keep:
                    continue
                if not isinstance(leaf, Tensor):
                    leaves.append((path, leaf))
                elif (kept := self._record(leaf, port)) is not None:
                    leaves.append((path, kept))
                else:
                    reason = f"a {type(leaf).__name__} on {leaf.device} is not captured in a CUDA graph"
                    self._collector.counters.report(port.site, reason)
            self._add("fire", lambda model: model.fire(tap, kind, leaves))
            self._fires.append((tap, kind, leaves))
        except Exception as error:  # noqa: BLE001 - an error must not reach the model
            self._collector.counters.report(f"{tap.path}:{kind}", f"{type(error).__name__}: {error}")

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of a model call: save the arguments that determine its token rows."""
        try:
            row_arguments = {name: kwargs[name] for name in _ROW_ARGUMENTS if name in kwargs}
            if args and "input_ids" not in row_arguments:
                row_arguments["input_ids"] = args[0]
            for name, value in row_arguments.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    row_arguments[name] = self._memory(value.device).keep(value)
        except Exception as error:  # noqa: BLE001 - an error must not reach the model
            row_arguments = {}
            self._collector.counters.report("step", f"rows unknown: {type(error).__name__}: {error}")
        self._add("enter", lambda model: model.enter_call(row_arguments))

    def leave(self) -> None:
        """Handle the end of a model call."""
        self._add("leave", lambda model: model.leave_call(None))

    def _add(self, what: str, event: Event) -> None:
        self._events.append(event)
        self._order.append(what)
        self._firings = None

    def _record(self, leaf: Tensor, port: SitePort) -> Tensor | None:
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            return None
        if not leaf.is_cuda:
            return leaf.detach().clone()  # replays do not change host memory
        memory, keep, step = self._memory(leaf.device), port.decision.most, self._collector.step
        rows = None if step is None else rows_per_token(leaf, port.dims, step.info)
        place = self._place(leaf, port, step) if keep == "sketch" and rows == 1 and step is not None else None
        if keep == "stats" or place is not None:
            row = memory.summarize(leaf, None if rows is None else len(leaf) // rows, place)
            if row is not None:
                return row
        return memory.keep(leaf)

    def _place(self, leaf: Tensor, port: SitePort, step: OpenStep) -> DevicePlace | None:
        """Return the place of a packed tensor's rows, padding included; None if the host must take the sketch."""
        tokens = SlicedTensor(leaf[: step.info.grid[0]], port.rows_in(step))
        layout = port.layout(tokens, None, self._collector.counters.report_dims)
        place = self._collector.capturer.sketcher.place_on_device(port, step, layout)
        if place is None or not place.by_rows or place.slot or place.slots is not None:
            return None
        return place._replace(part=(len(leaf), *place.part[1:]))

    def finish(self) -> None:
        """Launch the deferred kernels of taps, before the capture ends."""
        try:
            for memory in self._memories.values():
                memory.finish()
                for problem in dict.fromkeys(memory.problems):
                    self._collector.counters.report("step", problem)
        except Exception as error:  # noqa: BLE001 - an error must not reach the model
            self._collector.counters.report("step", f"{type(error).__name__}: {error}")

    def _memory(self, device: torch.device) -> GraphMemory:
        memory = self._memories.get(device)
        if memory is None:
            model = self._model()
            is_final = model is not None and model.values_are_final
            memory = self._memories[device] = GraphMemory(device, values_are_final=is_final)
        return memory

    # ---- around a replay; no exception may escape except those of the strict policy

    def before_replay(self) -> None:
        """Pass the number of valid rows, and the hash keys of rows for sketches, to the kernels."""
        step = self._collector.step
        if self._model_here() is not None:
            for device, memory in self._memories.items():
                memory.set_rows(step.info.grid[0] if step is not None and step.info.grid else None)
                if memory.sketched:
                    keys = None if step is None else self._collector.capturer.device.row_keys.of(step, device)
                    memory.set_keys(None if step is None else step.info, keys)

    def after_replay(self) -> None:
        """Record the values that the replay has computed."""
        model = self._model_here()
        if model is None:
            return
        if model.state != self._state and not self._has_warned:
            self._has_warned = True
            text = (
                "a CUDA graph was captured with other taps than those in place; capture it again to record with these"
            )
            _log.warning("tapscope: %s", text)
            self._collector.counters.report("step", text)
        begin, end = self._span()
        with self._fetching():
            for event in self._events[:begin]:
                event(model)
            if begin == end or not self._put_planned(model):
                self._fire_all(model, self._events[begin:end])
            for event in self._events[end:]:
                event(model)

    def _span(self) -> tuple[int, int]:
        """Return the index range (begin, end) of the firings in the events; empty if the graph has several calls."""
        if self._firings is None:
            begin, end = self._order.count("enter"), len(self._order) - self._order.count("leave")
            is_one_call = self._order[begin:end] == ["fire"] * (end - begin)
            self._firings = (begin if is_one_call else end), end
        return self._firings

    # ---- replays that are recorded by the plan of an earlier one

    def _put_planned(self, model: GraphModel) -> bool:
        """Record a replay by its plan; return False if there is no valid plan for this step."""
        fetch, firing = fetch_here(), self._collector.shared_firing()
        if type(fetch) is not Fetch or firing is None or model.state != self._state:
            return False
        if self._first_port() is not self._planned_port:
            self._plans.clear()
        plan, step = self._plans.get(_shapes_of(firing.step)), firing.step
        if plan is None:
            return False
        if any(self._collector.outcome) and any(tap.has_fired_in(step.serial) for tap, _, _ in self._fires):
            return False
        if any(memory.sketched and memory.keys_of is not step.info for memory in self._memories.values()):
            return False
        assert self._mark is not None
        if self._mark.serial == step.serial:
            return False
        self._mark.serial = step.serial
        self._collector.put_replay(plan, firing, fetch)
        return True

    def _fire_all(self, model: GraphModel, events: list[Event]) -> None:
        """Fire the taps one by one, and derive a plan from the resulting records for later replays."""
        fetch, firing = fetch_here(), self._collector.shared_firing()
        if type(fetch) is not Fetch or firing is None or not is_available():
            for event in events:
                event(model)
            return
        fetch.learned, before = [], self._collector.outcome
        for event in events:
            event(model)
        learned, after = [LearnedRecord(*each) for each in fetch.learned], self._collector.outcome
        fetch.learned = None
        is_known = after == (before[0] + len(learned), before[1]) and self._collector.shared_firing() is firing
        is_alike = all(_is_alike(each, firing) for each in learned)
        if len(self._plans) >= _MAX_PLANS or self._first_port() is not self._planned_port:
            self._plans.clear()
        may_plan = learned and is_known and is_alike and self._is_unconditional() and model.state == self._state
        self._plans[_shapes_of(firing.step)] = ReplayPlan(learned) if may_plan else None
        self._planned_port = self._first_port()
        if may_plan:
            self._mark = _mark_of(self._collector, self._fires)

    def _is_unconditional(self) -> bool:
        """Return whether every port is kept unconditionally, without triggers or gradients, so that a plan is valid."""
        for tap, kind, leaves in self._fires:
            for path, _ in leaves:
                port = tap.ports.get((kind, path))
                if port is None or port.decision.triggers is not None or port.grad is not None or port.keep is None:
                    return False
            if tap.has_grads:
                return False
        return True

    def _first_port(self) -> SitePort | None:
        """Return one port that fires; a different object for each configuration and run, as taps recreate ports."""
        return next((tap.ports.get((kind, leaves[0][0])) for tap, kind, leaves in self._fires if leaves), None)

    def _model_here(self) -> GraphModel | None:
        """Return the model while the recording is open in which the graph was captured; otherwise None."""
        model = self._model()
        return model if model is not None and model.collector is self._collector else None

    def _fetching(self) -> AbstractContextManager[None]:
        fetches = [Fetch(memory) for memory in self._memories.values()]
        if len(fetches) > 1:
            return fetching(_Fetches(fetches))
        return fetching(fetches[0]) if fetches else nullcontext()


class _Fetches(Fetch):
    """Fetches of a graph that runs on several devices, combined."""

    def __init__(self, fetches: list[Fetch]) -> None:
        self._fetches = fetches

    def learn(self, record: Any) -> None:
        """Do nothing: plans are not supported for several devices."""

    def handle_of(self, tensor: Tensor) -> Any:
        """See :class:`Fetch`."""
        return next((found for each in self._fetches if (found := each.handle_of(tensor)) is not None), None)

    def is_row(self, tensor: Tensor) -> bool:
        """See :class:`Fetch`."""
        return any(each.is_row(tensor) for each in self._fetches)

    def is_sketched(self, tensor: Tensor) -> bool:
        """See :class:`Fetch`."""
        return any(each.is_sketched(tensor) for each in self._fetches)

    def sketch_handle_of(self, tensor: Tensor, info: StepInfo, place: DevicePlace | None) -> Any:
        """See :class:`Fetch`."""
        found = (each.sketch_handle_of(tensor, info, place) for each in self._fetches)
        return next((each for each in found if each is not None), None)

    def stats_handle_of(self, tensor: Tensor) -> Any:
        """See :class:`Fetch`."""
        return next((found for each in self._fetches if (found := each.stats_handle_of(tensor)) is not None), None)
