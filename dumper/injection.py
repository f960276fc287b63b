"""Injector: overwrites module inputs and outputs of a live model with values recorded in a run.

Token rows are matched by request and position, so the recorded run may have scheduled the requests differently. The
model still does the compute: only the named tensors are replaced, by copies with the dtype and device of the live
tensor.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tapscope.core.errors import ConfigError, TapscopeError
from tapscope.core.observe import StepInfo
from tapscope.core.site import parse
from tapscope.dumper.records.flatten import flatten, path_part
from tapscope.dumper.reference.stored_tensors import NotRecordedError, StoredTensors
from tapscope.dumper.taps.taps import Tap, find_taps

__all__ = ["Injector", "Problem", "StoredTensors", "module_paths"]


def module_paths(model: nn.Module) -> set[str]:
    """Return the paths of the modules whose inputs and outputs can be overwritten."""
    return {tap.path for tap in find_taps(model)}


class Problem(NamedTuple):
    """A value that could not be injected; the model kept its own value."""

    site: str
    step: int
    reason: str


class Injector:
    """Overwrites module inputs and outputs of a model while the context is open.

    ::

        sites = {"model.layers.3.mlp:in[x]": "model.layers.3.mlp:in[x]"}
        with Injector(model, StoredTensors(run), sites, lambda: dumper.current_step):
            model(ids)

    ``sites`` maps sites of the model (inputs or outputs) to sites of the run. ``step`` returns the current step.
    ``wait`` is called with the step number when the run lacks a value; it returns whether to retry. Values that cannot
    be injected are listed in :attr:`problems`; the hooks never raise. The injector's hooks run before those of a
    Dumper, in whichever order the two are opened, so the dumper records the injected values.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StoredTensors,
        sites: Mapping[str, str],
        step: Callable[[], StepInfo | None],
        wait: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Raise ConfigError for a site that is not an input or output of a module of ``model``."""
        self._model, self._values, self._step, self._wait = model, values, step, wait
        self._taps = {tap.path: tap for tap in find_taps(model)}
        self._sites: dict[tuple[str, str], dict[str, str]] = {}
        self.problems: list[Problem] = []
        self.injected: dict[str, int] = {}
        """Site -> number of tensors replaced."""
        self._occurrences: dict[tuple[str, str], tuple[int, int]] = {}
        self._handles: list[Any] = []
        for site, stored in sites.items():
            place = parse(site)
            if place.path not in self._taps or place.kind not in ("in", "out") or place.is_grad:
                raise ConfigError(f"{site} is not an input or output of a module of this model")
            self._sites.setdefault((place.path, place.kind), {})[place.name or ""] = stored

    def __enter__(self) -> "Injector":
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for (path, kind), names in self._sites.items():
            tap, module = self._taps[path], modules[path]
            if kind == "in":
                self._handles.append(
                    module.register_forward_pre_hook(self._before(tap, names), prepend=True, with_kwargs=True)
                )
            else:
                self._handles.append(module.register_forward_hook(self._after(tap, names), prepend=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, tap: Tap, names: Mapping[str, str]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changes = self._changes(tap, "in", tap.named_inputs(args, kwargs), names)
            if not changes:
                return None
            positional = [tap.names[i] if i < len(tap.names) else f"args.{i}" for i in range(len(args))]
            new = tuple(_replaced(value, name, changes) for name, value in zip(positional, args, strict=True))
            return new, {name: _replaced(value, path_part(name), changes) for name, value in kwargs.items()}

        return hook

    def _after(self, tap: Tap, names: Mapping[str, str]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            changes = self._changes(tap, "out", output, names)
            return _replaced(output, "", changes) if changes else None

        return hook

    def _changes(self, tap: Tap, kind: str, value: Any, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return path of a leaf of ``value`` -> replacement tensor, for the leaves in ``names``."""
        step = self._step()
        if step is None:
            return {}
        before = self._occurrences.get((tap.path, kind))
        occurrence = before[1] + 1 if before is not None and before[0] == step.step else 0
        self._occurrences[tap.path, kind] = step.step, occurrence
        changes: dict[str, torch.Tensor] = {}
        for path, leaf in flatten(value):
            if path not in names or not isinstance(leaf, torch.Tensor):
                continue
            site = f"{tap.path}:{kind}[{path}]" if path else f"{tap.path}:{kind}"
            try:
                changes[path] = self._read(names[path], step, leaf, occurrence)
                self.injected[site] = self.injected.get(site, 0) + 1
            except (LookupError, TapscopeError) as error:
                self.problems.append(Problem(site, step.step, str(error)))
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.problems.append(Problem(site, step.step, f"{type(error).__name__}: {error}"))
        return changes

    def _read(self, site: str, step: StepInfo, leaf: torch.Tensor, occurrence: int) -> torch.Tensor:
        while True:
            try:
                return self._values.read(site, step, leaf, occurrence)
            except NotRecordedError:
                if not self._wait(step.step):
                    raise


def _replaced(value: Any, path: str, changes: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with the leaves at the paths in ``changes`` replaced; paths are those of :func:`flatten`."""
    if isinstance(value, torch.Tensor):
        return changes.get(path, value)
    if not any(name == path or name.startswith(f"{path}.") or not path for name in changes):
        return value

    def below(name: str) -> str:
        return f"{path}.{name}" if path else name

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [_replaced(x, below(n), changes) for n, x in zip(value._fields, value, strict=True)]
        return type(value)(*parts)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(x, below(str(i)), changes) for i, x in enumerate(value))
    if isinstance(value, dict):
        new = copy.copy(value)  # preserves the type (ModelOutput) and leaves the caller's mapping unchanged
        for key, each in value.items():
            new[key] = _replaced(each, below(path_part(str(key))), changes)
        return new
    return value
