"""ActiveConfig: the configuration in force on one rank, and the changes to apply before the next step."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapscope.core.gc_control import gc_paused
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.core.site import Glob, describe_modules
from tapscope.core.wire import Message
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.device import tap_kernels
from tapscope.dumper.pipeline.console_sink import ConsoleSink
from tapscope.dumper.pipeline.in_memory_sink import InMemorySink
from tapscope.dumper.pipeline.recorder_client import RecorderClient
from tapscope.dumper.recording.config_epoch import ConfigEpochs
from tapscope.dumper.recording.explicit_dump import ExplicitDump
from tapscope.dumper.recording.live_injection import LiveInjection
from tapscope.dumper.recording.model_registry import ModelRegistry
from tapscope.dumper.recording.step_tracker import StepTracker
from tapscope.dumper.selection.expression_usage import ExpressionUsage
from tapscope.dumper.selection.request_capture import valid_requests
from tapscope.dumper.selection.selection import Keep, Selection
from tapscope.dumper.taps.collector import Collector

_log = logging.getLogger("tapscope")


class ActiveConfig:
    """Applies changes of the recorder (with all ranks) and of this process, between steps.

    A change places the taps again and replaces the rules for explicit values.
    """

    def __init__(
        self,
        config: DumperConfig,
        info: RankInfo,
        models: ModelRegistry,
        collector: Collector,
        client: RecorderClient | None,
    ) -> None:
        self.config = self.base = config
        """In force; and what a capture of some steps returns to."""
        self.epochs = ConfigEpochs(self.unmatched, release=self._release_held_steps)
        self.explicit_dump: ExplicitDump | None = None
        """Records explicit values; None when none can be kept."""
        self.injection: LiveInjection | None = None
        """Overwrites values; None without a run to take them from (setting ``inject_from``)."""
        self.steps: StepTracker | None = None
        self.expressions = ExpressionUsage()
        """Which expressions of this run were evaluated, and which were ever true."""
        self.info = info
        self._models = models
        self._collector = collector
        self._client = client
        self._own_change: DumperConfig | None = None  # this process's own change, applied before the next step
        self._capture_steps_left: int | None = None
        self._requests: dict[str, Keep] = {}  # capture levels asked for by requests of the step

    @property
    def may_capture(self) -> bool:
        """Whether anything may be captured now."""
        return self.explicit_dump is not None or self._models.armed or self.is_injecting

    @property
    def is_injecting(self) -> bool:
        """Whether values of the models are overwritten now."""
        return self.injection is not None and self.injection.is_active

    @property
    def has_pending_change(self) -> bool:
        """Whether a change waits for the next step."""
        return self.epochs.latest != self.epochs.applied or self._own_change is not None

    def join_epoch(self, epoch: int, config: Mapping[str, Any]) -> None:
        """A rank that joins late takes over what the others have agreed on."""
        self.epochs.applied = max(self.epochs.applied, epoch)
        if epoch:
            self.config = self.base = self.base.updated(config)

    def apply_due(self, info: StepInfo, reopen: Callable[[Path], None]) -> int:
        """Apply pending changes before a step; returns the epoch in force."""
        client = self._client
        if client is not None:
            self.apply_agreed(info.step, info.epoch, reopen)
            client.set_position(step=info.step, capture_steps_left=self._capture_steps_left)
        self.apply_own()
        self._apply_requests(info.asked)
        self._apply_stop()
        return self.epochs.applied

    def apply_agreed(self, step: int, epoch: int | None, reopen: Callable[[Path], None]) -> None:
        """Apply what the recorder and all ranks have agreed on for ``step``, up to ``epoch`` when the host decides."""
        client = self._client
        if client is None:
            return
        for number, change in self.epochs.take_due(step, epoch):
            if "run" in change:
                reopen(Path(change["run"]))
            else:
                self._collector.retention.capture_stop.resume()
                self.base = self.base.updated(change["base"])
                self._configure(self.base.updated(change["config"]))
            client.put_message(Message("applied", {"epoch": number, "step": step, "current_step": step}))
            client.queue.flush()

    def configure(self, config: DumperConfig, *, now: bool) -> None:
        """Set this process's own change; applied ``now``, or before the next step."""
        self._own_change = config
        if now:
            self.apply_own()

    def apply_own(self) -> None:
        """Apply this process's own change, if there is one."""
        own, self._own_change = self._own_change, None
        if own is not None:
            self.base = own
            self._collector.retention.capture_stop.resume()
            self._configure(own)

    def after_step(self) -> None:
        """A step ended: count down a capture of some steps, and end it after the last one."""
        self._apply_stop()
        if self._capture_steps_left is None or self._client is None:
            return
        self._capture_steps_left -= 1
        if self._capture_steps_left <= 0:
            self._configure(self.base)
        self._client.set_position(capture_steps_left=self._capture_steps_left)
        self._client.queue.flush()

    def _apply_stop(self) -> None:
        """A trigger or a budget has stopped the capture: remove all taps, so that nothing costs anything."""
        if self._collector.retention.capture_stop.stopped is not None and self.may_capture:
            self.select()

    def _apply_requests(self, wishes: Mapping[str, str]) -> None:
        """Place taps for what the requests of the next step ask for."""
        requests, problem = valid_requests(wishes)
        if problem is not None:
            self._collector.counters.report("step", problem)
        if requests != self._requests:
            self._requests = requests
            self.select()
            if self._client is not None:
                self._client.put_event("asked", requests=requests)

    def _release_held_steps(self, past: int) -> tuple[int, int]:
        released = self._collector.retention.release(past, "asked over the control address")
        return len(released.steps), released.nbytes

    def select(self, config: DumperConfig | None = None) -> None:
        """Place taps for the configuration in force, or for ``config``; none while the capture is stopped."""
        requests = self._requests
        if config is None and self._collector.retention.capture_stop.stopped is not None:
            config, requests = self.config.updated({"enabled": False}), {}
        config = config or self.config
        info, usage = self.info, self.expressions
        selection = Selection(config, rank=info.rank, coords=info.coords, requests=requests, usage=usage)
        self._compile_kernels(config)
        self._collector.select(selection)
        sketches = "sketch" in _levels(config)
        self._collector.capturer.sketcher.place(info.mesh, info.coords, is_wanted=sketches)
        if config.console:
            self._collector.counters.sink = ConsoleSink(self._collector.counters.sink, self.info.rank)
        self._models.select(selection, self._collector)
        if self.injection is not None:
            self.injection.place(config.inject if config.enabled else (), self._models.modules, self._collector)
        assert self.steps is not None
        wanted = config.triggers or _levels(config) != {"off"}
        may_keep = config.enabled and bool(wanted)
        latest = lambda: self.explicit_dump  # noqa: E731
        self.explicit_dump = ExplicitDump(self._collector, self.steps, selection, latest) if may_keep else None

    def _compile_kernels(self, config: DumperConfig) -> None:
        """Compile kernels that taps may launch: not while everything is recorded in full, which needs none.

        With ``keep="off"`` too, so that the first step is not delayed once statistics are switched on.
        """
        levels, info = _levels(config), self.info
        if levels != {"full"}:
            sketches = "sketch" in levels
            tap_kernels.compile_ahead(
                self._models.modules, sketches=sketches, rank=info.rank, world_size=info.world_size
            )

    def put_config_event(self) -> None:
        """Write the configuration in force into the run."""
        if self._client is not None:
            names = (*RUNTIME_FIELDS, "capture_steps")
            shown = {name: value for name, value in self.config.to_json().items() if name in names}
            self._client.put_event("config", epoch=self.epochs.applied, **shown)

    @contextlib.contextmanager
    def capture(self, captures: InMemorySink, settings: Mapping[str, Any]) -> Iterator[None]:
        """Redirect records into ``captures``, with ``settings`` in force and the dumper enabled."""
        collector = self._collector
        config = self.config.updated({"enabled": True} | dict(settings))
        collector.capturer.redirect([*collector.capturer.memory_sinks, captures])
        self.select(config)
        try:
            yield
        finally:
            collector.capturer.redirect([each for each in collector.capturer.memory_sinks if each is not captures])
            self.select()

    def update_rank_info(self, info: RankInfo) -> None:
        """Groups were created after the run was opened: update this rank's identity."""
        if info.rank != self.info.rank:
            text = "tapscope records as rank %d, which this process was when the run was opened; it is rank %d now: "
            _log.warning(text + "open the run after init_process_group", self.info.rank, info.rank)
            return
        self.info = info
        if self._client is not None:
            mesh, coords = dict(info.mesh), dict(info.coords)
            self._client.put_event("mesh", world_size=info.world_size, mesh=mesh, coords=coords)
        self.select()

    def refusal(self, config: DumperConfig) -> str | None:
        """Why the configuration is refused: a rule matches no site, on a rank that should have all sites."""
        info = self.info
        may_be_a_stage = info.world_size > 1 and (not info.mesh or info.mesh.get("pp", 1) > 1)
        unmatched = {} if may_be_a_stage or not self._models else self.unmatched(config)
        return next(iter(unmatched.values()), None)

    @gc_paused()
    def unmatched(self, config: DumperConfig) -> dict[str, str]:
        """Rules that match no site here -> explanation; ports known only from firings count once seen."""
        ports, opened = self._models.ports()
        selection = Selection(config, rank=self.info.rank, coords=self.info.coords)
        rules = selection.unmatched(ports, opened, taps=True)
        injections = {} if self.injection is None else self.injection.unmatched(config.inject, self._models.modules)
        return injections | {
            str(rule): f"rule {rule}: no site matches {rule.glob!r}; {_suggestion(rule.glob, ports)}" for rule in rules
        }

    def unused_rules(self) -> list[str]:
        """Rules that matched nothing when only explicit values could come; most likely a typing error."""
        if self.explicit_dump is None or self._models:
            return []
        globs = {str(rule): Glob(rule.glob) for rule in self.config.rules if rule.keep != "off"}
        sites = self.explicit_dump.sites
        return [text for text, glob in globs.items() if not any(glob.matches(site) for site in sites)]

    def _configure(self, config: DumperConfig) -> None:
        self.config = config
        self._capture_steps_left = config.capture_steps
        self.select()
        self.put_config_event()
        if self._client is not None:
            self._client.set_position(capture_steps_left=self._capture_steps_left)


def _levels(config: DumperConfig) -> set[Keep]:
    """The capture levels of sites that some rule matches, and of the others."""
    return {config.keep, *(rule.keep for rule in config.rules)}


def _suggestion(glob: str, ports: Mapping[str, Sequence[str]]) -> str:
    """Suggestions for a ``glob`` that matches nothing: ports of its modules, else the modules around it, or layers."""
    if (meant := _completed_glob(glob)) and any(
        Glob(meant.rpartition(":")[0] + ":*").matches(f"{path}:out") for path in ports
    ):
        return f"did you mean '{meant}'?"
    head, colon, _ = glob.rpartition(":")
    modules = Glob(f"{head}:*")
    near = [path for path in ports if head and modules.matches(f"{path}:out") and ports[path]] if colon else []
    if near:
        return f"ports of {near[0] or 'the model itself'} are {', '.join(dict.fromkeys(ports[near[0]]))}"
    return describe_modules(glob, (f"{path}:out" for path in ports))


def _completed_glob(glob: str) -> str | None:
    """``glob`` with the colon before its port, or the brackets after it, if they were forgotten."""
    head, colon, port = glob.rpartition(":")
    if colon:
        match = re.fullmatch(r"(in|tap|param|buffer)(\.grad)?", port)
        return f"{head}:{match[1]}[*]{match[2] or ''}" if match else None
    match = re.fullmatch(r"(?:(.*)\.|(.*\*)|)((?:in|out|tap|param|buffer)(?:\[.*\])?(?:\.grad)?)", glob)
    return f"{match[1] or match[2] or '*'}:{match[3]}" if match else None
