"""diffusers: ``capture`` for a pipeline, with its scheduler, and the framework plugin for its models."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.core.framework_plugin import FrameworkPlugin
from tapscope.dumper import Dumper

SCHEDULER = "scheduler"
_TABLES = ("timesteps", "sigmas", "alphas_cumprod")
"""Scheduler attributes that define the noise schedule."""


class DiffusersPlugin(FrameworkPlugin):
    """Plugin for diffusers models and for the scheduler of a pipeline captured by :func:`capture`."""

    name = "diffusers"
    oldest = "0.30"

    def owns(self, model: Any) -> bool:
        """Return whether ``model`` is the module wrapper of a scheduler."""
        return isinstance(model, Scheduler)

    def step_modules(self, model: Any) -> Sequence[str]:
        """Return the ``schedule`` submodule of a scheduler: the noise schedule is set before the first step."""
        return ("schedule",) if isinstance(model, Scheduler) else ()

    def step_methods(self, model: Any) -> Sequence[str]:
        """Return ``encode`` and ``decode`` of a VAE, which pipelines call in place of ``forward``."""
        return tuple(name for name in ("encode", "decode") if callable(getattr(model, name, None)))


class Schedule(nn.Module):
    """A module whose outputs are the noise schedule tables of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler

    def forward(self) -> dict[str, torch.Tensor]:
        """Return timesteps [steps], sigmas and cumulative alphas [noise levels]; tables the scheduler does not have are
        omitted."""
        tables = {name: getattr(self._scheduler, name, None) for name in _TABLES}
        return {name: table for name, table in tables.items() if isinstance(table, torch.Tensor)}


class Scheduler(nn.Module):
    """A module wrapper of a scheduler: ``forward`` calls ``step``; the submodule ``schedule`` outputs the tables."""

    def __init__(self, scheduler: Any, metric: Callable[[str, float], None]) -> None:
        """``metric`` records a named number for the current step."""
        super().__init__()
        self.schedule = Schedule(scheduler)
        self._step = scheduler.step
        self._metric = metric
        self._index = 0

    def begin(self) -> None:
        """Reset the index and record the schedule; called after ``set_timesteps``."""
        self._index = 0
        self.schedule()

    def forward(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``scheduler.step``, recording the step index and the timestep as metrics."""
        self._metric("noise_index", self._index)
        self._metric("timestep", float(timestep))
        self._index += 1
        return self._step(model_output, timestep, sample, *args, **kwargs)


@contextmanager
def capture(pipeline: Any, out: str | Path, *, force: bool = False, **settings: Any) -> Iterator[Dumper]:
    """Context manager: capture a diffusers pipeline, its models under their component names and its scheduler.

    ::

        with capture(pipeline, "run", keep="full"):
            pipeline("a photo of a cat", num_inference_steps=20)

    Each call of an encoder, of the denoiser, of ``scheduler.step`` and of the VAE is a step. Steps of the scheduler
    have the metrics ``noise_index`` (from 0) and ``timestep``. ``settings`` are those of :class:`Dumper`. Raises
    ConfigError if ``pipeline`` has no components, and the errors of :meth:`Dumper.open`.
    """
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(f"{type(pipeline).__name__} has no components; give a diffusers pipeline")
    models: dict[str, nn.Module] = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    with ExitStack() as stack:
        dumper: Dumper
        if (scheduler := components.get(SCHEDULER)) is not None:
            models[SCHEDULER] = module = Scheduler(scheduler, lambda name, value: dumper.metric(name, value))
            stack.enter_context(_watched(scheduler, module))
        dumper = Dumper(models, out, force=force, **settings)
        stack.enter_context(dumper)
        yield dumper


@contextmanager
def _watched(scheduler: Any, module: Scheduler) -> Iterator[None]:
    """Context manager: route ``scheduler.step`` and ``set_timesteps`` through ``module``.

    Signatures are preserved, because pipelines inspect them.
    """
    plain = {name: getattr(scheduler, name) for name in ("step", "set_timesteps") if hasattr(scheduler, name)}

    def step(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        result = plain["set_timesteps"](*args, **kwargs)
        module.begin()
        return result

    for watch in (step, set_timesteps):
        if (method := plain.get(watch.__name__)) is not None:
            functools.update_wrapper(watch, method)
            watch.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
            setattr(scheduler, watch.__name__, watch)
    try:
        yield
    finally:
        for name in plain:
            scheduler.__dict__.pop(name, None)
