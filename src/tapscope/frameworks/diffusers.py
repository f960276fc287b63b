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
"""Attributes of a scheduler that say how much noise each step removes."""


class DiffusersPlugin(FrameworkPlugin):
    """Models of diffusers, and the scheduler of a pipeline that is captured by :func:`capture`."""

    name = "diffusers"
    oldest = "0.30"

    def owns(self, model: Any) -> bool:
        """Whether it stands for a scheduler."""
        return isinstance(model, Scheduler)

    def step_modules(self, model: Any) -> Sequence[str]:
        """The noise schedule, which is set before the first step."""
        return ("schedule",) if isinstance(model, Scheduler) else ()

    def step_methods(self, model: Any) -> Sequence[str]:
        """``encode`` and ``decode`` of a VAE, which pipelines call in place of its forward."""
        return tuple(name for name in ("encode", "decode") if callable(getattr(model, name, None)))


class Schedule(nn.Module):
    """The tables of a scheduler as the outputs of a module."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler

    def forward(self) -> dict[str, torch.Tensor]:
        """Timesteps [steps], sigmas and cumulative alphas [noise levels], as far as the scheduler has them."""
        tables = {name: getattr(self._scheduler, name, None) for name in _TABLES}
        return {name: table for name, table in tables.items() if isinstance(table, torch.Tensor)}


class Scheduler(nn.Module):
    """A scheduler as a module: its ``step`` is the forward, its tables are the outputs of ``schedule``."""

    def __init__(self, scheduler: Any, metric: Callable[[str, float], None]) -> None:
        """``metric`` records a number for the current step."""
        super().__init__()
        self.schedule = Schedule(scheduler)
        self._step = scheduler.step
        self._metric = metric
        self._index = 0

    def begin(self) -> None:
        """The schedule has been set."""
        self._index = 0
        self.schedule()

    def forward(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``scheduler.step``, and record the index and the timestep as metrics."""
        self._metric("noise_index", self._index)
        self._metric("timestep", float(timestep))
        self._index += 1
        return self._step(model_output, timestep, sample, *args, **kwargs)


@contextmanager
def capture(pipeline: Any, out: str | Path, *, force: bool = False, **settings: Any) -> Iterator[Dumper]:
    """Capture a diffusers pipeline: its models under the names of its components, and its scheduler.

    ::

        with capture(pipeline, "run", keep="full"):
            pipeline("a photo of a cat", num_inference_steps=20)

    Each call of an encoder, of the denoiser, of ``scheduler.step`` and of the VAE is a step. Steps of the scheduler
    have the metrics ``noise_index`` (from 0) and ``timestep``. ``settings`` are those of :class:`Dumper`. Raises
    ConfigError for an object that is not a pipeline, and what :meth:`Dumper.open` raises.
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
    """``scheduler.step`` and ``set_timesteps`` go through the module; pipelines read their signatures."""
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
