"""ProcessDumper: configured by the environment, opened on first use, inactive until enabled."""

import logging
import os
import threading
from contextlib import AbstractContextManager, _GeneratorContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from tapscope.core.errors import ConfigError, TapscopeError
from tapscope.core.formatting import did_you_mean
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.dumper.config import DEPRECATED, DumperConfig, current_names
from tapscope.dumper.dumper import Dumper
from tapscope.dumper.environment import changes_of
from tapscope.dumper.job import run_naming
from tapscope.dumper.job.compiled_regions import is_compiling
from tapscope.dumper.job.run_naming import RunLocation, RunNaming
from tapscope.dumper.pipeline.in_memory_sink import InMemorySink
from tapscope.dumper.recording.model_registry import AttachHandle
from tapscope.dumper.recording.step_tracker import StepContext
from tapscope.dumper.steps.step_validation import metric_value

_log = logging.getLogger("tapscope")


class ProcessDumper(Dumper):
    """A :class:`Dumper` shared by the whole process.

    It is disabled unless ``TAPSCOPE_ENABLED=1`` or :meth:`configure` enables it: no file and no process is created.
    ``TAPSCOPE_CONTROL=127.0.0.1:0`` starts the recorder anyway, so that HTTP can enable it later.

    The run is ``DIR/EXP_NAME``. :meth:`start`, :meth:`step`, :meth:`attach` and :meth:`configure` open it: they wait
    for the recorder and raise errors. The first :meth:`dump` opens it in the background instead: values wait in the
    queue, and a failure is logged.
    """

    def __init__(self) -> None:
        super().__init__(config=DumperConfig(enabled=False))
        self._experiment = RunLocation()
        self._has_read = False
        self._is_settled = False  # it was opened or is not wanted, until somebody asks for it
        self._num_names = 0
        self._naming: RunNaming | None = None
        self._guard = threading.RLock()

    # ---- opening and closing

    def start(self, **settings: Any) -> None:
        """Enable and open now, with ``settings`` as for :meth:`configure`; does nothing when already open."""
        self.configure(**{"enabled": True} | settings)

    def close(self) -> None:
        """End the run, if one is open; a later :meth:`start` opens another."""
        super().close()
        self._is_settled = True

    def configure(self, **changes: Any) -> None:
        """Change settings of :class:`DumperConfig`, and while no run is open ``dir``, ``exp_name``,
        ``cleanup_previous``.

        Opens the run when the dumper is enabled or control is configured. Raises ConfigError, RuleError,
        RunExistsError, ListenError or RecorderError.
        """
        self._read()
        changes = current_names(changes)
        places, others = _parted(changes)
        if places and self._recording is not None:
            raise ConfigError(f"{min(places)!r} is fixed while a run is open; reset(name) continues in another one")
        chosen = {name: getattr(self._experiment, name) for name in run_naming.FIELDS} | places
        self._experiment = RunLocation(**chosen)
        super().configure(**others)
        self._is_settled = False
        self._open_if_wanted()

    def configure_default(self, **changes: Any) -> None:
        """As :meth:`configure`, for settings that the environment does not set; the others are validated only."""
        self._read()
        changes = current_names(changes)
        places, others = _parted(changes)
        RunLocation(**places)
        self.config.updated(others)
        unset = {name: value for name, value in changes.items() if not _is_in_environment(name)}
        self.configure(**unset)

    def may_enable(self) -> bool:
        """Whether it is enabled or may become so over HTTP; if not, hosts need not call it at all."""
        self._read()
        return self.config.enabled or self.config.control is not None

    def reset(self, name: str | None = None) -> None:
        """See :meth:`Dumper.reset`; with no run open, ``name`` names the next run."""
        self._read()
        if self._recording is None:
            if name is not None:
                self.configure(exp_name=name)
            return
        super().reset(name)

    def get_state(self) -> dict[str, Any]:
        """See :meth:`Dumper.get_state`; adds ``experiment``: the directory and names of runs."""
        self._read()
        places = {name: _plain(getattr(self._experiment, name)) for name in run_naming.FIELDS}
        return super().get_state() | {"experiment": places}

    # ---- use

    def dump(
        self,
        name: str,
        value: Any,
        *,
        dims: str | None = None,
        dims_grad: str | None = None,
        grad: bool | None = None,
        save: bool = True,
        **tags: Any,
    ) -> None:
        """See :meth:`Dumper.dump`."""
        if self._recording is None and not is_compiling():
            if self._is_settled and self._forked is None:
                return
            self._open_in_background()
        super().dump(name, value, dims=dims, dims_grad=dims_grad, grad=grad, save=save, **tags)

    def _warn_unopened(self) -> None:
        """The dumper may rightly stay disabled, as its callers do not know whether it is on."""

    def dump_dict(self, prefix: str, data: Any, *, save: bool = True, **tags: Any) -> None:
        """See :meth:`Dumper.dump_dict`."""
        if not is_compiling():
            self._open_in_background()
        super().dump_dict(prefix, data, save=save, **tags)

    def dump_model(self, model: nn.Module, **how: Any) -> int:
        """See :meth:`Dumper.dump_model`."""
        self._open_in_background()
        return super().dump_model(model, **how)

    def attach(self, model: nn.Module, *, name: str = "") -> AttachHandle:
        """See :meth:`Dumper.attach`."""
        self._read()
        handle = super().attach(model, name=name)
        try:
            self._open_if_wanted()
        except TapscopeError:
            handle.remove()
            raise
        return handle

    def step(self, **about: Any) -> AbstractContextManager[StepInfo]:
        """See :meth:`Dumper.step`; does nothing while the dumper is disabled."""
        self._read()
        self._open_if_wanted()
        if self._recording is None:
            return StepContext(lambda: StepInfo(step=0), lambda aborted: None)
        return super().step(**about)

    def metric(self, name: str, value: float) -> None:
        """Record a number for the step that an explicit value would belong to now.

        Raises StepError for a non-number.
        """
        value = metric_value(name, value)
        recording = self._recording
        if recording is not None and recording.active.explicit_dump is not None:
            step = recording.steps.current()
            recording.collector.counters.announce(step)
            recording.collector.counters.metric(step.info.step, name, value)

    def capture_output(self, **settings: Any) -> "_GeneratorContextManager[InMemorySink]":
        """See :meth:`Dumper.capture_output`."""
        self._read()
        return super().capture_output(**settings)

    # ---- inside

    def _read(self) -> None:
        """Read the environment, once; raises ConfigError or RuleError."""
        with self._guard:
            if self._has_read:
                return
            self._has_read = True
            self._experiment = RunLocation(**RunLocation.from_env(os.environ))
            self._config = self._config.updated(changes_of(os.environ))

    def _open_if_wanted(self, *, later: bool = False) -> None:
        with self._guard:
            if self._recording is not None or self._is_settled:
                return
            self._is_settled = True  # a failure is not repeated at every step
            if self._config.enabled or self._config.control is not None:
                self._open(later=later, lenient=not self._models)

    def _open_in_background(self) -> None:
        """Open as the first dump does: waits for nothing and raises nothing."""
        if self._recording is not None or self._is_settled:
            return
        try:
            self._read()
            self._open_if_wanted(later=True)
        except Exception as error:  # noqa: BLE001 - it may run in a model's forward
            self._is_settled = True
            _log.warning("tapscope records nothing: %s", error)

    def _place(self, info: RankInfo) -> Path:
        where = self._experiment
        name = where.exp_name
        if name is None:
            self._num_names += 1
            self._naming = RunNaming(where.dir, info.rank, info.world_size, self._num_names)
            name = self._naming.agree()
        if where.cleanup_previous and info.rank == 0:
            run_naming.clean(where.dir, keep=name if where.exp_name is None else None)
        return where.dir / name

    def _close(self, interrupted: str | None = None) -> str | None:
        if self._naming is not None:
            self._naming.give_up()
        return super()._close(interrupted)

    def _abandon(self) -> None:
        super()._abandon()
        self._is_settled = True
        self._guard = threading.RLock()  # may have been held when the process forked


def _is_in_environment(name: str) -> bool:
    """Whether the environment sets ``name``, by its current or a former name."""
    spellings = [name, *(old for old, new in DEPRECATED.items() if new == name)]
    return any(os.environ.get(f"TAPSCOPE_{each.upper()}", "").strip() for each in spellings)


def _parted(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Location settings, and settings of :class:`DumperConfig`; raises ConfigError for unknown names."""
    settings = (*run_naming.FIELDS, *(each.name for each in fields(DumperConfig)))
    for name in changes:
        if name not in settings:
            raise ConfigError(
                f"unknown setting {name!r}{did_you_mean(name, settings)}; settings are {', '.join(settings)}"
            )
    places = {name: value for name, value in changes.items() if name in run_naming.FIELDS}
    return places, {name: value for name, value in changes.items() if name not in run_naming.FIELDS}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
