"""Dumper: taps a model and streams what its rules select into a run."""

import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import ledger
from .._version import __version__
from ..errors import ConfigError, RecorderError, RuleError, StepError
from ..ledger import StepCounts
from ..observe import RankInfo, RowRun, StepInfo
from ..record import Key, Record
from ..site import describe_layers
from ..wire import Message
from . import capture, session
from .config import RUNTIME_FIELDS, DumperConfig, Selection
from .flatten import flatten, plain_value
from .pipeline import Pending, Pipeline
from .rows import step_from_call
from .taps import Hooks, Port, RootWrapper, Tap, find_taps, slots_as_ranges, usable_dims

_log = logging.getLogger("tapscope")
_MAX_COMPLAINTS = 20


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
        self.config = (config or DumperConfig()).updated(settings)
        self.out = Path(out)
        self.info = info or _rank_info(model)
        self._force = force
        self._model = model
        self._taps = find_taps(model)
        self._hooks = Hooks(model, self._taps, self._fire)
        self._root_tap = self._taps[0]
        self._selection = Selection.of(self.config)
        self._base_config = self.config
        self._root: RootWrapper | None = None
        self._pipeline: Pipeline | None = None
        self._step: StepInfo | None = None
        self._step_announced = False
        self._step_began = 0.0
        self._next_step = 0
        self._serial = 0
        self._seq = 0
        self._counts = StepCounts()
        self._num_outside = 0
        self._num_complaints = 0
        self._row_ranges: dict[str, tuple[tuple[int, int], ...]] = {}
        self._epoch = 0
        self._prepared: dict[int, dict[str, Any]] = {}
        self._commit: tuple[int, int] | None = None
        self.http: str | None = None
        """``HOST:PORT`` of the HTTP control, when asked for."""

    # ---- life -------------------------------------------------------------------------------------------

    def open(self) -> "Dumper":
        """Join or start the recorder and place the taps."""
        if self._pipeline is not None:
            raise StepError("this Dumper is already open")
        self._check_rules(self._selection)
        options = {"control": self.config.control, "segment_bytes": self.config.segment_bytes}
        found = session.join(self.out, options, force=self._force, first=self.info.rank == 0)
        pipeline = Pipeline(
            found["address"],
            found["pid"],
            queue_bytes=self.config.queue_bytes,
            block_timeout_s=None if self.config.policy == "drop" else self.config.block_timeout_s,
            on_message=self._on_message,
        )
        self._pipeline = pipeline
        try:
            self.http = pipeline.greet(self._hello()).fields.get("http")
        except RecorderError:
            self._pipeline = None
            raise
        self._root = RootWrapper(self._model, self._around_root)
        self._hooks.install(self._selection)
        return self

    def close(self) -> None:
        """Take the taps away, send what is left and say what is missing."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        never_fired = self._never_fired()
        self._hooks.remove()
        if self._root is not None:
            self._root.remove()
        farewell = {"type": "event", "kind": "close", "reason": "closed", "never_fired": never_fired}
        pipeline.put_line(farewell | {"outside_step": self._num_outside, "failed_late": pipeline.num_failed})
        lost = pipeline.close(Message("close", {"at": self._next_step - 1}))
        if never_fired:
            _log.warning("tapscope: %d taps never fired: %s", len(never_fired), ", ".join(never_fired[:4]))
        if self._num_outside:
            _log.warning("tapscope: %d values fired outside a step and were not kept; use step()", self._num_outside)
        if lost:
            _log.warning("tapscope: %s is incomplete: %s", self.out, lost)

    def __enter__(self) -> "Dumper":
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

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
        finally:
            self.after_step({})

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self._next_step

    def before_step(self, info: StepInfo) -> None:
        """Open ``info`` as the current step; a change of configuration that is due is applied first."""
        if self._step is not None:
            raise StepError(f"step {self._step.step} is still open; steps do not nest")
        if info.step < self._next_step:
            raise StepError(f"step {info.step} comes after step {self._next_step - 1}; steps never go back in a run")
        pipeline = self._pipeline
        if pipeline is None:
            return
        self._apply_due(info)
        self._step, self._next_step = info, info.step + 1
        self._serial += 1
        self._counts = StepCounts()
        self._row_ranges = {name: slots_as_ranges(slots) for name, slots in info.row_sets.items()}
        self._step_announced = False
        pipeline.at = info.step
        self._step_began = time.perf_counter()

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Close the current step. With the strict policy, raises RecorderError when anything of it was lost."""
        info, self._step, pipeline = self._step, None, self._pipeline
        if info is None or pipeline is None:
            return
        if self.armed:
            self._announce_step(pipeline, info)
            measured = {"latency_s": time.perf_counter() - self._step_began, "num_tokens": float(info.num_rows)}
            for name, value in (measured | dict(metrics)).items():
                pipeline.put_line({"type": "metric", "step": info.step, "name": name, "value": float(value)})
            pipeline.put_line(ledger.end_line(info.step, self._counts))
            pipeline.kick()
        if pipeline.capture_left is not None:
            self._count_down(pipeline)
        lost = self._counts.dropped + self._counts.failed
        if lost and self.config.policy == "strict":
            raise RecorderError(
                f"{lost} values of step {info.step} were lost: {pipeline.dead or 'see the events of the run'}"
            )

    def metric(self, name: str, value: float) -> None:
        """Record a named number of the current step."""
        if self._pipeline is not None and self._step is not None:
            self._pipeline.put_line({"type": "metric", "step": self._step.step, "name": name, "value": float(value)})

    # ---- Arming -----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The configuration epoch this rank has been told to apply at its next step."""
        return self._commit[0] if self._commit else self._epoch

    @property
    def armed(self) -> bool:
        """Whether any tap is in place."""
        return bool(self._hooks.armed)

    # ---- firing (in the model's forward: nothing may escape) --------------------------------------------

    def _around_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pipeline is None:
            return forward(*args, **kwargs)
        alone = self._step is None
        if alone:
            self.before_step(self._described(StepInfo(step=self._next_step), args, kwargs))
        elif self._step is not None and not self._step.grid and not self._step_announced:
            self._step = self._described(self._step, args, kwargs)
        try:
            if self.armed:
                self._fire(self._root_tap, "in", (args, kwargs))
            output = forward(*args, **kwargs)
            if self.armed:
                self._fire(self._root_tap, "out", output)
            return output
        finally:
            if alone:
                self.after_step({})

    def _described(self, info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInfo:
        """The step with the rows that the root's own arguments tell of, where the host told none."""
        try:
            found = step_from_call(info.step, args, kwargs)
        except Exception as error:  # noqa: BLE001 - unknown arguments of an unknown model
            self._complain("step", f"rows unknown: {type(error).__name__}: {error}")
            return info
        if info.phase != "forward":
            found = replace(found, phase=info.phase)
        return replace(found, epoch=info.epoch)

    def _announce_step(self, pipeline: Pipeline, info: StepInfo) -> None:
        if not self._step_announced:
            self._step_announced = True
            pipeline.put_line(ledger.begin_line(info, self._epoch))

    def _fire(self, tap: Tap, kind: str, value: Any) -> None:
        try:
            if self._pipeline is None:
                return
            if self._step is None:
                self._num_outside += 1
                return
            self._announce_step(self._pipeline, self._step)
            tap.fired = True
            occurrence = tap.occurrence(self._serial, kind)
            leaves = flatten(tap.named_inputs(*value) if kind == "in" else value)
            for path, leaf in leaves:
                port = tap.port(kind, path, self._selection)
                if port.keep != "off":
                    self._take(self._pipeline, tap, port, leaf, occurrence)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counts.failed += 1
            self._complain(tap.path, f"{type(error).__name__}: {error}")

    def _take(self, pipeline: Pipeline, tap: Tap, port: Port, leaf: Any, occurrence: int) -> None:
        assert self._step is not None
        self._counts.seen += 1
        key = Key(port.site, self._step.step, self.info.rank, occurrence)
        try:
            pending = self._pending(pipeline, port, leaf, key)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counts.failed += 1
            self._complain(port.site, str(error) or type(error).__name__)
            return
        if not port.announced:
            port.announced = True
            pipeline.put_line({"type": "site", "site": port.site, "class": tap.module_class, "params": tap.params})
        if pipeline.put(pending):
            self._counts.sent += 1
        else:
            self._counts.dropped += 1
        self._seq += 1

    def _pending(self, pipeline: Pipeline, port: Port, leaf: Any, key: Key) -> Pending:
        if not isinstance(leaf, torch.Tensor):
            return Pending(Record(key, self._seq, None, (), value=plain_value(leaf)), None, 0)
        tensor = capture.local_tensor(leaf)
        shape = tuple(tensor.shape)
        if not port.announced:
            port.dims, problem = usable_dims(port.dims, shape)
            if problem:
                self._complain(port.site, problem)
        rows = self._row_ranges.get(port.row_set) if port.row_set else None
        rec = Record(key, self._seq, capture.dtype_name(tensor), shape, port.dims, rows)
        if port.keep == "full":
            return Pending(rec, capture.snapshot(tensor, pipeline.pool), tensor.numel())
        stats, digest = capture.measure(tensor)
        return Pending(replace(rec, stats=stats, hash=digest), None, 0)

    def _complain(self, where: str, reason: str) -> None:
        self._num_complaints += 1
        if self._pipeline is not None and self._num_complaints <= _MAX_COMPLAINTS:
            event = {"type": "event", "kind": "failed", "where": where, "reason": reason}
            self._pipeline.put_line(event | {"step": self._step.step if self._step else None})

    # ---- configuration ----------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> Message | None:
        """In the pipeline's thread: the model is not touched here."""
        if message.kind == "prepare":
            return self._prepare(message)
        if message.kind == "commit":
            self._commit = (int(message["epoch"]), int(message["step"]))
        elif message.kind == "cancel":
            self._prepared.pop(int(message["epoch"]), None)
        return None

    def _prepare(self, message: Message) -> Message:
        epoch, problem = int(message["epoch"]), None
        try:
            if "config" in message.fields:
                self._check_rules(Selection.of(DumperConfig().updated(message["config"])))
            self._prepared[epoch] = message.fields
        except (ConfigError, RuleError) as error:
            problem = str(error)
        return Message("accept", {"epoch": epoch, "problem": problem, "at": self._next_step - 1})

    def _apply_due(self, info: StepInfo) -> None:
        epoch = info.epoch
        if epoch is None and self._commit and info.step >= self._commit[1]:
            epoch = self._commit[0]
        if epoch is None or epoch == self._epoch or epoch not in self._prepared:
            return
        change, pipeline = self._prepared.pop(epoch), self._pipeline
        assert pipeline is not None
        self._epoch = epoch
        if "run" in change:
            self._reopen(pipeline, change["run"])
        else:
            self._base_config = DumperConfig().updated(change["base"])
            self._configure(pipeline, DumperConfig().updated(change["config"]))
        pipeline.put_message(Message("applied", {"epoch": epoch, "step": info.step, "at": info.step}))
        pipeline.kick()

    def _configure(self, pipeline: Pipeline, config: DumperConfig) -> None:
        self.config, self._selection = config, Selection.of(config)
        pipeline.capture_left = config.capture_steps
        self._hooks.install(self._selection)
        shown = {name: value for name, value in config.to_json().items() if name in (*RUNTIME_FIELDS, "capture_steps")}
        pipeline.put_line({"type": "event", "kind": "config", "epoch": self._epoch, **shown})

    def _count_down(self, pipeline: Pipeline) -> None:
        assert pipeline.capture_left is not None
        pipeline.capture_left -= 1
        if pipeline.capture_left <= 0:
            self._configure(pipeline, self._base_config)
        pipeline.kick()

    def _reopen(self, pipeline: Pipeline, run: str) -> None:
        pipeline.put_message(Message("reopen", {"run": run, "never_fired": self._never_fired()}))
        self.out = Path(run)
        self._seq = 0
        for tap in self._taps:
            tap.forget()
            tap.fired = False

    def _check_rules(self, selection: Selection) -> None:
        paths = {tap.path: tap.known_ports() for tap in self._taps}
        seen = [port.site for tap in self._taps for port in list(tap.ports.values())]
        for site in seen:
            path, _, name = site.rpartition(":")
            paths[path].append(name)
        selection.check_matches(paths, describe_layers(f"{path}:out" for path in paths))

    def _never_fired(self) -> list[str]:
        if self._next_step == 0:
            return []
        return [f"{tap.path}:out" for tap in self._hooks.armed if not tap.fired]

    def _hello(self) -> Message:
        info = self.info
        opening = {
            "world_size": info.world_size,
            "mesh": dict(info.mesh),
            "coords": dict(info.coords),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        manifest = {
            "tapscope": __version__,
            "framework": info.framework,
            "model": info.model,
            "dtype": info.dtype,
            "mesh": dict(info.mesh),
            "world_size": info.world_size,
            "command": sys.argv,
            "seeds": {"torch": torch.initial_seed()},
            "config": self._base_config.to_json(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        modules = [[tap.path, tap.module_class, tap.known_ports()] for tap in self._taps]
        fields = {"rank": info.rank, "opening": opening, "manifest": manifest, "modules": modules}
        return Message("hello", fields | {"config": self._base_config.to_json()})


def attach(
    model: nn.Module, info: RankInfo, *, out: str, config: DumperConfig | None = None, force: bool = False
) -> Dumper:
    """An :data:`~tapscope.observe.ObserverFactory` once ``out`` and ``config`` are bound (functools.partial)."""
    return Dumper(model, out, config=config, force=force, info=info).open()


def _rank_info(model: nn.Module) -> RankInfo:
    rank, world = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parameter = next(model.parameters(), None)
    dtype = capture.dtype_name(parameter) if parameter is not None else ""
    config = getattr(model, "config", None)
    name = str(getattr(config, "_name_or_path", "") or type(model).__name__)
    framework = "transformers" if type(model).__module__.startswith("transformers.") else "torch"
    return RankInfo(rank=rank, world_size=world, framework=framework, model=name, dtype=dtype)
