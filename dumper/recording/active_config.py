"""ActiveConfig: the active configuration of one rank, and the changes to apply before the next step."""

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
    """Applies configuration changes between steps: those agreed on by all ranks, and those of this process.

    A change replaces the taps and the rules for explicit dumps.
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
        """Active configuration, and the base configuration that applies again after a capture of N steps."""
        self.epochs = ConfigEpochs(self.unmatched, release=self._release_held_steps)
        self.explicit_dump: ExplicitDump | None = None
        """Recorder of explicit dumps; None while the configuration keeps none of them."""
        self.injection: LiveInjection | None = None
        """Overwrites tensors with stored values; None without the setting ``inject_from``."""
        self.steps: StepTracker | None = None
        self.expressions = ExpressionUsage()
        """Tracks which expressions of this run were evaluated, and which were ever true."""
        self.info = info
        self._models = models
        self._collector = collector
        self._client = client
        self._own_change: DumperConfig | None = None  # change by this process, applied before the next step
        self._capture_steps_left: int | None = None
        self._requests: dict[str, Keep] = {}  # request id -> capture level that the request asks for

    @property
    def may_capture(self) -> bool:
        """Whether any value may be captured now."""
        return self.explicit_dump is not None or self._models.armed or self.is_injecting

    @property
    def is_injecting(self) -> bool:
        """Whether injection is active, i.e. overwrites values of the models."""
        return self.injection is not None and self.injection.is_active

    @property
    def has_pending_change(self) -> bool:
        """Whether a change waits for the next step."""
        return self.epochs.latest != self.epochs.applied or self._own_change is not None

    def join_epoch(self, epoch: int, config: Mapping[str, Any]) -> None:
        """Adopt the epoch and configuration that the other ranks agreed on before this rank joined."""
        self.epochs.applied = max(self.epochs.applied, epoch)
        if epoch:
            self.config = self.base = self.base.updated(config)

    def apply_due(self, info: StepInfo, reopen: Callable[[Path], None]) -> int:
        """Apply pending changes before the step ``info``; return the active epoch."""
        client = self._client
        if client is not None:
            self.apply_agreed(info.step, info.epoch, reopen)
            client.set_position(step=info.step, capture_steps_left=self._capture_steps_left)
        self.apply_own()
        self._apply_requests(info.asked)
        self._apply_stop()
        return self.epochs.applied

    def apply_agreed(self, step: int, epoch: int | None, reopen: Callable[[Path], None]) -> None:
        """Apply the changes that all ranks agreed on for ``step``, or those up to ``epoch`` if the host decides."""
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
        """Schedule a change by this process: apply it ``now``, or before the next step."""
        self._own_change = config
        if now:
            self.apply_own()

    def apply_own(self) -> None:
        """Apply the pending change by this process, if any."""
        own, self._own_change = self._own_change, None
        if own is not None:
            self.base = own
            self._collector.retention.capture_stop.resume()
            self._configure(own)

    def after_step(self) -> None:
        """Handle the end of a step: count down a capture of N steps, and return to the base configuration at 0."""
        self._apply_stop()
        if self._capture_steps_left is None or self._client is None:
            return
        self._capture_steps_left -= 1
        if self._capture_steps_left <= 0:
            self._configure(self.base)
        self._client.set_position(capture_steps_left=self._capture_steps_left)
        self._client.queue.flush()

    def _apply_stop(self) -> None:
        """Remove all taps once a trigger or a budget has stopped the capture, so that there is no overhead."""
        if self._collector.retention.capture_stop.stopped is not None and self.may_capture:
            self.select()

    def _apply_requests(self, asked_levels: Mapping[str, str]) -> None:
        """Apply the capture levels that the requests of the next step ask for (request id -> level)."""
        requests, problem = valid_requests(asked_levels)
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
        """Place taps for the active configuration, or for ``config``; place none while the capture is stopped."""
        requests = self._requests
        if config is None and self._collector.retention.capture_stop.stopped is not None:
            config, requests = self.config.updated({"enabled": False}), {}
        config = config or self.config
        info, usage = self.info, self.expressions
        selection = Selection(config, rank=info.rank, coords=info.coords, requests=requests, usage=usage)
        levels = _levels(config)
        sketches = "sketch" in levels
        if levels != {"full"}:  # also for "off": switching on statistics later then does not delay a step
            self.compile_kernels(sketches=sketches or config.control is not None)
        self._collector.select(selection)
        self._collector.capturer.sketcher.place(info.mesh, info.coords, is_wanted=sketches)
        if config.console:
            self._collector.counters.sink = ConsoleSink(self._collector.counters.sink, self.info.rank)
        self._models.select(selection, self._collector)
        if self.injection is not None:
            self.injection.place(config.inject if config.enabled else (), self._models.modules, self._collector)
        assert self.steps is not None
        wanted = config.triggers or levels != {"off"}
        may_keep = config.enabled and bool(wanted)
        latest = lambda: self.explicit_dump  # noqa: E731
        self.explicit_dump = ExplicitDump(self._collector, self.steps, selection, latest) if may_keep else None

    def compile_kernels(self, *, sketches: bool) -> None:
        """Compile the statistics kernels that taps may launch, and with ``sketches`` the sketch kernels."""
        info = self.info
        tap_kernels.compile_ahead(self._models.modules, sketches=sketches, rank=info.rank, world_size=info.world_size)

    def put_config_event(self) -> None:
        """Write the active configuration into the run."""
        if self._client is not None:
            names = (*RUNTIME_FIELDS, "capture_steps")
            shown = {name: value for name, value in self.config.to_json().items() if name in names}
            self._client.put_event("config", epoch=self.epochs.applied, **shown)

    @contextlib.contextmanager
    def capture(self, captures: InMemorySink, settings: Mapping[str, Any]) -> Iterator[None]:
        """Context manager: redirect records into ``captures``, with ``settings`` applied and the dumper enabled."""
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
        """Update the mesh of this rank, for process groups created after the run was opened.

        A changed rank number is not applied; it is logged as a warning.
        """
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
        """Return why ``config`` is refused: a rule matches no site, on a rank that has all sites (no pipeline stage).

        None if it is accepted.
        """
        info = self.info
        may_be_a_stage = info.world_size > 1 and (not info.mesh or info.mesh.get("pp", 1) > 1)
        unmatched = {} if may_be_a_stage or not self._models else self.unmatched(config)
        return next(iter(unmatched.values()), None)

    @gc_paused()
    def unmatched(self, config: DumperConfig) -> dict[str, str]:
        """Return rule -> explanation for each rule that matches no site of this rank.

        Ports that only firings reveal count as sites once they have been seen.
        """
        ports, opened = self._models.ports()
        selection = Selection(config, rank=self.info.rank, coords=self.info.coords)
        rules = selection.unmatched(ports, opened, taps=True)
        injections = {} if self.injection is None else self.injection.unmatched(config.inject, self._models.modules)
        return injections | {
            str(rule): f"rule {rule}: no site matches {rule.glob!r}; {_suggestion(rule.glob, ports)}" for rule in rules
        }

    def unused_rules(self) -> list[str]:
        """Return the rules that matched no explicit dump, in a recording without models; most likely typos."""
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
    """Return all capture levels that ``config`` uses, in rules or as the default."""
    return {config.keep, *(rule.keep for rule in config.rules)}


def _suggestion(glob: str, ports: Mapping[str, Sequence[str]]) -> str:
    """Suggest corrections of a ``glob`` without a match: a completed glob, ports of its modules, or modules near it.

    The latter are the children of its innermost existing module, or the layers, see :func:`.describe_modules`.
    """
    if (completed_glob := _completed_glob(glob)) and any(
        Glob(completed_glob.rpartition(":")[0] + ":*").matches(f"{path}:out") for path in ports
    ):
        return f"did you mean '{completed_glob}'?"
    head, colon, _ = glob.rpartition(":")
    modules = Glob(f"{head}:*")
    near = [path for path in ports if head and modules.matches(f"{path}:out") and ports[path]] if colon else []
    if near:
        return f"ports of {near[0] or 'the model itself'} are {', '.join(dict.fromkeys(ports[near[0]]))}"
    return describe_modules(glob, (f"{path}:out" for path in ports))


def _completed_glob(glob: str) -> str | None:
    """Return ``glob`` with the missing colon before its port or the missing brackets after it; None if complete."""
    head, colon, port = glob.rpartition(":")
    if colon:
        match = re.fullmatch(r"(in|tap|param|buffer)(\.grad)?", port)
        return f"{head}:{match[1]}[*]{match[2] or ''}" if match else None
    match = re.fullmatch(r"(?:(.*)\.|(.*\*)|)((?:in|out|tap|param|buffer)(?:\[.*\])?(?:\.grad)?)", glob)
    return f"{match[1] or match[2] or '*'}:{match[3]}" if match else None
