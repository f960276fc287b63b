"""ModelRegistry: the models attached to one dumper, by name."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.recording.attached_model import AttachedModel, StepHost
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.collector import Collector
from tapscope.dumper.taps.taps import Tap
from tapscope.run_format.record import virtual_stage


class ModelRegistry:
    """Collection of attached models; forwards operations to each of them."""

    def __init__(self, model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None = None) -> None:
        """Attach ``model``: a module, a mapping of names to modules, a list of virtual pipeline stages, or None.

        Raises ConfigError for an invalid model or name.
        """
        self._models = [AttachedModel(each, name) for name, each in _models_of(model).items()]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[AttachedModel]:
        return iter(self._models)

    @property
    def modules(self) -> list[nn.Module]:
        """Attached models that still exist."""
        return [model for attached in self._models if (model := attached.model) is not None]

    @property
    def taps(self) -> list[Tap]:
        """Taps of all models."""
        return [tap for attached in self._models for tap in attached.taps]

    @property
    def armed(self) -> bool:
        """Whether any tap is in place."""
        return any(attached.armed for attached in self._models)

    def add(self, model: nn.Module, name: str) -> AttachedModel:
        """Attach another model under ``name``.

        Raises ConfigError if ``model`` is not a module or is already attached, or if ``name`` is taken.
        """
        (attached,) = ModelRegistry({name: model})
        if any(each.model is model for each in self._models):
            raise ConfigError("model: already attached")
        if self._is_taken(name):
            raise ConfigError(
                f"name={name!r}: another model has this name, and their records would be indistinguishable; give "
                "attach() another name, or remove() the other's handle first"
            )
        self._models.append(attached)
        return attached

    def _is_taken(self, name: str) -> bool:
        """Return whether an existing model has this name, after collecting models kept alive only by cycles."""
        namesakes = [each for each in self._models if each.name == name]
        if any(each.model is not None for each in namesakes):
            gc.collect()
        return any(each.model is not None for each in namesakes)

    def remove(self, attached: AttachedModel) -> None:
        """Detach a model; do nothing if it is not attached."""
        if attached in self._models:
            self._models.remove(attached)
            attached.detach()

    # ---- all models

    def attach(self, recording: StepHost) -> None:
        """Direct firings to ``recording`` from now on; :meth:`select` places the taps."""
        for attached in self._models:
            attached.attach(recording)

    def select(self, selection: Selection, collector: Collector) -> None:
        """Place taps exactly at the sites where ``selection`` may keep values."""
        for attached in self._models:
            attached.select(selection, collector)

    def end_step(self, collector: Collector, step: OpenStep) -> None:
        """Handle the end of a step in all models."""
        for attached in self._models:
            attached.end_step(collector, step)

    def begin_run(self) -> None:
        """Reset the taps for a new run, so that sites are announced again."""
        for attached in self._models:
            attached.begin_run()

    def check_hooks(self, collector: Collector) -> None:
        """Report problems with hooks since the last check; called when the run ends."""
        for attached in self._models:
            attached.check_hooks(collector)

    def detach(self) -> None:
        """Remove the taps of all models."""
        for attached in self._models:
            attached.detach()

    def never_fired(self) -> list[str]:
        """Return one site of each armed tap that never fired."""
        return [site for attached in self._models for site in attached.never_fired()]

    def compiled(self) -> list[str]:
        """Return the paths of compiled modules whose taps did not fire."""
        return [path for attached in self._models for path in attached.compiled()]

    @property
    def have_warned(self) -> bool:
        """Whether a warning about taps in compiled modules was logged for any model."""
        return any(attached.has_warned for attached in self._models)

    @property
    def is_traced(self) -> bool:
        """Whether a whole model was traced into a compiled graph."""
        return any(attached.is_traced for attached in self._models)

    def warn_if_called(self, forked: ForkGuard) -> None:
        """In a forked child: log a warning when a model is called, because it is not recorded."""
        for attached in self._models:
            attached.warn_if_called(forked)

    def ports(self) -> tuple[dict[str, list[str]], list[str]]:
        """Return module path -> known ports (explicit dumps under ``""``), and the modules with variadic arguments."""
        ports: dict[str, list[str]] = {"": []}
        opened: list[str] = []
        for attached in self._models:
            known, takes_more = attached.ports()
            for path, names in known.items():
                ports.setdefault(path, []).extend(names)
            opened += takes_more
        return ports, opened


class AttachHandle:
    """Handle of an attached model; detaches it with :meth:`remove` or as a context manager."""

    def __init__(self, registry: ModelRegistry, attached: AttachedModel) -> None:
        self._registry = registry
        self._attached = attached

    def remove(self) -> None:
        """Detach the model; a second call has no effect."""
        self._registry.remove(self._attached)

    def __enter__(self) -> "AttachHandle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _models_of(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, list | tuple) and model:
        model = {virtual_stage(i): each for i, each in enumerate(model)} if len(model) > 1 else model[0]
    models = dict(model) if isinstance(model, Mapping) else {} if model is None else {"": model}
    for name, each in models.items():
        if not isinstance(each, nn.Module):
            raise ConfigError(f"model is a {type(each).__name__}; a Dumper needs a torch.nn.Module")
        if not isinstance(name, str) or "/" in name or "\0" in name:
            raise ConfigError(f"model {name!r}: must be a name without '/'")
    return models
