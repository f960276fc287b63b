"""Watches: the models that one dumper watches, by their names."""

import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.recording.attached_model import AttachedModel
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.taps import Tap

if TYPE_CHECKING:
    from tapscope.dumper.recording.recording import Recording
    from tapscope.dumper.taps.collector import Collector


class ModelRegistry:
    """Several models, told together what concerns them all."""

    def __init__(self, model: nn.Module | Mapping[str, nn.Module] | None = None) -> None:
        """``model`` may be several by name, or None; raises ConfigError for what is no model or no name."""
        self._models = [AttachedModel(each, name) for name, each in _models_of(model).items()]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[AttachedModel]:
        return iter(self._models)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that still live."""
        return [model for watch in self._models if (model := watch.model) is not None]

    @property
    def taps(self) -> list[Tap]:
        """Of every module of every model."""
        return [tap for watch in self._models for tap in watch.taps]

    @property
    def armed(self) -> bool:
        """Whether any tap is in place."""
        return any(watch.armed for watch in self._models)

    def add(self, model: nn.Module, name: str) -> AttachedModel:
        """One model more.

        Raises ConfigError for what is no model, is watched already, or has the name of another that is.
        """
        (watch,) = ModelRegistry({name: model})
        if any(each.model is model for each in self._models):
            raise ConfigError("model: this one is watched already")
        if self._is_taken(name):
            raise ConfigError(
                f"name={name!r}: another model is watched by it, and their records could not be told apart; give "
                "attach() another name, or remove() the other's handle first"
            )
        self._models.append(watch)
        return watch

    def _is_taken(self, name: str) -> bool:
        """Whether a living model is watched by that name; one that only its own cycles keep is collected first."""
        namesakes = [each for each in self._models if each.name == name]
        if any(each.model is not None for each in namesakes):
            gc.collect()
        return any(each.model is not None for each in namesakes)

    def remove(self, watch: AttachedModel) -> None:
        """Take its taps away and watch it no longer; nothing if that is so already."""
        if watch in self._models:
            self._models.remove(watch)
            watch.detach()

    # ---- all of them

    def attach(self, recording: "Recording") -> None:
        """Hand what fires to ``recording`` from now on; :meth:`select` places the taps."""
        for watch in self._models:
            watch.attach(recording)

    def select(self, selection: Selection, collector: "Collector") -> None:
        """Put taps where ``selection`` may keep something, and nowhere else."""
        for watch in self._models:
            watch.select(selection, collector)

    def end_step(self, collector: "Collector", step: OpenStep) -> None:
        """A step is about to end."""
        for watch in self._models:
            watch.end_step(collector, step)

    def begin_run(self) -> None:
        """A new run: sites are announced again."""
        for watch in self._models:
            watch.begin_run()

    def check_hooks(self, collector: "Collector") -> None:
        """The run ends: say what has happened to hooks since the last look."""
        for watch in self._models:
            watch.check_hooks(collector)

    def detach(self) -> None:
        """Take the taps away."""
        for watch in self._models:
            watch.detach()

    def never_fired(self) -> list[str]:
        """Armed taps through which nothing came, by a site of theirs."""
        return [site for watch in self._models for site in watch.never_fired()]

    def compiled(self) -> list[str]:
        """Compiled modules inside which taps did not fire."""
        return [path for watch in self._models for path in watch.compiled()]

    @property
    def have_warned(self) -> bool:
        """Whether it was said of a model, when its taps were placed, that it is compiled."""
        return any(watch.has_warned for watch in self._models)

    @property
    def is_traced(self) -> bool:
        """Whether a whole model became part of a graph."""
        return any(watch.is_traced for watch in self._models)

    def warn_if_called(self, forked: ForkGuard) -> None:
        """In a forked child: whoever calls a model is told that it is not recorded."""
        for watch in self._models:
            watch.warn_if_called(forked)

    def ports(self) -> tuple[dict[str, list[str]], list[str]]:
        """Module path -> the ports that are known, of explicit values under ``""``; and the modules that take more."""
        ports: dict[str, list[str]] = {"": []}
        opened: list[str] = []
        for watch in self._models:
            known, takes_more = watch.ports()
            for path, names in known.items():
                ports.setdefault(path, []).extend(names)
            opened += takes_more
        return ports, opened


class AttachHandle:
    """What watching one model more gives."""

    def __init__(self, watches: ModelRegistry, watch: AttachedModel) -> None:
        self._registry = watches
        self._attached = watch

    def remove(self) -> None:
        """Watch it no longer; a second call does nothing."""
        self._registry.remove(self._attached)

    def __enter__(self) -> "AttachHandle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _models_of(model: Any) -> dict[str, nn.Module]:
    models = dict(model) if isinstance(model, Mapping) else {} if model is None else {"": model}
    for name, each in models.items():
        if not isinstance(each, nn.Module):
            raise ConfigError(f"model is a {type(each).__name__}; a Dumper watches a torch.nn.Module")
        if not isinstance(name, str) or "/" in name or "\0" in name:
            raise ConfigError(f"model {name!r}: must be a name without '/'")
    return models
