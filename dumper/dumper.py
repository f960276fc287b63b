"""Dumper: taps a model and streams what its rules select into a run."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tapscope.dumper import manifest, session
from tapscope.dumper.adoption import Adoption
from tapscope.dumper.collector import Collector
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.pipeline import Pipeline
from tapscope.dumper.root import RootWrapper
from tapscope.dumper.rows import described
from tapscope.dumper.rules import Selection
from tapscope.dumper.steps import OpenStep
from tapscope.dumper.taps import Hooks, find_taps
from tapscope.errors import ConfigError, RecorderError, RuleError, StepError
from tapscope.ledger import StepCounts, event_line
from tapscope.observe import RankInfo, RowRun, StepInfo
from tapscope.site import describe_layers
from tapscope.wire import Message

_log = logging.getLogger("tapscope")


class Dumper:
    """Streams a model's tensors to a run while the context is open.

    ::

        with Dumper(model, out="run", keep="full") as dumper:
            with dumper.step(phase="prefill"):
                model(input_ids=ids)

    A call of the model outside ``step()`` is a step of its own. Each rank of a job makes its own Dumper with
    the same ``out``; the first starts the recorder process. A Dumper is also a
    :class:`~tapscope.observe.StepObserver`, for hosts that call one.

    Raises RunExistsError, RuleError (a rule that matches no site), ConfigError, ListenError or RecorderError
    when opened; never anything in the model's forward.
    """

    def __init__(
        self,
        model: nn.Module,
        out: str | Path,
        *,
        config: DumperConfig | None = None,
        force: bool = False,
        info: RankInfo | None = None,
        **settings: Any,
    ) -> None:
        """``settings`` are fields of :class:`DumperConfig`; ``force`` replaces an old run at ``out``."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; a Dumper watches a torch.nn.Module")
        self.config = (config or DumperConfig()).updated(settings)
        self.out = Path(out)
        self.info = info or manifest.rank_info(model)
        self.http: str | None = None
        """``HOST:PORT`` of the HTTP control, when asked for."""
        self._force = force
        self._model = model
        self._taps = find_taps(model)
        self._hooks = Hooks(model, self._taps, self._fire)
        self._adoption = Adoption(self._unmatched)
        self._base_config = self.config
        self._root: RootWrapper | None = None
        self._root_lock = threading.RLock()
        self._pipeline: Pipeline | None = None
        self._collector: Collector | None = None
        self._next_step = 0

    # ---- life -------------------------------------------------------------------------------------------

    def open(self) -> "Dumper":
        """Join or start the recorder and place the taps."""
        if self._pipeline is not None:
            raise StepError("this Dumper is already open")
        self.config, self._next_step = self._base_config, 0
        for tap in self._taps:
            tap.forget()
            tap.fired = False
        unmatched = self._unmatched(self.config)
        if unmatched and not self._may_be_a_stage():
            raise RuleError(next(iter(unmatched.values())))
        hello = manifest.hello(self.info, self.config, self._taps, unmatched)
        pipeline, welcome = session.connect(self.out, self.config, hello, self._on_message, force=self._force)
        self._pipeline, self._collector = pipeline, (collector := Collector(pipeline.backlog))
        pipeline.tell = lambda: {"dropped": collector.num_dropped, "failed": collector.num_failed}
        self._adoption = Adoption(self._unmatched, welcome["epoch"])
        self.http = welcome["http"]
        if welcome["epoch"]:  # a rank that comes late takes over what the others have agreed on
            self.config = self._base_config = self._base_config.updated(welcome["config"])
            self.out = Path(welcome["run"])
        self._root = RootWrapper(self._model, self._around_root)
        self._select(self._collector)
        return self

    def close(self) -> None:
        """Take the taps away, send what is left and say what is missing (strict: raise RecorderError)."""
        lost = self._close()
        if lost and self.config.policy == "strict":
            raise RecorderError(f"{self.out} is incomplete: {lost}")

    def _close(self) -> str | None:
        pipeline, collector = self._pipeline, self._collector
        self._pipeline = self._collector = None
        if pipeline is None or collector is None:
            return None
        never_fired = self._never_fired()
        self._hooks.remove()
        if self._root is not None:
            self._root.remove()
        collector.settle()
        fields: dict[str, Any] = {"never_fired": never_fired, "outside_step": collector.num_outside}
        if (error := sys.exc_info()[0]) is not None:  # closed on the way out of a failure: not all steps came
            fields["interrupted"] = error.__name__
        pipeline.put_line(event_line("close", **fields))
        lost = pipeline.close(Message("close", {"at": self._next_step - 1, "load": pipeline.load()}))
        facts = [
            (len(never_fired), f"taps that never fired ({len(never_fired)}): {', '.join(never_fired[:4])}"),
            (collector.num_outside, f"{collector.num_outside} firings outside a step were not kept; use step()"),
            (collector.num_dropped, f"{collector.num_dropped} values were dropped; {self.out} is incomplete"),
            (
                collector.num_failed,
                f"{collector.num_failed} values could not be captured (tapscope info says why)",
            ),
            (lost, f"{self.out} is incomplete: {lost}"),
        ]
        for amount, sentence in facts:
            if amount:
                _log.warning("tapscope: %s", sentence)
        return lost

    def _on_message(self, message: Message) -> Message | None:
        return self._adoption.on_message(message, self._next_step - 1)

    def __enter__(self) -> "Dumper":
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close()  # the caller's own exception is the one to see

    # ---- steps ------------------------------------------------------------------------------------------

    @contextmanager
    def step(
        self,
        *,
        phase: str = "forward",
        grid: Sequence[int] = (),
        rows: Sequence[RowRun] = (),
        token_ids: Sequence[int] = (),
    ) -> Iterator[StepInfo]:
        """One step of the host; everything that fires inside belongs to it. Steps do not nest (StepError)."""
        if wrong := [run for run in rows if not isinstance(run, RowRun) or not isinstance(run.request, str)]:
            raise StepError(f"rows: {wrong[0]!r} is no tapscope.observe.RowRun with a text for its request")
        if self._collector is None:
            raise StepError("this Dumper is not open; use it as a context manager, or call open() first")
        info = StepInfo(
            step=self._next_step, phase=phase, grid=tuple(grid), rows=tuple(rows), token_ids=tuple(token_ids)
        )
        with self.step_of(info):
            yield info

    @contextmanager
    def step_of(self, info: StepInfo) -> Iterator[None]:
        """A step that the caller describes in full; ``info.step`` must not go back."""
        self.before_step(info)
        try:
            yield
        except BaseException as error:
            self._end_step({}, type(error).__name__)
            raise
        self.after_step({})

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self._next_step

    def before_step(self, info: StepInfo) -> None:
        """Open ``info`` as the current step; a change of configuration that is due is applied first."""
        collector = self._collector
        if collector is None:
            return
        if collector.step is not None:
            raise StepError(f"step {collector.step.info.step} is still open; steps do not nest")
        if info.step < self._next_step:
            raise StepError(f"step {info.step} comes after step {self._next_step - 1}; steps never go back in a run")
        self._apply_due(info)
        self._next_step = info.step + 1
        collector.begin(info, self._adoption.applied)
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.at = info.step

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Close the current step. With the strict policy, raises RecorderError when anything was lost."""
        step = self._end_step(metrics, None)
        pipeline = self._pipeline
        if step is None or pipeline is None or self.config.policy != "strict":
            return
        lost = step.counts.dropped + step.counts.failed
        if lost or not pipeline.backlog.drained(max(self.config.block_timeout_s, 1.0)):
            reason = pipeline.dead or ("see the events of the run" if lost else "the recorder does not acknowledge")
            raise RecorderError(f"values up to step {self._next_step - 1} were lost ({lost} in this step): {reason}")

    def _end_step(self, metrics: Mapping[str, float], aborted: str | None) -> OpenStep | None:
        pipeline, collector = self._pipeline, self._collector
        if pipeline is None or collector is None or (step := collector.step) is None:
            return None
        if self.armed:
            collector.end(metrics, aborted)
        collector.step = None
        if pipeline.capture_left is not None:
            self._count_down(pipeline, collector)
        return step

    @contextmanager
    def micro(self, number: int) -> Iterator[None]:
        """What fires inside belongs to this micro-batch of the open step, from 0; gradients follow their forward."""
        step = self._collector.step if self._collector is not None else None
        if step is None:
            raise StepError(f"micro-batch {number} came outside a step; use it inside `with dumper.step():`")
        before, step.micro = step.micro, number
        try:
            yield
        finally:
            step.micro = before

    def metric(self, name: str, value: float) -> None:
        """Record a named number of the current step; outside a step raises StepError."""
        if self._collector is None or self._collector.step is None:
            raise StepError(f"metric {name!r} came outside a step; call it inside `with dumper.step():`")
        self._collector.metric(self._collector.step.info.step, name, value)

    # ---- Arming -----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The configuration epoch this rank has been told to apply at its next step."""
        return self._adoption.wanted

    @property
    def armed(self) -> bool:
        """Whether any tap is in place."""
        return bool(self._hooks.armed)

    # ---- in the model's forward: nothing may escape -----------------------------------------------------

    def _fire(self, tap: Any, kind: str, value: Any) -> None:
        if self._collector is not None:
            self._collector.fire(tap, kind, value)

    def _around_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        collector = self._collector
        if collector is None:
            return forward(*args, **kwargs)
        step = self._enter_root(collector, args, kwargs)
        try:
            output = self._watched(collector, forward, args, kwargs)
        except BaseException as error:
            self._leave_root(step, type(error).__name__)
            raise
        self._leave_root(step, None)
        return output

    def _enter_root(self, collector: Collector, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenStep | None:
        """The step that this call is part of; None when the host opened it and will close it.

        Threads that call the model at once share a step, which ends with the last of them.
        """
        with self._root_lock:
            step = collector.step
            if step is None:
                self.before_step(self._described(collector, StepInfo(step=self._next_step), args, kwargs))
                step = collector.step
                if step is not None:
                    step.num_callers = 1
                return step
            if step.num_callers:
                step.num_callers += 1
                return step
        if step.may_describe():
            step.describe(self._described(collector, step.info, args, kwargs))
        elif step.rows_of_first_call:
            text = f"the model was called again in step {step.info.step}, whose rows are those of the first call"
            collector.complain("step", text)
        return None

    def _leave_root(self, step: OpenStep | None, aborted: str | None) -> None:
        if step is None:
            return
        with self._root_lock:
            step.num_callers -= 1
            step.counts.aborted = step.counts.aborted or aborted
            if step.num_callers or self._collector is None or self._collector.step is not step:
                return
            if step.counts.aborted:
                self._end_step({}, step.counts.aborted)
            else:
                self.after_step({})

    def _watched(
        self, collector: Collector, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        root = self._taps[0]
        if self.armed and "in" in root.kinds:
            collector.fire(root, "in", (args, kwargs))
        output = forward(*args, **kwargs)
        if self.armed and "out" in root.kinds:
            collector.fire(root, "out", output)
        return output

    def _described(
        self, collector: Collector, info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepInfo:
        """The step with the rows that the root's own arguments tell of, where the host told none."""
        if not self.armed and self._adoption.wanted == self._adoption.applied:
            return info
        try:
            return described(info, args, kwargs)
        except Exception as error:  # noqa: BLE001 - unknown arguments of an unknown model
            collector.complain("step", f"rows unknown: {type(error).__name__}: {error}")
            return info

    # ---- configuration, between steps -------------------------------------------------------------------

    def _apply_due(self, info: StepInfo) -> None:
        pipeline, collector = self._pipeline, self._collector
        if pipeline is None or collector is None:
            return
        for epoch, change in self._adoption.due(info.step, info.epoch):
            if "run" in change:
                self._reopen(pipeline, collector, change["run"])
            else:
                self._base_config = self._base_config.updated(change["base"])
                self._configure(pipeline, collector, self._base_config.updated(change["config"]))
            pipeline.put_message(Message("applied", {"epoch": epoch, "step": info.step, "at": info.step}))
            pipeline.backlog.flush()

    def _configure(self, pipeline: Pipeline, collector: Collector, config: DumperConfig) -> None:
        self.config = config
        pipeline.capture_left = config.capture_steps
        self._select(collector)
        self._note_config(pipeline)

    def _note_config(self, pipeline: Pipeline) -> None:
        config = self.config
        shown = {name: value for name, value in config.to_json().items() if name in (*RUNTIME_FIELDS, "capture_steps")}
        pipeline.put_line(event_line("config", epoch=self._adoption.applied, **shown))

    def _select(self, collector: Collector) -> None:
        selection = Selection.of(self.config, rank=self.info.rank, coords=self.info.coords)
        collector.select(selection)
        self._hooks.install(selection)

    def _count_down(self, pipeline: Pipeline, collector: Collector) -> None:
        assert pipeline.capture_left is not None
        pipeline.capture_left -= 1
        if pipeline.capture_left <= 0:
            self._configure(pipeline, collector, self._base_config)
        pipeline.backlog.flush()

    def _reopen(self, pipeline: Pipeline, collector: Collector, run: str) -> None:
        pipeline.put_message(Message("reopen", {"run": run, "never_fired": self._never_fired()}))
        self.out = Path(run)
        collector.restart()
        self._note_config(pipeline)
        for tap in self._taps:
            tap.forget()
            tap.fired = False

    def _unmatched(self, config: DumperConfig) -> dict[str, str]:
        """Rules that can match no site here -> a sentence; ports that only a firing shows count once seen."""
        ports = {tap.path: tap.known_ports() for tap in self._taps}
        for tap in self._taps:
            ports[tap.path] += [port.site.rpartition(":")[2] for port in list(tap.ports.values())]
        opened = [tap.path for tap in self._taps if tap.is_open]
        there = describe_layers(f"{path}:out" for path in ports)
        selection = Selection.of(config, rank=self.info.rank, coords=self.info.coords)
        rules = selection.unmatched(ports, opened)
        return {str(rule): f"rule {rule}: no site matches {rule.glob!r}; {there}" for rule in rules}

    def _may_be_a_stage(self) -> bool:
        """Whether other ranks may hold layers that this one lacks."""
        mesh = self.info.mesh
        return self.info.world_size > 1 and (not mesh or mesh.get("pp", 1) > 1)

    def _never_fired(self) -> list[str]:
        return [f"{tap.path}:out" for tap in self._hooks.armed if not tap.fired] if self._next_step else []


def attach(
    model: nn.Module, info: RankInfo, *, out: str, config: DumperConfig | None = None, force: bool = False
) -> Dumper:
    """An :data:`~tapscope.observe.ObserverFactory` once ``out`` and ``config`` are bound (functools.partial)."""
    return Dumper(model, out, config=config, force=force, info=info).open()
