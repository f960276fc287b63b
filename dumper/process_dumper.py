"""ProcessDumper: the process-wide dumper, configured by environment variables and opened on first use if enabled."""

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
    """The :class:`Dumper` shared by the whole process.

    The dumper is disabled, and creates no file and no process, unless ``TAPSCOPE_ENABLED=1`` or :meth:`configure`
    enables it. ``TAPSCOPE_CONTROL=127.0.0.1:0`` starts the recorder anyway, so that HTTP can enable capture later.

    The run is ``DIR/EXP_NAME``. :meth:`start`, :meth:`step`, :meth:`attach` and :meth:`configure` open the run: they
    wait for the recorder and raise errors. The first :meth:`dump` opens the run in the background instead: values wait
    in the queue, and a failure is logged.
    """

    def __init__(self) -> None:
        super().__init__(config=DumperConfig(enabled=False))
        self._experiment = RunLocation()
        self._has_read = False
        self._is_settled = False  # an open was attempted, or the run was closed: do not open again on first use
        self._num_names = 0
        self._naming: RunNaming | None = None
        self._guard = threading.RLock()

    # ---- opening and closing

    def start(self, **settings: Any) -> None:
        """Enable the dumper and open the run, with ``settings`` as for :meth:`configure`.

        If a run is already open, only applies ``settings``.
        """
        self.configure(**{"enabled": True} | settings)

    def close(self) -> None:
        """Close the run, if one is open; a later :meth:`start` opens a new one."""
        super().close()
        self._is_settled = True

    def configure(self, **changes: Any) -> None:
        """Change settings of :class:`DumperConfig`, or ``dir``, ``exp_name`` and ``cleanup_previous``.

        The latter three are fixed while a run is open. Opens the run if the dumper is enabled or ``control`` is set.
        Raises ConfigError, RuleError, RunExistsError, ListenError or RecorderError.
        """
        self._read()
        changes = current_names(changes)
        places, others = _split_settings(changes)
        if places and self._recording is not None:
            raise ConfigError(f"{min(places)!r} is fixed while a run is open; reset(name) continues in another one")
        chosen = {name: getattr(self._experiment, name) for name in run_naming.FIELDS} | places
        self._experiment = RunLocation(**chosen)
        super().configure(**others)
        self._is_settled = False
        self._open_if_wanted()

    def configure_default(self, **changes: Any) -> None:
        """Call :meth:`configure` with the settings that the environment leaves unset; only validate the others."""
        self._read()
        changes = current_names(changes)
        places, others = _split_settings(changes)
        RunLocation(**places)
        self.config.updated(others)
        unset = {name: value for name, value in changes.items() if not _is_in_environment(name)}
        self.configure(**unset)

    def may_enable(self) -> bool:
        """Return whether the dumper is enabled or can be enabled over HTTP; if not, hosts can skip all calls."""
        self._read()
        return self.config.enabled or self.config.control is not None

    def reset(self, name: str | None = None) -> None:
        """See :meth:`Dumper.reset`; if no run is open, ``name`` becomes the name of the next run."""
        self._read()
        if self._recording is None:
            if name is not None:
                self.configure(exp_name=name)
            return
        super().reset(name)

    def get_state(self) -> dict[str, Any]:
        """See :meth:`Dumper.get_state`; adds the key ``experiment``: ``dir``, ``exp_name`` and ``cleanup_previous``."""
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
        """Do not warn: callers of the process-wide dumper need not know whether it is enabled."""

    def dump_dict(self, prefix: str, data: Any, *, save: bool = True, **tags: Any) -> None:
        """See :meth:`Dumper.dump_dict`."""
        if not is_compiling():
            self._open_in_background()
        super().dump_dict(prefix, data, save=save, **tags)

    def dump_model(self, model: nn.Module, **options: Any) -> int:
        """See :meth:`Dumper.dump_model`."""
        self._open_in_background()
        return super().dump_model(model, **options)

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

    def step(self, **options: Any) -> AbstractContextManager[StepInfo]:
        """See :meth:`Dumper.step`; does nothing while the dumper is disabled."""
        self._read()
        self._open_if_wanted()
        if self._recording is None:
            return StepContext(lambda: StepInfo(step=0), lambda aborted: None)
        return super().step(**options)

    def metric(self, name: str, value: float) -> None:
        """Record the metric ``name`` for the step that an explicit value would belong to now.

        Raises StepError if ``value`` is not a number.
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
        """Apply the environment variables on the first call; raises ConfigError or RuleError."""
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
            self._is_settled = True  # do not retry a failed open at every step
            if self._config.enabled or self._config.control is not None:
                self._open(later=later, lenient=not self._models)

    def _open_in_background(self) -> None:
        """Open the run for an explicit value: neither wait for the recorder nor raise."""
        if self._recording is not None or self._is_settled:
            return
        try:
            self._read()
            self._open_if_wanted(later=True)
        except Exception as error:  # noqa: BLE001 - it may run in a model's forward
            self._is_settled = True
            _log.warning("tapscope records nothing: %s", error)

    def _run_directory(self, info: RankInfo) -> Path:
        location = self._experiment
        name = location.exp_name
        if name is None:
            self._num_names += 1
            self._naming = RunNaming(location.dir, info.rank, info.world_size, self._num_names)
            name = self._naming.agree()
        if location.cleanup_previous and info.rank == 0:
            run_naming.clean(location.dir, keep=name if location.exp_name is None else None)
        return location.dir / name

    def _close(self, interrupted: str | None = None) -> str | None:
        if self._naming is not None:
            self._naming.give_up()
        return super()._close(interrupted)

    def _abandon(self) -> None:
        super()._abandon()
        self._is_settled = True
        self._guard = threading.RLock()  # another thread may have held it when the process forked


def _is_in_environment(name: str) -> bool:
    """Return whether an environment variable sets ``name``, under its current or a deprecated name."""
    spellings = [name, *(old for old, new in DEPRECATED.items() if new == name)]
    return any(os.environ.get(f"TAPSCOPE_{each.upper()}", "").strip() for each in spellings)


def _split_settings(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``changes`` into run location settings and :class:`DumperConfig` settings.

    Raises ConfigError for unknown names.
    """
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
